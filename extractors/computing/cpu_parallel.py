"""Deterministic parallel forwards on a CPU: single-threaded chunks of one shape.

Torch chooses kernels, and thus the order of sums, by thread count and batch size, so last bits of features
depend on both. Here each forward has a fixed shape and runs in one thread, and threads work on different
images. This is not slower, since threads need not wait for each other at each layer.

Shapes: ``B`` images of a batch.
"""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from threading import Barrier, Lock
from typing import TypeVar

import torch
from torch import Tensor

FORWARD_IMAGES = 2
"""Images per forward on a CPU; larger is not faster."""

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

_pool_lock, _limiting = Lock(), Lock()


def run_in_chunks(function: Callable[[Tensor], Tensor], batch: Tensor, images: int = FORWARD_IMAGES) -> Tensor:
    """Apply a model to chunks of a batch in parallel, one thread per chunk.

    Args:
        function: from ``[images, ...]`` to ``[images, ...]``; called from several threads.
        batch: ``[B, ...]``, not empty. The last chunk is padded with copies of the last image.
        images: images per chunk.

    Returns:
        ``[B, ...]``; the bytes do not depend on B and the thread count.
    """
    chunks = list(batch.split(images))
    missing = images - len(chunks[-1])
    if missing:
        chunks[-1] = torch.cat([chunks[-1], *([chunks[-1][-1:]] * missing)])
    return torch.cat(run_single_threaded(function, chunks))[: len(batch)]


def run_single_threaded(function: Callable[[_Item], _Result], items: Iterable[_Item]) -> list[_Result]:
    """Apply a function to items in parallel, one thread per item.

    The pool has ``torch.get_num_threads()`` threads, read at every call and not changed. ``function`` runs in inference mode.
    """

    def run(item: _Item) -> _Result:
        with torch.inference_mode():
            return function(item)

    pool = _threads()
    return [run(item) for item in items] if pool is None else list(pool.map(run, items))


def passes_share_threads() -> bool:
    """Start the thread pool, and return whether concurrent callers share it.

    False if torch has one thread, so that each caller computes in its own.
    """
    return _threads() is not None


def _threads() -> ThreadPoolExecutor | None:
    threads = torch.get_num_threads()
    if threads == 1:
        return None
    with _pool_lock:
        return _threads_of_process(os.getpid(), threads)


@lru_cache(maxsize=2)
def _threads_of_process(pid: int, threads: int) -> ThreadPoolExecutor:
    """Start the threads of a process; they do not survive a fork."""
    return single_threaded_pool(threads, "extractor")


def single_threaded_pool(threads: int, name: str) -> ThreadPoolExecutor:
    """Start a pool of threads with one torch thread each.

    ``torch.set_num_threads`` also changes the default of threads that use torch later, which is restored before returning.
    """
    started = Barrier(threads + 1)

    def limit() -> None:
        torch.get_num_threads()  # The first use of torch in a thread sets the default count, so it must come first.
        torch.set_num_threads(1)
        started.wait()

    pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
    with _limiting:
        before = torch.get_num_threads()
        for _ in range(threads):
            pool.submit(limit)
        started.wait()
        torch.set_num_threads(before)
    return pool
