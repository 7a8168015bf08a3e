"""A job on Flink that its job service gives up; tests/cluster/test_engines.py has a real Flink, whose answers these are."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc
import pytest
from apache_beam.portability.api import beam_job_api_pb2, beam_job_api_pb2_grpc

from pipelines.running import flink_cluster
from pipelines.running.flink_cluster import FlinkCluster
from pipelines.running.launching import cancel_job
from pipelines.running.portable_service import PortableService
from pipelines.running.services import SilentError
from schemas.errors import ImagepivotError
from schemas.remote_jobs import JOB_NAME, RemoteJob
from schemas.storage import Folder
from tests.stores import free_port

NAME = "BeamApp-anna-1122-0f"


class Flink:
    """A Flink whose jobs are written down; a job that is told to ends at once."""

    def __init__(self) -> None:
        self.jobs = [["1", "other", "RUNNING"], ["2", NAME, "FAILED"], ["3", NAME, "RESTARTING"]]
        self.asked: list[str] = []
        self.answers: bytes | None = None
        flink = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = [{"jid": jid, "name": name, "state": state} for jid, name, state in flink.jobs]
                self.answer(200, json.dumps({"jobs": found}).encode() if flink.answers is None else flink.answers)

            def do_PATCH(self) -> None:
                flink.asked.append(self.path)
                (job,) = [job for job in flink.jobs if self.path == f"/jobs/{job[0]}?mode=cancel"]
                job[2] = "CANCELED"
                self.answer(202, b"{}")

            def answer(self, code: int, data: bytes) -> None:
                self.send_response(code)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self.server.server_address[1]}"


@pytest.fixture
def flink(monkeypatch) -> Iterator[Flink]:
    monkeypatch.setattr(flink_cluster, "_HAND_OVER_SECONDS", 0.1)
    flink = Flink()
    thread = threading.Thread(target=flink.server.serve_forever, args=(0.01,))
    thread.start()
    yield flink
    flink.server.shutdown()
    thread.join()
    flink.server.server_close()


@pytest.mark.parametrize("scheme", ["", "http://"])
def test_the_job_of_a_name_is_cancelled_and_no_other(flink, scheme):
    cluster = FlinkCluster(f"{scheme}{flink.address}")
    assert cluster.runs(NAME)
    cluster.cancel(NAME)
    assert flink.asked == ["/jobs/3?mode=cancel"]
    assert not cluster.runs(NAME)
    cluster.cancel(NAME)  # It has ended already.
    assert len(flink.asked) == 1


@pytest.mark.slow
def test_what_is_not_clear_is_not_cancelled(flink):
    cluster = FlinkCluster(flink.address)
    with pytest.raises(SilentError, match=rf"'http://{flink.address}' knows no job 'gone'\. Cancel the job on Flink's page"):
        cluster.cancel("gone")
    flink.jobs.append(["4", NAME, "RUNNING"])
    with pytest.raises(SilentError, match=rf"runs 2 jobs '{NAME}'\. Cancel the job on Flink's page"):
        cluster.cancel(NAME)
    flink.answers = b"<html>"
    with pytest.raises(SilentError, match=r"gives no answer of Flink's"):
        cluster.cancel(NAME)
    with pytest.raises(SilentError, match=r"does not answer: .*refused"):
        FlinkCluster(f"127.0.0.1:{free_port()}").runs(NAME)
    assert flink.asked == []


# --- behind a job service ----------------------------------------------------------------------------------------------


class Service(beam_job_api_pb2_grpc.JobServiceServicer):
    """A job service that gives a job up at once, as Beam's for Flink does."""

    def __init__(self, master: str) -> None:
        self.now = beam_job_api_pb2.JobState.RUNNING
        self.info = beam_job_api_pb2.JobInfo(job_id=f"{NAME}_1-2", job_name=NAME)
        self.info.pipeline_options["beam:option:flink_master:v1"] = master

    def GetState(self, request, context):
        return beam_job_api_pb2.JobStateEvent(state=self.now)

    def GetJobs(self, request, context):
        return beam_job_api_pb2.GetJobsResponse(job_info=[self.info])

    def Cancel(self, request, context):
        self.now = beam_job_api_pb2.JobState.CANCELLED
        return beam_job_api_pb2.CancelJobResponse(state=self.now)


@pytest.fixture
def serve() -> Iterator[object]:
    servers = []

    def run(service: Service) -> str:
        servers.append(grpc.server(ThreadPoolExecutor(2)))
        beam_job_api_pb2_grpc.add_JobServiceServicer_to_server(service, servers[-1])
        port = servers[-1].add_insecure_port("127.0.0.1:0")
        servers[-1].start()
        return f"127.0.0.1:{port}"

    yield run
    for server in servers:
        server.stop(0).wait()


def submitted(tmp_path, endpoint: str) -> Folder:
    folder = Folder(str(tmp_path / "out"))
    job = RemoteJob.of_launcher("PortableRunner", ("--runner=PortableRunner", f"--job_endpoint={endpoint}"), "w")
    assert job.claim(folder)
    job.accepted(folder, f"{NAME}_1-2")
    return folder


def test_a_job_is_cancelled_where_it_runs(flink, serve, tmp_path):
    folder = submitted(tmp_path, serve(Service(flink.address)))
    assert cancel_job(folder.location).startswith(f"cancelled: PortableRunner says that job '{NAME}_1-2' has ended")
    assert flink.asked == ["/jobs/3?mode=cancel"]
    assert folder.names() == []


def test_a_job_that_flink_may_go_on_with_is_not_called_cancelled(flink, serve, tmp_path):
    """The job service knows Flink by an address that means nothing here, until the user gives one that does."""
    service = Service(f"127.0.0.1:{free_port()}")
    folder = submitted(tmp_path, serve(service))
    said = (
        r"did not cancel job .* \(it gives the job up without telling Flink, and 'http://127\.0\.0\.1:\d+' does not answer: .*"
        r"imagepivot cancel OUTPUT -- --flink_master=http://HOST:8081\): it may go on$"
    )
    for _ in range(2):  # The second time, too: the service calls it cancelled by then.
        with pytest.raises(ImagepivotError, match=said):
            cancel_job(folder.location)
        assert folder.names() == [JOB_NAME]
    assert service.now == beam_job_api_pb2.JobState.CANCELLED
    assert cancel_job(folder.location, (f"--flink_master={flink.address}",)).startswith("cancelled: ")
    assert flink.asked == ["/jobs/3?mode=cancel"]


def test_a_job_that_goes_on_has_not_ended(flink, serve):
    service = Service(flink.address)
    asked = PortableService(serve(service))
    assert asked.state(f"{NAME}_1-2") == "RUNNING"
    service.now = beam_job_api_pb2.JobState.CANCELLED
    assert asked.state(f"{NAME}_1-2") == "CANCELLING"
    flink.jobs[2][2] = "CANCELED"
    assert asked.state(f"{NAME}_1-2") == "CANCELLED"


@pytest.mark.parametrize("master", ["[auto]", "[local]", ""])
def test_without_an_address_of_flink_the_service_is_believed(serve, tmp_path, master):
    folder = submitted(tmp_path, serve(Service(master)))
    assert cancel_job(folder.location).startswith("cancelled: PortableRunner says")
