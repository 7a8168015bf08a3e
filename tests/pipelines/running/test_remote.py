import json
import re
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
from apache_beam.options.pipeline_options import PipelineOptions, PortableOptions
from apache_beam.portability.api import beam_job_api_pb2

from pipelines.running import remote
from pipelines.running.execution import Execution
from pipelines.running.meter import Meter
from pipelines.running.remote import RemoteJob, check_detach, check_job_service, runner_log, wait, watch
from schemas.errors import ImagepivotError, LostJobError, UsageError
from schemas.process import shutdown
from schemas.process.shutdown import DetachedError
from schemas.storage.folder import Folder
from tests.stores import free_port
from tests.web_server import serve

JOB = RemoteJob("FlinkRunner", "job-1", "http://page", "curl -X PATCH http://page/cancel")


class Run:
    """A run of Beam's that ends when it is told to."""

    def __init__(self, error: Exception | None = None, state: str | None = "RUNNING") -> None:
        self.error, self.ended, self.cancelled, self._state = error, threading.Event(), False, state

    def wait_until_finish(self) -> None:
        assert self.ended.wait(60)
        if self.error is not None:
            raise self.error

    @property
    def state(self) -> str:
        if self._state is None:
            raise ConnectionError("nobody answers")
        return self._state

    def job_id(self) -> str:
        return "job-1"

    def cancel(self) -> None:
        self.cancelled = True
        self.ended.set()


@pytest.mark.slow
def test_wait_cancels_a_run_without_workers():
    run = Run()
    with pytest.raises(TimeoutError, match=r"no worker has started within 0 seconds: .* FlinkRunner was asked to") as caught:
        wait(run, JOB, has_started=lambda: False, seconds=0.1)
    assert run.cancelled
    assert str(caught.value).endswith(f"cancel job 'job-1' of FlinkRunner, which may still run. {JOB.advice}")


@pytest.mark.slow
def test_run_may_take_its_time_once_a_worker_has_started():
    run, asked = Run(), []

    def has_started() -> bool:
        asked.append(1)
        threading.Timer(1.5, run.ended.set).start()
        return True

    wait(run, JOB, has_started=has_started, seconds=0.1)
    assert (asked, run.cancelled) == ([1], False)


DATAFLOW = Execution(beam_flags=("--runner=DataflowRunner", "--project=p", "--region=r"))


@pytest.mark.parametrize("state", ["FAILED", "CANCELLED"])
def test_watch_raises_the_error_of_an_ended_job(tmp_path, state):
    run = Run(RuntimeError("failed"), state)
    run.ended.set()
    with pytest.raises(RuntimeError, match=r"^failed$"):
        watch(run, execution=DATAFLOW, output=Folder(str(tmp_path)), meter=Meter())
    assert shutdown.current_notice() is None


@pytest.mark.parametrize("state", ["RUNNING", None])
def test_watch_of_a_running_job_raises_lost_job(tmp_path, state):
    run = Run(ConnectionError("reset by peer\nand more"), state)
    run.ended.set()
    expected = (
        "lost job 'job-1' of DataflowRunner (ConnectionError: reset by peer): it may continue. Run the same command after "
        "the job has ended to use its shards. Its page: https://console.cloud.google.com/dataflow/jobs/r/job-1?project=p To "
        "cancel the job: gcloud dataflow jobs cancel job-1 --project=p --region=r"
    )
    with pytest.raises(LostJobError, match=f"^{re.escape(expected)}$"):
        watch(run, execution=DATAFLOW, output=Folder(str(tmp_path)), meter=Meter())


def test_detached_launcher_does_not_wait(tmp_path):
    execution = replace(DATAFLOW, detach=True)
    message = r"^job 'job-1' of DataflowRunner is submitted and continues without this command\. "
    with pytest.raises(DetachedError, match=message) as caught:
        watch(Run(), execution=execution, output=Folder(str(tmp_path)), meter=Meter())
    assert caught.value.job == {
        "runner": "DataflowRunner",
        "id": "job-1",
        "page": "https://console.cloud.google.com/dataflow/jobs/r/job-1?project=p",
        "cancel": "gcloud dataflow jobs cancel job-1 --project=p --region=r",
    }


