"""The stand-in for Dataflow with Flex Templates: a launch starts the launcher, and the job that it writes is executed.

Run as ``python -m tests.containers.flex_service PORT FOLDER LAUNCHER...``; the last are the words that start the launcher, to which
its arguments are added. Parameters are checked against the template's metadata, as Google documents it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import urllib.parse
from pathlib import Path
from typing import Any, ClassVar

from tests import dataflow_service

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
    request: dict[str, Any], place: re.Match[str], service: dataflow_service.Service, launcher: list[str]
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
    done = subprocess.run([*launcher, *words, "--no_auth"], capture_output=True, text=True, check=False)
    (service.folder.parent / f"{asked['jobName']}.log").write_text(done.stdout + done.stderr)
    if done.returncode:
        raise _RefusedError(f"The launcher failed: {done.stderr}")
    return {"job": service.create(json.loads(dataflow_service._download(flags["template_location"]))).answer()}


class _Handler(dataflow_service._Handler):
    launcher: ClassVar[list[str]] = []
    lock = threading.Lock()

    def do_POST(self) -> None:
        place = _LAUNCH.fullmatch(urllib.parse.unquote(urllib.parse.urlsplit(self.path).path))
        if place is None:
            super().do_POST()
            return
        try:
            with self.lock:
                self._send(200, launch(self._body(), place, self.server, self.launcher))
        except _RefusedError as error:
            self._send(400, {"error": {"code": 400, "message": str(error), "status": "INVALID_ARGUMENT"}})


if __name__ == "__main__":
    _Handler.launcher = sys.argv[3:]
    dataflow_service._Handler = _Handler
    dataflow_service.main(int(sys.argv[1]), Path(sys.argv[2]))
