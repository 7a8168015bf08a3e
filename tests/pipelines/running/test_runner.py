"""Runs of pipelines by the runner in the flags, and what becomes of their errors."""

from __future__ import annotations

import logging
import re
import signal
from pathlib import Path

import apache_beam as beam
import pytest

from pipelines.running.execution import Execution
from pipelines.running.runner import run_pipeline
from schemas.errors import DatasetError, ImagepivotError, InputError, UsageError
from schemas.process.resources import usable_cores
from tests.beam import BEAM_FLAGS, IN_BEAM

HARD = (
    "caption key 'a/en/x/0' occurs twice: 'it''s [odd]' and \"b\": remove one\n"
    f"second line: caf\u00e9 \u4e2d \\n \\\\ 100% [while running 'Y'] {'long ' * 2000}"
)


class FailingFn(beam.DoFn):
    """Fails at a step of its life."""

    def __init__(self, step: str, kind: type[Exception]) -> None:
        self._step, self._kind = step, kind

    def _reach(self, step: str) -> None:
        if step == self._step:
            raise self._kind(HARD)

    def setup(self) -> None:
        self._reach("setup")

    def process(self, element):
        yield element
        self._reach("process")

    def finish_bundle(self) -> None:
        self._reach("finish_bundle")


@pytest.mark.parametrize(
    ("flags", "step", "kind"),
    [
        (BEAM_FLAGS, "setup", InputError),
        (BEAM_FLAGS, "process", DatasetError),
        (BEAM_FLAGS, "finish_bundle", UsageError),
        pytest.param(
            ("--runner=DirectRunner", "--direct_running_mode=multi_processing", "--direct_num_workers=2"),
            "process",
            DatasetError,
            marks=[pytest.mark.cluster, pytest.mark.timeout(120)],
        ),
    ],
)
def test_error_of_any_step_of_a_worker_keeps_its_class_and_whole_message_and_is_not_logged(flags, step, kind, caplog):
    caplog.set_level(logging.DEBUG)
    before = {name: logging.getLogger(name).level for name in ("", "apache_beam", "apache_beam.runners")}
    failing = beam.ParDo(FailingFn(step, kind))
    with pytest.raises(kind) as caught:
        run_pipeline(lambda p: p | beam.Create([1]) | failing | beam.Map(str), Execution(beam_flags=flags))
    assert (type(caught.value), str(caught.value)) == (kind, HARD)
    assert flags != BEAM_FLAGS or not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert {name: logging.getLogger(name).level for name in before} == before


def test_error_that_is_not_ours_names_the_runner_and_its_log():
    with pytest.raises(ImagepivotError) as caught:
        run_pipeline(lambda p: p | beam.Create([1]) | "Own" >> beam.ParDo(FailingFn("process", ValueError)), IN_BEAM)
    text = str(caught.value)
    assert type(caught.value) is ImagepivotError
    assert re.fullmatch(r"\S+FnApiRunner did not finish the run: second line: caf.*\. Its log is '.*'; finished shards.*", text)
    log = Path(text.split("Its log is '")[1].split("'")[0])
    assert f"ValueError: {HARD} [while running 'Own']" in log.read_text(encoding="utf-8")
    log.unlink()


@pytest.mark.parametrize(
    ("flags", "local", "here"),
    [
        ((), True, True),
        (("--runner=DirectRunner",), False, True),
        (("--runner=direct",), False, True),
        (("--runner=PrismRunner",), False, True),
        (("--runner", "PrismRunner"), False, True),
        (("--runner=apache_beam.runners.direct.direct_runner.BundleBasedDirectRunner",), False, True),
        (("--runner=PortableRunner", "--environment_type=LOOPBACK"), False, True),
        (("--runner=PortableRunner",), False, False),
        (("--runner=FlinkRunner",), False, False),
        (("--runner=DataflowRunner", "--project=p"), False, False),
        (("--runner=apache_beam.runners.dask.dask_runner.DaskRunner",), False, False),
        (("--runner=my.own.Runner",), False, False),
    ],
)
def test_execution_runs_here_by_runner(flags, local, here):
    execution = Execution(beam_flags=flags)
    assert (execution.is_local, execution.runs_here) == (local, here)


def test_workers_default_to_one_per_core():
    assert Execution(workers=3).local_workers == 3
    assert Execution().local_workers == usable_cores()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--runner=lost.Runner",), r"Beam cannot start the runner 'lost\.Runner': No module named 'lost'"),
        (("--runner=DataflowRunner", "--project=p"), r"Beam cannot start the runner 'DataflowRunner': .*temp_location"),
    ],
)
def test_run_pipeline_unknown_runner_is_wrong_usage(flags, message):
    with pytest.raises(UsageError, match=message):
        run_pipeline(lambda pipeline: pipeline | beam.Create([1]), Execution(beam_flags=flags))


def test_check_locations_local_path_of_remote_workers_is_refused():
    flink = ("--runner=FlinkRunner",)
    locations = (("SOURCE", "gs://bucket/c"), ("OUTPUT", "my out"))
    Execution(beam_flags=flink).check_locations(locations[:1])
    Execution(beam_flags=flink, shared_disk=True).check_locations(locations)
    Execution().check_locations(locations)
    expected = r"OUTPUT 'my out' is a path on this machine, and the workers of FlinkRunner run on .* --shared-disk if all"
    with pytest.raises(UsageError, match=expected):
        Execution(beam_flags=flink).check_locations(locations)


def test_keyboard_interrupts_a_pipeline():
    """Beam wraps the errors of functions; Ctrl-C must be raised as itself."""
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run_pipeline(lambda p: p | beam.Create([1]) | beam.Map(lambda _: signal.raise_signal(signal.SIGINT)), IN_BEAM)
    assert signal.getsignal(signal.SIGINT) is before
