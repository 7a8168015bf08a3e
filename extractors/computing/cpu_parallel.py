"""Running a model on a batch so that the feature of an image depends on nothing but the image.

On a CPU, torch chooses the kernels of a layer, and with them the order of its sums, by the number of threads and the size of the
batch: ResNet50's features then differ in their last bits (measured: up to 5e-7 of the largest value) between one thread and
two. Here every forward pass has the same shape and runs in one thread, and the threads work on different images. This is not
slower, because no thread waits for the slowest one at each layer.

Letters in shapes: ``B`` images of a batch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from threading import Barrier, Lock
from typing import TypeVar

import torch
from torch import Tensor

FORWARD_IMAGES = 2
"""Images of one forward pass on a CPU: two are 1.1 times as fast as one and as fast as four, with little padding in the last."""

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

_pool_lock, _limiting = Lock(), Lock()


def run_in_chunks(function: Callable[[Tensor], Tensor], batch: Tensor, images: int = FORWARD_IMAGES) -> Tensor:
    """Apply a model on the CPU to a few images per pass, each pass in one thread, passes in all of torch's threads.

    Args:
        function: from ``[images, ...]`` to ``[images, ...]``; called from several threads at once.
        batch: ``[B, ...]``, not empty; the last pass is padded with copies of its last image, whose results are dropped.
        images: images of one pass.

    Returns:
        The results in order, ``[B, ...]``: the same bytes for any B and any number of threads.
    """
    chunks = list(batch.split(images))
    missing = images - len(chunks[-1])
    if missing:
        chunks[-1] = torch.cat([chunks[-1], *([chunks[-1][-1:]] * missing)])
    return torch.cat(run_single_threaded(function, chunks))[: len(batch)]


def run_single_threaded(function: Callable[[_Item], _Result], items: Iterable[_Item]) -> list[_Result]:
    """Apply a function to all items, in one of torch's threads per item and ``torch.get_num_threads()`` threads in all.

    The caller's number of threads is read at every call and not changed. Gradients are off in ``function``.
    """

    def run(item: _Item) -> _Result:
        with torch.inference_mode():
            return function(item)

    pool = _threads()
    return [run(item) for item in items] if pool is None else list(pool.map(run, items))


def passes_share_threads() -> bool:
    """Tell whether passes of several callers at once run in the same threads, and start these; False if each runs its own.

    A thread that calls `run_single_threaded` afterwards, and has not used torch before, takes torch's number as it is now.
    """
    return _threads() is not None


def _threads() -> ThreadPoolExecutor | None:
    """Return the threads of passes; None if torch has but one, which is the caller's."""
    threads = torch.get_num_threads()
    if threads == 1:
        return None
    with _pool_lock:
        return _pool(os.getpid(), threads)


@lru_cache(maxsize=2)
def _pool(pid: int, threads: int) -> ThreadPoolExecutor:
    """Start the threads of passes. There is one pool per process: threads do not survive a fork."""
    return single_threaded_pool(threads, "extractor")


def single_threaded_pool(threads: int, name: str) -> ThreadPoolExecutor:
    """Start threads in which torch uses a single thread each; all of them run when this returns.

    ``torch.set_num_threads`` sets the number for the calling thread, and also for threads that first use torch later. The second
    is restored at once, from a thread that has that number already. The names of the threads begin with ``name``.
    """
    started = Barrier(threads + 1)

    def limit() -> None:
        torch.get_num_threads()  # The first use of torch in a thread takes the number of the process, so it must come first.
        torch.set_num_threads(1)
        started.wait()

    pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
    with _limiting:
        before = torch.get_num_threads()
        limited = [pool.submit(limit) for _ in range(threads)]
        started.wait()
        for future in limited:
            future.result()
        torch.set_num_threads(before)
    return pool
