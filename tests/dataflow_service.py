"""A stand-in for Google Cloud Dataflow on this machine: what Beam's own client asks of the service, and the execution of a job.

A job runs as on the service's machines: from nothing but what the client staged. For each environment of the staged pipeline there
is a new virtual environment, which holds the packages of this one without ours, in place of the container image; the staged
packages are checked against their digests and installed into it without a network; and Beam's own worker starts there, in a folder
with foreign modules, with no variables of ours, a home folder and a temporary folder of its own. Beam's in-process runner moves
the data, in a process that cannot import our packages either.

What it does not do: machines, images of users, splitting of work while it runs, streaming. A worker that dies makes the whole job
start again, where Dataflow repeats the bundle, and as there the fourth time is the last. An error that is raised is final.

Run as ``python tests/dataflow_service.py PORT FOLDER``; ``STORAGE_EMULATOR_HOST`` names the store. For jobs that start from then on
a file ``image.json`` in the folder says what is special about the image: ``path``, a folder with modules that it has.
"""

import contextlib
import hashlib
import itertools
import json
import logging
import multiprocessing
import os
import re
import shlex
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import traceback
import urllib.parse
import urllib.request
import venv
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

OURS = ("imagepivot", "schemas", "extractors", "pipelines", "train")
_ATTEMPTS = 4
_KEPT = ("PATH", "LANG", "STORAGE_EMULATOR_HOST", "NO_PROXY", "no_proxy", "OMP_NUM_THREADS", "OMP_WAIT_POLICY")
_JOBS = re.compile(r"/v1b3/projects/[^/]+/locations/[^/]+/jobs(?:/(?P<id>[^/]+)(?:/(?P<part>messages|metrics))?)?")
_STATES = {"5": "JOB_STATE_CANCELLED"}  # The client may send the number.
_FORKS = multiprocessing.get_context("forkserver")
_TELLING = threading.Lock()


# --- what was staged ---------------------------------------------------------------------------------------------------


def _download(url: str, sha256: str = "") -> bytes:
    """Return a staged object, which must have the digest that the client announced."""
    bucket, _, name = url.removeprefix("gs://").partition("/")
    place = f"{os.environ['STORAGE_EMULATOR_HOST']}/storage/v1/b/{bucket}/o/{urllib.parse.quote(name, safe='')}?alt=media"
    with urllib.request.urlopen(place, timeout=60) as answer:
        data = answer.read()
    if sha256 and hashlib.sha256(data).hexdigest() != sha256:
        raise ValueError(f"the staged file {url} is not the one that was announced")
    return data


def _make_image(folder: Path, image: dict[str, Any]) -> Path:
    """Make a virtual environment with links to the packages of this one, but for ours."""
    venv.EnvBuilder(symlinks=True, with_pip=False).create(folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    names = "|".join(map(re.escape, OURS))
    left_out = re.compile(rf"(__editable__.*|__pycache__|({names})(-[^-]*\.dist-info|\.py|\.libs)?)$")
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not left_out.match(entry.name):
            (packages / entry.name).symlink_to(entry)
    if "path" in image:
        (packages / "more.pth").write_text(image["path"] + "\n")
    return folder / "bin" / "python"


def _install(environment: Any, folder: Path, images: Path, image: dict[str, Any]) -> Path:
    """Do what the start of a container does with the dependencies of an environment; return its Python.

    Equal packages on equal images are installed once.
    """
    from apache_beam import __version__
    from apache_beam.portability import common_urns
    from apache_beam.portability.api import beam_runner_api_pb2 as api

    name = api.DockerPayload.FromString(environment.payload).container_image
    if not name.endswith(f"/beam_python{sys.version_info[0]}.{sys.version_info[1]}_sdk:{__version__}"):
        raise ValueError(f"the image {name!r} cannot be pulled")
    for place in ("staged", "tmp", "work/schemas"):
        (folder / place).mkdir(parents=True)
    for module in ("schemas/__init__.py", "train.py"):
        (folder / "work" / module).write_text("raise RuntimeError('this is not ours')\n")
    for dependency in environment.dependencies:
        if dependency.type_urn != common_urns.artifact_types.URL.urn:
            raise ValueError(f"a dependency is no staged file: {dependency}")
        file = api.ArtifactUrlPayload.FromString(dependency.type_payload)
        name = api.ArtifactStagingToRolePayload.FromString(dependency.role_payload).staged_name
        (folder / "staged" / name).write_bytes(_download(file.url, file.sha256))
    listed = folder / "staged" / "extra_packages.txt"
    packages = [folder / "staged" / name for name in listed.read_text().split()] if listed.exists() else []
    digest = hashlib.sha256(json.dumps(image).encode() + b"".join(path.read_bytes() for path in packages)).hexdigest()
    if not (images / digest).exists():
        with tempfile.TemporaryDirectory(dir=images) as making:
            python = _make_image(Path(making) / "image", image)
            options = ("-m", "pip", "install", "--no-index", "--no-cache-dir", "--disable-pip-version-check")
            command = [str(python), *options, *packages]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False) if packages else None
            if done and done.returncode:
                raise ValueError(f"Failed to install packages: {done.stderr.strip()}")
            (Path(making) / "image").rename(images / digest)
    return images / digest / "bin" / "python"


