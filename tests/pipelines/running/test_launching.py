"""A launcher and its job, with a runner whose answers a test writes. tests/integration/test_job_life.py has a real one."""

import threading
import time

import pytest
from apache_beam.options.pipeline_options import PipelineOptions

from pipelines.running import launching
from pipelines.running.dataflow_service import DataflowService
from pipelines.running.execution import Execution
from pipelines.running.launching import Launch, cancel_job, service_of, work_of
from pipelines.running.portable_service import PortableService
from pipelines.running.progress import Meter
from pipelines.running.services import SilentError
from schemas import interruption
from schemas.errors import DatasetError, ImagepivotError, UsageError
from schemas.fingerprints import Identity
from schemas.interruption import DetachedError
from schemas.output import Output
from schemas.remote_jobs import JOB_NAME, RemoteJob
from schemas.storage import Folder
from schemas.survey import Update

FLAGS = ("--runner=PortableRunner", "--job_endpoint=host:1")


class Runner:
    """A service, and its result of a job."""

    name = "the service"
    flags = FLAGS[1:]

    def __init__(self) -> None:
        self.now: str | None = "RUNNING"
        self.error: Exception | None = None
        self.cancelled: list[str] = []
        self.obeys = True
        self.ended = threading.Event()

    def state(self, job_id: str) -> str | None:
        if self.error is not None:
            raise self.error
        return self.now

    def cancel(self, job_id: str = "job-1") -> None:
        self.cancelled.append(job_id)
        if self.obeys:
            self.now = "CANCELLED"

    def counts(self, job_id: str) -> dict[str, int]:
        return {"images": 3}

    def result(self, job_id: str) -> "Runner":
        return self

    def page(self, job_id: str) -> str:
        return f"http://page/{job_id}"

    def job_id(self) -> str:
        return "job-1"

    def wait_until_finish(self) -> None:
        assert self.ended.wait(60)
        if self.now != "DONE":
            raise RuntimeError(f"it ended in state {self.now}")


@pytest.fixture
def runner(monkeypatch):
    runner = Runner()
    monkeypatch.setattr(launching, "service_of", lambda options: runner)
    monkeypatch.setattr(launching, "_CANCEL_SECONDS", 1.0)
    monkeypatch.setattr(launching, "_ASK_SECONDS", 0.01)
    yield runner
    runner.ended.set()
    interruption._left = None


@pytest.fixture
def folder(tmp_path):
    return Folder(str(tmp_path / "out"))


def launch(folder, *, work="w", meter=Meter(), notes=None, **settings) -> Launch:
    execution = Execution(beam_flags=FLAGS, note=(notes if notes is not None else []).append, **settings)
    return Launch(Output(folder, Identity("captions", {})), execution, meter, work=work)


def submitted(folder) -> RemoteJob:
    job = RemoteJob.of_launcher("PortableRunner", FLAGS, "w")
    assert job.claim(folder)
    return job.accepted(folder, "job-1")


def test_a_job_from_its_beginning_to_its_end(runner, folder, tmp_path):
    notes, meter = [], Meter(str(tmp_path))
    first = launch(folder, meter=meter, notes=notes)
    assert not first.join(overwrite=False)
    first.claim()
    assert RemoteJob.read(folder).id == ""

    def end() -> None:
        while not meter.total():
            time.sleep(0.01)
        runner.now = "DONE"
        runner.ended.set()

    threading.Thread(target=end).start()
    first.watch(runner)
    assert RemoteJob.read(folder).id == "job-1"
    first.close()
    assert folder.names() == []
    assert meter.total() == {"images": 3}
    assert notes == ["submitted: job 'job-1' of PortableRunner, http://page/job-1"]
    assert interruption.left() is None


def test_of_two_that_submit_at_once_one_gives_way(runner, folder):
    first, second = launch(folder), launch(folder)
    assert not first.join(overwrite=False)
    assert not second.join(overwrite=False)
    first.claim()
    with pytest.raises(DatasetError, match=r"is being written by another command, which has just submitted a job"):
        second.claim()
    second.close()
    assert RemoteJob.read(folder) == first.job