def test_detach_without_a_job_service_is_refused():
    check_detach(replace(DATAFLOW, detach=True))
    check_detach(Execution(beam_flags=("--runner=PortableRunner", "--job_endpoint=host:1"), detach=True))
    for flags in (("--runner=FlinkRunner",), ("--runner=PortableRunner", "--job_endpoint=embed")):
        with pytest.raises(UsageError, match=r"^--detach needs a job service that outlives this command, and \w+ has none"):
            check_detach(Execution(beam_flags=flags, detach=True))


@pytest.fixture
def flink():
    """Address of a cluster that lists its jobs."""
    jobs = [("old", "captions-1", 1), ("new", "captions-1", 5), ("other", "captions-2", 9)]
    listed = [{"jid": jid, "name": name, "start-time": since, "state": "RUNNING"} for jid, name, since in jobs]
    with serve() as site:
        site.pages["/jobs/overview"] = json.dumps({"jobs": listed}).encode()
        yield f"127.0.0.1:{site.port}"


def run_on_flink(name: str, master: str) -> SimpleNamespace:
    """A result of Beam's job service, which has handed the job to Flink."""
    info = beam_job_api_pb2.JobInfo(job_id="captions-1_0", job_name=name)
    info.pipeline_options["beam:option:flink_master:v1"] = master
    other = beam_job_api_pb2.JobInfo(job_id="x", job_name="x")
    service = SimpleNamespace(GetJobs=lambda request, timeout: SimpleNamespace(job_info=[other, info]))
    return SimpleNamespace(_job_id="captions-1_0", _job_service=service)


def detached_job(result: object, *flags: str) -> dict[str, str]:
    execution = Execution(beam_flags=("--runner=PortableRunner", "--job_endpoint=host:1", *flags), detach=True)
    with pytest.raises(DetachedError) as caught:
        watch(result, execution=execution, output=Folder("gs://b/x"), meter=Meter())
    return caught.value.job


def test_job_on_flink_is_found_by_its_name(flink):
    expected = {
        "runner": "PortableRunner",
        "id": "captions-1_0",
        "page": f"http://{flink}/#/job/running/new/overview",
        "cancel": f"curl -X PATCH 'http://{flink}/jobs/new?mode=cancel'",
    }
    assert detached_job(run_on_flink("captions-1", flink)) == expected
    assert detached_job(run_on_flink("captions-1", "elsewhere:8081"), f"--flink_master=http://{flink}/") == expected


def test_job_missing_in_flink_has_the_page_of_the_cluster(flink, monkeypatch):
    monkeypatch.setattr(remote, "_HANDOVER_SECONDS", 0.0)
    job = detached_job(run_on_flink("captions-3", flink))
    assert (job["page"], job["cancel"]) == (f"http://{flink}", "")
    for nowhere in ("[local]", "[auto]", ""):
        assert detached_job(run_on_flink("captions-1", nowhere))["page"] == ""
    assert detached_job(run_on_flink("captions-1", f"127.0.0.1:{free_port()}"))["cancel"] == ""


def test_jobs_of_dataflow_get_a_name_unless_they_have_one():
    assert DATAFLOW.with_job_name("imagepivot-captions-1").beam_flags[-1] == "--job_name=imagepivot-captions-1"
    named = replace(DATAFLOW, beam_flags=(*DATAFLOW.beam_flags, "--job_name=mine"))
    assert named.with_job_name("x") is named
    spark = Execution(beam_flags=("--runner=SparkRunner",))
    assert spark.with_job_name("x") is spark


GONE = r"^FlinkRunner did not finish the run: a worker process ended unexpectedly, because it was killed or ran out"


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (
            "Traceback\nModuleNotFoundError: No module named 'torch'",
            r"No module named 'torch' \(the workers' environment lacks it\)",
        ),
        (
            "Pipeline job-007 failed in state FAILED: bundle inst011 stage-012 failed:SDK worker disconnected: "
            "worker[job-007[job]], error: context canceled",
            GONE,
        ),
    ],
)
def test_last_line_names_the_cause(said, expected):
    with pytest.raises(ImagepivotError, match=expected), runner_log("FlinkRunner"):
        raise RuntimeError(said)


@pytest.mark.parametrize("flags", [(), ("--job_endpoint=embed",), ("--job_server_timeout=7",)])
def test_run_is_not_limited_by_the_time_of_an_answer(flags):
    options = PipelineOptions(list(flags))
    check_job_service(options, flags)
    assert options.view_as(PortableOptions).job_server_timeout > 30 * 24 * 3600