# --- one attempt -------------------------------------------------------------------------------------------------------


def _attempt(folder: Path, options: dict[str, Any], pythons: dict[str, tuple[str, str]], processes: int) -> None:
    """Run the staged pipeline once; called in a new process, which leads a group."""
    os.setsid()
    for number in (1, 2):
        os.dup2(os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    os.environ.clear()
    os.environ.update(kept)
    sys.modules.update(dict.fromkeys(OURS))
    logging.basicConfig(level=logging.INFO)
    from apache_beam.options.pipeline_options import PipelineOptions
    from apache_beam.portability import python_urns
    from apache_beam.portability.api import beam_runner_api_pb2
    from apache_beam.runners.portability.fn_api_runner import FnApiRunner

    def end(outcome: dict[str, Any]) -> None:
        _tell(folder, outcome)
        os.killpg(0, signal.SIGKILL)  # Beam waits for workers that hang, or never came.

    # The thread that waits for a worker fails with it.
    threading.excepthook = lambda fault: end({"died": str(fault.exc_value)})
    (folder / "options.json").write_text(json.dumps({"options": {name: _whole(value) for name, value in options.items()}}))
    pipeline = beam_runner_api_pb2.Pipeline.FromString((folder / "pipeline.pb").read_bytes())
    for name, environment in pipeline.components.environments.items():
        python, place = pythons[name][0], Path(pythons[name][1])
        settings = {"HOME": place, "TMPDIR": place / "tmp", "SEMI_PERSISTENT_DIRECTORY": place}
        settings["PIPELINE_OPTIONS_FILE"] = folder / "options.json"
        variables = " ".join(f"{key}={shlex.quote(str(value))}" for key, value in settings.items())
        work = shlex.quote(str(place / "work"))
        command = f"cd {work} && exec env {variables} {shlex.quote(python)} -m apache_beam.runners.worker.sdk_worker_main"
        environment.urn, environment.payload = python_urns.SUBPROCESS_SDK, command.encode()
    runner = FnApiRunner()
    runner._num_workers = processes
    try:
        result = runner.run_via_runner_api(pipeline, PipelineOptions([]))
    except Exception as error:  # noqa: BLE001 -- told to the client
        traceback.print_exc()
        died = "Channel closed prematurely" in str(error)
        end({"died" if died else "error": str(error)})
    counters = [
        {"name": found.key.metric.name, "namespace": found.key.metric.namespace, "step": found.key.step, "value": value}
        for found in result.metrics().query()["counters"]
        if isinstance(value := found.committed, int)
    ]
    end({"counters": counters})


def _whole(value: Any) -> Any:
    """Return a number of the request as the service writes it: JSON of the client has 1.0 for 1."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _tell(folder: Path, outcome: dict[str, Any]) -> None:
    """Write how an attempt ended, unless another thread of it has: two notice a worker that dies."""
    with _TELLING:
        if not (folder / "outcome").exists():
            (folder / "outcome~").write_text(json.dumps(outcome))
            (folder / "outcome~").rename(folder / "outcome")


# --- jobs --------------------------------------------------------------------------------------------------------------


class Job:
    """A job and its thread.

    Args:
        name: its id.
        description: as the client sent it.
        folder: for everything that belongs to it.
    """

    def __init__(self, name: str, description: dict[str, Any], folder: Path) -> None:
        self.id = name
        self.description = description
        self.state = "JOB_STATE_RUNNING"
        self.messages: list[dict[str, str]] = []
        self.counters: list[dict[str, Any]] = []
        self._folder = folder
        self._process: Any = None
        self._lock = threading.Lock()
        threading.Thread(target=self._run, daemon=True).start()

    def answer(self) -> dict[str, Any]:
        """The description of the job that the client reads."""
        known = {name: self.description[name] for name in ("name", "clientRequestId", "type") if name in self.description}
        return {**known, "id": self.id, "currentState": self.state}

    def metrics(self) -> dict[str, Any]:
        """The counters, each as it is tentatively and as it is committed."""
        metrics = []
        for counter in self.counters:
            for tentative in ({}, {"tentative": "true"}):
                context = {"namespace": counter["namespace"], "step": counter["step"], **tentative}
                name = {"origin": "user", "name": counter["name"], "context": context}
                metrics.append({"name": name, "scalar": counter["value"]})
        return {"metrics": metrics}

    def cancel(self) -> None:
        """End it."""
        with self._lock:
            if self.state == "JOB_STATE_RUNNING":
                self.state = "JOB_STATE_CANCELLED"
                self._kill()

    def _kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _say(self, text: str, importance: str = "JOB_MESSAGE_ERROR") -> None:
        time = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        self.messages.append(
            {"id": str(len(self.messages)), "time": time, "messageText": text, "messageImportance": importance}
        )

    def _end(self, state: str) -> None:
        with self._lock:
            if self.state == "JOB_STATE_RUNNING":
                self.state = state

    def _run(self) -> None:
        try:
            self._execute()
        except Exception as error:  # noqa: BLE001 -- told to the client
            traceback.print_exc()
            self._say(str(error))
            self._say(f"Workflow failed. Causes: {str(error).strip().splitlines()[-1]}.")
            self._end("JOB_STATE_FAILED")

    def _execute(self) -> None:
        from apache_beam.portability.api import beam_runner_api_pb2

        environment = self.description["environment"]
        options = environment["sdkPipelineOptions"]
        self._folder.mkdir(parents=True)
        (self._folder / "job.json").write_text(json.dumps(self.description, indent=2))
        staged = _download(options["options"]["pipelineUrl"], options["options"]["pipelineProtoHash"])
        (self._folder / "pipeline.pb").write_bytes(staged)
        for package in environment["workerPools"][0].get("packages", ()):
            _download("gs://" + package["location"].partition("/")[2])
        pipeline = beam_runner_api_pb2.Pipeline.FromString(staged)
        root = self._folder.parent.parent
        image = json.loads((root / "image.json").read_text()) if (root / "image.json").exists() else {}
        pythons = {}
        for number, (name, each) in enumerate(sorted(pipeline.components.environments.items())):
            place = self._folder / f"environment-{number}"
            pythons[name] = (str(_install(each, place, root / "images", image)), str(place))
        processes = 1 if "no_use_multiple_sdk_containers" in environment.get("experiments", ()) else 2
        for attempt in itertools.count(1):
            (self._folder / "outcome").unlink(missing_ok=True)
            with self._lock:
                if self.state != "JOB_STATE_RUNNING":
                    return
                self._process = _FORKS.Process(target=_attempt, args=(self._folder, options["options"], pythons, processes))
                self._process.start()
            self._process.join()
            if self.state != "JOB_STATE_RUNNING":
                return
            outcome = json.loads((self._folder / "outcome").read_text())
            if "counters" in outcome:
                self.counters = outcome["counters"]
                self._end("JOB_STATE_DONE")
                return
            if "error" in outcome:
                self._say(f"Error message from worker: generic::unknown: {outcome['error']}")
                self._say("Workflow failed. Causes: a work item was attempted 4 times without success.")
                self._end("JOB_STATE_FAILED")
                return
            self._say("The worker lost contact with the service.", "JOB_MESSAGE_WARNING")
            if attempt == _ATTEMPTS:
                self._say(
                    "Workflow failed. Causes: The job failed because a work item has failed 4 times. Root cause: The worker lost "
                    "contact with the service. A work item was attempted 4 times without success."
                )
                self._end("JOB_STATE_FAILED")
                return


# --- the service -------------------------------------------------------------------------------------------------------


class Service(ThreadingHTTPServer):
    """The service.

    Args:
        port: where it answers.
        folder: for its jobs.
    """

    daemon_threads = True

    def __init__(self, port: int, folder: Path) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.folder = folder
        self.jobs: dict[str, Job] = {}

    def create(self, description: dict[str, Any]) -> Job:
        """Make a job, and start it."""
        name = f"job-{len(self.jobs) + 1}"
        self.jobs[name] = Job(name, description, self.folder / name)
        return self.jobs[name]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Service

    def do_GET(self) -> None:
        address = urllib.parse.urlsplit(self.path)
        found = _JOBS.fullmatch(address.path)
        job = self.server.jobs.get(found["id"] or "") if found else None
        if job is None or found is None:
            self._send(404, {"error": {"code": 404, "message": f"no {self.path}", "status": "NOT_FOUND"}})
        elif found["part"] == "messages":
            since = urllib.parse.parse_qs(address.query).get("startTime", [""])[0]
            self._send(200, {"jobMessages": [each for each in job.messages if each["time"] >= since]})
        else:
            self._send(200, job.metrics() if found["part"] else job.answer())

    def do_POST(self) -> None:
        self._send(200, self.server.create(self._body()).answer())

    def do_PUT(self) -> None:
        found = _JOBS.fullmatch(urllib.parse.urlsplit(self.path).path)
        job = self.server.jobs[found["id"]] if found else None
        wanted = str(self._body()["requestedState"])
        if job is None or _STATES.get(wanted, wanted) != "JOB_STATE_CANCELLED":
            self._send(400, {"error": {"code": 400, "message": f"cannot {wanted}", "status": "INVALID_ARGUMENT"}})
            return
        job.cancel()
        self._send(200, job.answer())

    def _body(self) -> dict[str, Any]:
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

    def _send(self, code: int, answer: dict[str, Any]) -> None:
        data = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def main(port: int, folder: Path) -> None:
    """Serve until the process is ended; then end its jobs."""
    _FORKS.set_forkserver_preload(["apache_beam.runners.portability.fn_api_runner.fn_runner"])
    for name in ("images", "jobs"):
        (folder / name).mkdir(parents=True)
    service = Service(port, folder / "jobs")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        service.serve_forever()
    finally:
        for job in service.jobs.values():
            job.cancel()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