@pytest.mark.slow
def test_the_same_work_waits_for_the_job_that_is_there(runner, folder):
    submitted(folder)
    notes = []
    runner.now = "RUNNING"
    threading.Timer(0.2, lambda: (setattr(runner, "now", "DONE"), runner.ended.set())).start()
    assert launch(folder, notes=notes).join(overwrite=False)
    assert "job 'job-1' of PortableRunner is at work on this, submitted by" in notes[0]
    assert folder.names() == []


@pytest.mark.parametrize(
    ("work", "overwrite", "why"), [("other", False, "this is other work"), ("w", True, r"would start anew \(--overwrite\)")]
)
def test_other_work_is_refused(runner, folder, work, overwrite, why):
    submitted(folder)
    with pytest.raises(DatasetError, match=rf"is being written by job 'job-1' of PortableRunner, .*{why}: nothing was written"):
        launch(folder, work=work).join(overwrite=overwrite)
    assert folder.names() == [JOB_NAME]


@pytest.mark.parametrize("state", ["DONE", "FAILED", "CANCELLED", None])
def test_the_file_of_a_job_that_has_ended_is_deleted(runner, folder, state):
    submitted(folder)
    runner.now = state
    assert not launch(folder, work="other").join(overwrite=True)
    assert folder.names() == []


def test_a_service_that_does_not_answer_is_not_believed(runner, folder):
    submitted(folder)
    runner.error = SilentError("UNAVAILABLE: refused")
    with pytest.raises(
        DatasetError, match=r"the service did not say whether it has ended \(UNAVAILABLE: refused\).*_job\.json'$"
    ):
        launch(folder).join(overwrite=False)
    runner.error, runner.now, runner.flags = None, None, ("--job_endpoint=host:2",)
    with pytest.raises(DatasetError, match=r"the service does not know; it was submitted with .* --job_endpoint=host:1"):
        launch(folder).join(overwrite=False)
    assert folder.names() == [JOB_NAME]


def test_a_job_that_is_not_waited_for(runner, folder):
    first = launch(folder, detach=True)
    first.claim()
    with pytest.raises(DetachedError, match=r"^job 'job-1' of PortableRunner is at work.* See http://page/job-1$") as detached:
        first.watch(runner)
    assert detached.value.job == {"runner": "PortableRunner", "id": "job-1", "page": "http://page/job-1"}
    first.close()
    assert RemoteJob.read(folder) == first.job
    with pytest.raises(DetachedError, match=r"^job 'job-1' of PortableRunner is at work"):
        launch(folder, detach=True).join(overwrite=False)


def test_a_launcher_that_loses_its_job_keeps_the_file(runner, folder):
    first = launch(folder)
    first.claim()
    runner.ended.set()  # Waiting fails, and the service says that the job runs.
    with pytest.raises(ImagepivotError, match=r"^lost job 'job-1' of PortableRunner \(RuntimeError: .*the same command"):
        first.watch(runner)
    first.close()
    assert RemoteJob.read(folder) == first.job


def test_a_job_that_fails_takes_its_file_along(runner, folder):
    first = launch(folder)
    first.claim()
    runner.now = "FAILED"
    runner.ended.set()
    with pytest.raises(RuntimeError, match="it ended in state FAILED"):
        first.watch(runner)
    first.close()
    assert folder.names() == []


@pytest.mark.slow
@pytest.mark.parametrize("obeys", [True, False])
def test_what_is_said_of_a_job_that_is_cancelled(runner, folder, obeys):
    runner.obeys = obeys
    job = submitted(folder)
    said = (
        "cancelled: PortableRunner says that job 'job-1' has ended; finished shards are kept" if obeys else "asked the service"
    )
    if obeys:
        assert cancel_job(folder.location).startswith(said)
    else:
        with pytest.raises(
            ImagepivotError, match=rf"^{said} to cancel job 'job-1', which it has not confirmed within 1 seconds"
        ):
            cancel_job(folder.location)
    assert runner.cancelled == [job.id]
    assert folder.names() == ([] if obeys else [JOB_NAME])


