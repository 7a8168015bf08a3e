"""Asking Dataflow, whose part an answerer on this machine plays: it knows a few jobs, and what the stock client asks of it."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from apache_beam.options.pipeline_options import PipelineOptions

from pipelines.running.dataflow_service import DataflowService
from pipelines.running.services import SilentError, has_ended
from schemas.errors import UsageError

JobState = pytest.importorskip("google.cloud.dataflow").JobState
pytestmark = [pytest.mark.slow]

METRICS = [
    ("images", "step-1", "", 40),
    ("images", "step-1", "true", 55),
    ("images", "step-2", "true", 3),
    ("failed", "step-1", "", 1),
]


class Answers(BaseHTTPRequestHandler):
    jobs: dict[str, str]
    changes: list[tuple[str, int]]

    def do_GET(self) -> None:
        assert self.path.startswith("/v1b3/projects/p/locations/r/jobs/")
        name = self.path.partition("/jobs/")[2].partition("?")[0]
        job, _, what = name.partition("/")
        if job not in self.jobs:
            self._send(404, {"error": {"code": 404, "message": "no such job", "status": "NOT_FOUND"}})
        elif self.jobs[job] == "forbidden":
            self._send(403, {"error": {"code": 403, "message": "not yours", "status": "PERMISSION_DENIED"}})
        elif what == "metrics":
            self._send(200, {"metrics": [self._metric(*metric) for metric in METRICS]})
        else:
            self._send(200, {"id": job, "projectId": "p", "location": "r", "currentState": self.jobs[job]})

    def do_PUT(self) -> None:
        job = self.path.partition("/jobs/")[2].partition("?")[0]
        wanted = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["requestedState"]
        self.changes.append((job, wanted))
        self.jobs[job] = "JOB_STATE_CANCELLING"
        self._send(200, {"id": job, "currentState": self.jobs[job]})

    def log_message(self, *_: object) -> None:
        pass

    @staticmethod
    def _metric(name: str, step: str, tentative: str, count: int) -> dict[str, object]:
        context = {"namespace": "imagepivot", "step": step, **({"tentative": tentative} if tentative else {})}
        return {"name": {"origin": "user", "name": name, "context": context}, "scalar": count}

    def _send(self, code: int, content: object) -> None:
        data = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def answers() -> Iterator[tuple[type[Answers], DataflowService]]:
    class Own(Answers):
        jobs = {"running": "JOB_STATE_RUNNING", "failed": "JOB_STATE_FAILED", "foreign": "forbidden"}  # noqa: RUF012
        changes = []  # noqa: RUF012

    with ThreadingHTTPServer(("127.0.0.1", 0), Own) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        flags = [
            "--runner=DataflowRunner",
            "--project=p",
            "--region=r",
            f"--dataflow_endpoint=http://localhost:{server.server_port}",
            "--no_auth",
        ]
        yield Own, DataflowService(PipelineOptions(flags))
        server.shutdown()


def test_the_state_of_a_job(answers):
    _, service = answers
    assert service.name == "Dataflow in project 'p', region 'r'"
    assert service.state("running") == "RUNNING"
    assert service.state("failed") == "FAILED"
    assert has_ended(service.state("failed"))
    assert service.state("gone") is None
    with pytest.raises(SilentError, match="not yours"):
        service.state("foreign")


def test_a_job_is_cancelled(answers):
    server, service = answers
    service.cancel("running")
    assert server.changes == [("running", JobState.JOB_STATE_CANCELLED)]
    assert service.state("running") == "CANCELLING"
    assert not has_ended("CANCELLING")


def test_committed_counts_come_before_tentative_ones(answers):
    assert answers[1].counts("running") == {"images": 43, "failed": 1}


def test_a_job_of_another_launcher(answers):
    _, service = answers
    result = service.result("running")
    assert (result.job_id(), result.state) == ("running", "RUNNING")
    assert service.page("running") == "https://console.cloud.google.com/dataflow/jobs/r/running?project=p"


def test_what_leads_to_it_is_kept_and_enough(answers):
    _, service = answers
    again = DataflowService(PipelineOptions(["--runner=DataflowRunner", *service.flags]))
    assert again.flags == service.flags
    assert again.state("running") == "RUNNING"


def test_a_service_that_does_not_answer():
    flags = ["--project=p", "--region=r", "--dataflow_endpoint=http://localhost:1", "--no_auth"]
    with pytest.raises(SilentError, match="refused"):
        DataflowService(PipelineOptions(flags)).state("job")


def test_without_googles_packages(monkeypatch):
    monkeypatch.setitem(sys.modules, "apache_beam.runners.dataflow.internal.apiclient", None)
    monkeypatch.delattr("apache_beam.runners.dataflow.internal.apiclient")
    with pytest.raises(UsageError, match=r"asking Dataflow needs .*, which is not installed: pip install 'imagepivot\[gcp\]'"):
        DataflowService(PipelineOptions(["--project=p", "--region=r"])).state("job")
