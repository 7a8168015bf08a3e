"""A worker process that ends ends the run, whatever the two had said to each other before."""

import os
import signal
import stat
import sys
from concurrent.futures import ThreadPoolExecutor

import apache_beam as beam
import pytest

from pipelines.running.execution import Execution
from pipelines.running.runner import run_pipeline
from schemas.errors import ImagepivotError

LOST = "a worker process ended unexpectedly"
SECONDS = 60


def fails_in_time(build) -> str:
    """Run a pipeline in two workers and return its error; a run that does not end is left alone."""
    pool = ThreadPoolExecutor(1)
    try:
        with pytest.raises(ImagepivotError) as caught:
            pool.submit(run_pipeline, build, Execution(workers=2)).result(SECONDS)
    finally:
        pool.shutdown(wait=False)
    return str(caught.value)


def test_workers_that_end_before_they_have_connected(tmp_path, monkeypatch):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nkill -KILL $$\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(program))
    assert LOST in fails_in_time(lambda pipeline: pipeline | beam.Create([1]) | beam.Map(print))


@pytest.mark.cluster
def test_workers_that_end_where_no_more_data_is_expected_of_them():
    def build(pipeline):
        return pipeline | beam.Create(range(8)) | beam.Reshuffle() | beam.Map(lambda _: os.kill(os.getpid(), signal.SIGKILL))

    assert LOST in fails_in_time(build)