@pytest.mark.slow
@pytest.mark.parametrize("obeys", [True, False])
def test_an_interrupt_leaves_the_job_until_it_is_cancelled(runner, folder, monkeypatch, obeys):
    runner.obeys = obeys

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(launching, "wait", interrupted)
    first = launch(folder)
    first.claim()
    with pytest.raises(KeyboardInterrupt):
        first.watch(runner)
    first.close()
    assert RemoteJob.read(folder) == first.job
    left = interruption.left()
    assert left.words.startswith("stopped waiting, and job 'job-1' of PortableRunner goes on: the same command")
    words = left.cancel()
    assert words.startswith(
        "cancelled: PortableRunner says that job 'job-1' has ended"
        if obeys
        else "asked PortableRunner to cancel job 'job-1', which it has not confirmed within 1 seconds: it may go on"
    )
    assert left.words.startswith("asked PortableRunner to cancel job 'job-1'")  # What a second signal would say meanwhile.
    assert folder.names() == ([] if obeys else [JOB_NAME])


def test_a_service_that_does_not_cancel_is_quoted(runner, folder, monkeypatch):
    """By Ctrl-C in whole: it may say what to do instead."""
    first = launch(folder)
    first.claim()
    monkeypatch.setattr(first, "_wait", lambda has_started: None)
    first.watch(runner)
    reason = f"{'a long reason ' * 20}and what to do"

    def refuse(job_id: str) -> None:
        raise SilentError(reason)

    runner.cancel = refuse
    assert first.cancel() == f"PortableRunner did not cancel job 'job-1' ({reason}): it may go on"
    with pytest.raises(ImagepivotError, match=rf"^the service did not cancel job 'job-1' \({reason}\): it may go on$"):
        cancel_job(folder.location)
    assert folder.names() == [JOB_NAME]


def test_nothing_to_cancel(folder):
    with pytest.raises(DatasetError, match=r"no job is at work on '.*out': it holds no _job\.json"):
        cancel_job(folder.location)
    RemoteJob.of_launcher("DaskRunner", (), "w").claim(folder)
    with pytest.raises(ImagepivotError, match=r"a job of DaskRunner, .*, cannot be asked after"):
        cancel_job(folder.location)


# --- what can be asked ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        (("--runner=PortableRunner", "--job_endpoint=h:1"), PortableService),
        (("--runner=FlinkRunner", "--job_endpoint=h:1"), PortableService),
        (("--runner=FlinkRunner",), type(None)),
        (("--runner=PortableRunner", "--job_endpoint=embed"), type(None)),
        (("--runner=apache_beam.runners.dask.dask_runner.DaskRunner",), type(None)),
        (("--runner=DataflowRunner", "--project=p"), DataflowService),
        (("--runner=dataflow",), DataflowService),
    ],
)
def test_which_runners_can_be_asked(flags, kind):
    assert type(service_of(PipelineOptions(list(flags)))) is kind


def test_nothing_is_left_alone_that_could_not_be_found_again(folder):
    execution = Execution(beam_flags=("--runner=FlinkRunner",), detach=True)
    with pytest.raises(UsageError, match=r"--detach: a job of FlinkRunner could not be found again"):
        Launch(Output(folder, Identity("captions", {})), execution, Meter(), work="w")
    for flags in ((), ("--runner=DirectRunner",)):
        with pytest.raises(UsageError, match=r"--detach leaves a job to the runner .* leave out --detach, or name a runner$"):
            Execution(beam_flags=flags, detach=True)


def test_what_makes_work_the_same(folder):
    def work(output: Output, update: Update | None = None, *, retry_failed: bool = False) -> str:
        return work_of(output, update=update, retry_failed=retry_failed)

    identity = Identity("features", {"a": 1}, shards=2)
    output = Output(folder, identity, listings=("x", "y"))
    assert work(output) == work(Output(Folder("elsewhere"), identity, listings=("x", "y"), states=("1", "2")))
    others = [
        work(Output(folder, Identity("features", {"a": 2}, shards=2), listings=("x", "y"))),
        work(Output(folder, identity, listings=("x", "z"))),
        work(output, Update()),
        work(output, Update(only_add=True)),
        work(output, retry_failed=True),
    ]
    assert len({work(output), *others}) == 6
