"""Runs of a pipeline by the runner in the flags for Beam."""

from __future__ import annotations

import signal
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import apache_beam as beam

from pipelines.running.execution import Execution
from pipelines.running.package_wheel import add_wheel
from pipelines.running.remote import check_job_service, runner_log
from schemas import errors
from schemas.process.shutdown import DetachedError

MAX_GRAPH_BYTES = 10_000_000
"""Maximum size of a pipeline on Dataflow."""


def run_pipeline(
    build: Callable[[beam.Pipeline], object],
    execution: Execution,
    *,
    extras: Iterable[str] = ("text",),
    watch: Callable[[Any], None] | None = None,
) -> None:
    """Run a pipeline to its end by the runner that the flags name.

    ``build`` adds the transforms to an empty pipeline. Workers on other machines need the ``extras``.
    ``watch`` waits for the result of a remote run, or detaches from it.

    Raises:
        ImagepivotError: a worker's error that the user can fix, with its class and message; or another runner did not finish.
    """
    options = execution.to_options()
    with tempfile.TemporaryDirectory(prefix="imagepivot-run-") as folder, _interrupts() as interrupted:
        if not execution.runs_here:
            add_wheel(options, Path(folder), extras)
            check_job_service(options, execution.beam_flags)
        try:
            pipeline = beam.Pipeline(options=options)
        except (ImportError, ValueError) as error:  # Unknown, not installed, or without required options.
            reason = " ".join(str(error).split())
            raise errors.UsageError(f"Beam cannot start the runner {execution.runner!r}: {reason}") from error
        build(pipeline)
        if not execution.runs_here and (size := pipeline.to_runner_api().ByteSize()) > MAX_GRAPH_BYTES:
            raise errors.UsageError(
                f"the pipeline for {execution.runner} is {size:,} bytes, expected at most {MAX_GRAPH_BYTES:,}: it names every "
                "shard, and for captions every file. Give fewer --shards, or fewer files of captions"
            )
        with runner_log(execution.runner):
            try:
                result = pipeline.run()
                if watch is not None:
                    watch(result)
                else:
                    result.wait_until_finish()
            except DetachedError:
                raise
            except Exception as error:
                if interrupted:  # Beam wrapped the interrupt, or failed because of it.
                    raise KeyboardInterrupt from error
                raise errors.read_error(str(error)) or error from error


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Yield a list of received signals, which keep their handlers."""
    signals: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield signals  # Only the main thread handles signals.
        return
    handlers: dict[int, Callable[[int, FrameType | None], object]] = {}
    for stopping in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if callable(handler := signal.getsignal(stopping)):
            handlers[stopping] = handler

    def record(signum: int, frame: FrameType | None) -> None:
        signals.append(signum)
        handlers[signum](signum, frame)

    for signum in handlers:
        signal.signal(signum, record)
    try:
        yield signals
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
