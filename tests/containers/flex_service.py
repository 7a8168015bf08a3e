"""The stand-in for Dataflow with Flex Templates: a launch starts the launcher, and the job that it writes is executed.

Run as ``python -m tests.containers.flex_service PORT FOLDER CONTAINERS``; the last is a file with the words, by image, that start a
command in a container of it. Parameters are checked against the template's metadata, as Google documents it. Workers run in the
image that a job names, started as Beam's in-process runner starts them, and not by the program in the image.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import threading
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any, ClassVar

from tests import dataflow_service

_OF_A_WORKER = (
    *("CONTROL_API_SERVICE_DESCRIPTOR", "LOGGING_API_SERVICE_DESCRIPTOR", "WORKER_ID", "PIPELINE_OPTIONS_FILE"),
    *("HOME", "TMPDIR", "SEMI_PERSISTENT_DIRECTORY"),
)
_LAUNCH = re.compile(r"/v1b3/projects/(?P<project>[^/]+)/locations/(?P<region>[^/]+)/flexTemplates:launch")


class _RefusedError(ValueError):
    """A launch that the service does not begin."""


def check(described: list[dict[str, Any]], given: dict[str, str]) -> None:
    """Refuse parameters that the metadata does not allow."""
    known = {parameter["name"]: parameter for parameter in described}
    if unknown := [name for name in given if name not in known]:
        raise _RefusedError(f"Unrecognized parameter: {unknown[0]}")
    if absent := [name for name, parameter in known.items() if not parameter.get("isOptional") and name not in given]:
        raise _RefusedError(f"Missing required parameter: {absent[0]}")
    for name, value in given.items():
        if not all(re.fullmatch(pattern, value) for pattern in known[name].get("regexes", ())):
            raise _RefusedError(f"Invalid value for parameter {name}: {value}")


def launch(
    request: dict[str, Any], place: re.Match[str], service: dataflow_service.Service, containers: dict[str, list[str]]
) -> dict[str, Any]:
    """Start the launcher, and create the job that it leaves where it was told."""
    asked = request["launchParameter"]
    spec = json.loads(dataflow_service._download(asked["containerSpecGcsPath"]))
    check(spec["metadata"]["parameters"], asked.get("parameters", {}))
    staged = f"gs://bucket/staging/template_launches/{asked['jobName']}"
    flags = {
        **asked.get("parameters", {}),
        "runner": "DataflowRunner",
        **place.groupdict(),
        "job_name": asked["jobName"],
        "temp_location": "gs://bucket/tmp",
        "staging_location": "gs://bucket/staging",
        "template_location": f"{staged}/job_object",
    }
    words = [f"--{name}={value}" for name, value in flags.items()]
    done = subprocess.run([*containers[spec["image"]], *words, "--no_auth"], capture_output=True, text=True, check=False)
    (service.folder.parent / f"{asked['jobName']}.log").write_text(done.stdout + done.stderr)
    if done.returncode:
        raise _RefusedError(f"The launcher failed: {done.stderr}")
    return {"job": service.create(json.loads(dataflow_service._download(flags["template_location"]))).answer()}


def install(environment: Any, folder: Path, containers: dict[str, list[str]]) -> Path:
    """Return a program that runs Python in a container of the environment's image."""
    from apache_beam.portability.api import beam_runner_api_pb2

    name = beam_runner_api_pb2.DockerPayload.FromString(environment.payload).container_image
    if name not in containers:
        raise ValueError(f"the image {name!r} cannot be pulled")
    for place in ("tmp", "work"):
        (folder / place).mkdir(parents=True)
    passed = " ".join(f'--env {variable}="${variable}"' for variable in _OF_A_WORKER)
    *start, container, end = containers[name]
    program = folder / "python"
    program.write_text(
        f'#!/bin/sh\nexec {shlex.join(start)} {passed} --volume {folder.parent}:{folder.parent} {container} {end} python "$@"\n'
    )
    program.chmod(0o755)
    return program


def upload(path: str, kind: str, data: bytes) -> dict[str, Any]:
    """Pass an upload on to the store's emulator, which does not know quotes as gcloud writes them."""
    headers = {"Content-Type": kind.replace("'", '"')}
    request = urllib.request.Request(os.environ["STORAGE_EMULATOR_HOST"] + path, data, headers, method="POST")
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


class _Handler(dataflow_service._Handler):
    containers: ClassVar[dict[str, list[str]]] = {}
    lock = threading.Lock()

    def do_POST(self) -> None:
        place = _LAUNCH.fullmatch(urllib.parse.unquote(urllib.parse.urlsplit(self.path).path))
        if self.path.startswith("/upload/"):
            data = self.rfile.read(int(self.headers["Content-Length"]))
            self._send(200, upload(self.path, self.headers["Content-Type"], data))
            return
        if place is None:
            super().do_POST()
            return
        try:
            with self.lock:
                self._send(200, launch(self._body(), place, self.server, self.containers))
        except _RefusedError as error:
            self._send(400, {"error": {"code": 400, "message": str(error), "status": "INVALID_ARGUMENT"}})


if __name__ == "__main__":
    _Handler.containers = json.loads(Path(sys.argv[3]).read_text())
    dataflow_service._install = lambda environment, folder, *_: install(environment, folder, _Handler.containers)
    dataflow_service._Handler = _Handler
    dataflow_service.main(int(sys.argv[1]), Path(sys.argv[2]))
