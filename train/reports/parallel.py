"""Several tasks at a time, each in a process of its own that keeps one device."""

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
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import TypeVar

from schemas.errors import ImagepivotError

__all__ = ["run_parallel"]

T = TypeVar("T")


def run_parallel(work: Callable[[T, str], object], tasks: Sequence[T], devices: Sequence[str]) -> Iterator[T]:
    """Run tasks in as many processes as there are devices, and yield each task when it is done.

    If a task fails, or the caller stops, the other processes are ended at once.

    Args:
        work: a function of a module, called with a task and a device.
        tasks: the tasks, which are begun in this order.
        devices: one device for each process.

    Raises:
        ImagepivotError: a process was killed.
        Exception: the error of the first task that failed.
    """
    waiting, running = deque(tasks), dict[Future[object], tuple[T, int]]()
    before = multiprocessing.active_children()
    pools = [_pool() for _ in devices[: len(tasks)]]
    try:
        for number in range(len(pools)):
            _begin(work, waiting, devices, pools, running, number)
        while running:
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                task, number = running.pop(future)
                future.result()
                yield task
                _begin(work, waiting, devices, pools, running, number)
    except BrokenProcessPool as error:
        raise ImagepivotError(
            "a training process was killed, probably because memory ran out: give fewer --workers, and the same command again; "
            "finished runs are kept"
        ) from error
    finally:
        if running:  # An idle process ends by itself.
            for process in multiprocessing.active_children():
                if process not in before:
                    process.terminate()
        for pool in pools:
            pool.shutdown(cancel_futures=True)


def _begin(
    work: Callable[[T, str], object],
    waiting: deque[T],
    devices: Sequence[str],
    pools: Sequence[ProcessPoolExecutor],
    running: dict[Future[object], tuple[T, int]],
    number: int,
) -> None:
    if waiting:
        task = waiting.popleft()
        with _without_interrupts():
            running[pools[number].submit(_work, work, task, devices[number])] = task, number


def _work(work: Callable[[T, str], object], task: T, device: str) -> None:
    """Work on a task in a process of its own, which ends with its parent, however that ends."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    work(task, device)


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
