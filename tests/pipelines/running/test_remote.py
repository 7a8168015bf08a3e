import logging
import tempfile
import threading

import pytest
from apache_beam.options.pipeline_options import PipelineOptions, PortableOptions

from pipelines.running.remote import check_job_service, runner_log, wait
from schemas.errors import ImagepivotError, InputError


class Run:
    """A run of Beam's that ends when it is told to."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.ended, self.cancelled = error, threading.Event(), False

    def wait_until_finish(self) -> None:
        assert self.ended.wait(60)
        if self.error is not None:
            raise self.error

    def cancel(self) -> str:
        self.cancelled = True
        return "it may go on"


@pytest.mark.slow
def test_a_run_whose_workers_never_start_is_cancelled():
    run = Run()
    with pytest.raises(TimeoutError, match=r"no worker has started within 0 seconds\..* waits longer\. it may go on$"):
        wait(run, has_started=lambda: False, seconds=0.1, cancel=run.cancel)
    assert run.cancelled
    run.ended.set()


@pytest.mark.slow
def test_a_run_may_take_its_time_once_a_worker_has_started():
    run, asked = Run(), []

    def has_started() -> bool:
        asked.append(1)
        threading.Timer(1.5, run.ended.set).start()
        return True

    wait(run, has_started=has_started, seconds=0.1, cancel=run.cancel)
    assert (asked, run.cancelled) == ([1], False)


def test_the_error_of_a_run_is_raised():
    run = Run(InputError("mine"))
    run.ended.set()
    with pytest.raises(InputError, match=r"^mine$"):
        wait(run, has_started=lambda: False, seconds=60, cancel=run.cancel)


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_what_a_runner_says_is_in_a_file_that_is_kept_on_failure(temporary, caplog):
    root = logging.getLogger()
    before = root.level, list(root.handlers)

    def run() -> None:
        with runner_log("FlinkRunner"):
            logging.getLogger("apache_beam.runners").info("Job state changed to RUNNING")
            root.error("a long trace")
            logging.getLogger("mine").error("my own")
            raise RuntimeError("first line\n  second line.\n\n")

    with pytest.raises(
        ImagepivotError, match=r"^FlinkRunner did not finish the run: second line\. Its log is in '(.*)'; finished"
    ):
        run()
    (log,) = temporary.iterdir()
    text = log.read_text()
    assert all(part in text for part in ("Job state changed to RUNNING", "a long trace", "my own", "Traceback", "RuntimeError"))
    assert [record.getMessage() for record in caplog.records] == ["my own"]
    assert (root.level, root.handlers) == before


def test_no_file_is_left_otherwise(temporary):
    with runner_log("FlinkRunner"):
        pass
    with pytest.raises(InputError, match=r"^mine$"), runner_log("FlinkRunner"):
        raise InputError("mine")
    assert list(temporary.iterdir()) == []


def test_a_package_that_the_workers_lack():
    expected = r"No module named 'torch' \(the workers' environment lacks it\)"
    with pytest.raises(ImagepivotError, match=expected), runner_log("FlinkRunner"):
        raise RuntimeError("Traceback\nModuleNotFoundError: No module named 'torch'")


@pytest.mark.parametrize(
    "said",
    [
        "Channel closed prematurely",  # Beam's own job service.
        "bundle inst011 stage-012 failed:SDK worker disconnected: worker[job-007[job]], error: context canceled",
    ],
)
def test_a_worker_that_is_gone(said):
    expected = r"^PortableRunner did not finish the run: a worker process ended unexpectedly, because it was killed or ran out"
    with pytest.raises(ImagepivotError, match=expected), runner_log("PortableRunner"):
        raise RuntimeError(f"Pipeline job-007 failed in state FAILED: {said}")


def test_a_trace_of_java():
    trace = "Job aborted\n\tat java.base/A.get(A.java:2)\nCaused by: B: client cancelled\n\t... 3 more\n\nDriver stacktrace:"
    expected = r"^PortableRunner did not finish the run: Caused by: B: client cancelled\. Its log"
    with pytest.raises(ImagepivotError, match=expected), runner_log("PortableRunner"):
        raise RuntimeError(trace)


@pytest.mark.parametrize("flags", [(), ("--job_endpoint=embed",), ("--job_server_timeout=7",)])
def test_a_run_is_not_limited_by_the_time_of_an_answer(flags):
    options = PipelineOptions(list(flags))
    check_job_service(options, flags)
    assert options.view_as(PortableOptions).job_server_timeout > 30 * 24 * 3600
