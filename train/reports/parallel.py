"""Several tasks at a time, each in a process of its own that keeps one device; a task that fails does not end the others."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from typing import TypeVar

from schemas.process.resources import keep_freed_memory
from train.reports.failures import NO_MEMORY_ADVICE, Failure, attempt

T = TypeVar("T")

_ENDS_THE_PROCESS = ("killed", "memory", "fault")
"""Kinds of failures that leave nothing, or nothing to rely on, e.g. a GPU whose every further call fails."""


def run_parallel(
    work: Callable[[T, str], object], tasks: Sequence[T], devices: Sequence[str]
) -> Iterator[tuple[T, Failure | None]]:
    """Run tasks in as many processes as there are devices, and yield each when it has ended, with why it failed, if it did.

    A process that is killed is a failure of its task, and another process takes its place. If the caller stops, all processes
    are ended at once.

    Args:
        work: a function of a module, called with a task and a device.
        tasks: the tasks, which are begun in this order.
        devices: one device for each process.
    """
    waiting, running = deque(tasks), dict[Future[Failure | None], tuple[T, _Worker]]()
    workers = [_Worker(device) for device in devices[: len(tasks)]]
    try:
        for worker in workers:
            task = waiting.popleft()
            running[worker.begin(work, task)] = task, worker
        while running:
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                task, worker = running.pop(future)
                yield task, worker.outcome(future)
                if waiting:
                    task = waiting.popleft()
                    running[worker.begin(work, task)] = task, worker
    finally:
        if running:  # An idle process ends by itself.
            for worker in workers:
                worker.stop()
        for worker in workers:
            worker.end()


class _Worker:
    """A process for one device. It starts with its first task, and again after a failure that it did not survive."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._process: BaseProcess | None = None
        self._pool = _pool()

    def begin(self, work: Callable[[T, str], object], task: T) -> Future[Failure | None]:
        """Begin a task."""
        with _without_interrupts():
            before = multiprocessing.active_children()
            try:
                future = self._pool.submit(_work, work, task, self._device)
            except BrokenProcessPool:  # Killed while it had nothing to do.
                self._renew()
                future = self._pool.submit(_work, work, task, self._device)
            started = (process for process in multiprocessing.active_children() if process not in before)
            self._process = next(started, self._process)
        return future

    def outcome(self, future: Future[Failure | None]) -> Failure | None:
        """Return why the task of a future failed, and get ready for the next one."""
        try:
            failure = future.result()
        except BrokenProcessPool:
            self.end()  # From here on the exit code is known.
            failure = _killed(self._process.exitcode if self._process else None)
        if failure is not None and failure.kind in _ENDS_THE_PROCESS:
            self._renew()
        return failure

    def stop(self) -> None:
        """End the process at once."""
        if self._process is not None:
            with suppress(OSError):
                self._process.terminate()

    def end(self) -> None:
        """Wait for the end of the process."""
        self._pool.shutdown(cancel_futures=True)

    def _renew(self) -> None:
        self.end()
        self._pool = _pool()


def _killed(code: int | None) -> Failure:
    """Describe the end of a process by its exit code, which is minus the number of a signal."""
    if code is None or code == -signal.SIGKILL:
        return Failure("killed", f"a training process was killed, probably because memory ran out: {NO_MEMORY_ADVICE}")
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return Failure("killed", f"a training process {how}")


def _work(work: Callable[[T, str], object], task: T, device: str) -> Failure | None:
    """Work on a task in a process of its own, which ends with its parent, however that ends."""
    keep_freed_memory()
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    return attempt(work, task, device)


def _end_with(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)


def _pool() -> ProcessPoolExecutor:
    # Importing the front door makes our packages win over others of their names before the first task is unpickled.
    return ProcessPoolExecutor(
        1, mp_context=multiprocessing.get_context("spawn"), initializer=importlib.import_module, initargs=("imagepivot",)
    )


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Hold Ctrl-C back inside the block.

    A process that is started there never gets it: it would print a traceback of its own, and its parent ends it anyway.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
