"""Running a model over a batch so that the feature of an image depends on nothing but the image.

On a CPU, torch picks the kernels of a layer, and with them the order of its sums, by the number of threads and the size of the
batch: ResNet50's features then differ in their last bits (measured: up to 5e-7 of the largest value) between one thread and
two. Here every forward pass has the same shape and one thread, and the threads work on different images. This is not
slower: nobody waits for the slowest thread of each layer.

Letters in shapes: ``B`` images of a batch.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from threading import Barrier, Lock

import torch
from torch import Tensor

from schemas.errors import ImagepivotError

__all__ = ["FORWARD_IMAGES", "in_chunks", "in_halves", "run_single_threaded"]

FORWARD_IMAGES = 2
"""Images of one forward pass on a CPU. Two are 1.1 times as fast as one and as fast as four, and little to pad at an end."""

logger = logging.getLogger(__name__)

_pool_lock = Lock()


def in_chunks(function: Callable[[Tensor], Tensor], batch: Tensor) -> Tensor:
    """Apply a model on the CPU to `FORWARD_IMAGES` images at a time, each time in one thread, in all of torch's threads.

    Args:
        function: from ``[FORWARD_IMAGES, ...]`` to ``[FORWARD_IMAGES, ...]``; called in several threads at once.
        batch: ``[B, ...]``, not empty; the last chunk is filled up with copies of its last image, which are dropped again.

    Returns:
        The results in order, ``[B, ...]``: the same bytes whatever B and the number of threads.
    """
    chunks = list(batch.split(FORWARD_IMAGES))
    missing = FORWARD_IMAGES - len(chunks[-1])
    if missing:
        chunks[-1] = torch.cat([chunks[-1], *([chunks[-1][-1:]] * missing)])
    return torch.cat(run_single_threaded(function, chunks))[: len(batch)]


def run_single_threaded(function: Callable[[Tensor], Tensor], items: Iterable[Tensor]) -> list[Tensor]:
    """Apply a function to each item, where torch uses one thread for each and ``torch.get_num_threads()`` in all.

    The caller's number of threads is read at each call and is not changed. Gradients are off in ``function``.
    """

    def run(item: Tensor) -> Tensor:
        with torch.inference_mode():
            return function(item)

    threads = torch.get_num_threads()
    if threads == 1:
        return [run(item) for item in items]
    with _pool_lock:
        pool = _pool(os.getpid(), threads)
    return list(pool.map(run, items))


@lru_cache(maxsize=2)
def _pool(pid: int, threads: int) -> ThreadPoolExecutor:
    """Make threads in each of which torch computes alone. One pool per process: threads do not survive a fork.

    ``torch.set_num_threads`` sets the calling thread's number, and also the one of threads that first use torch later. The
    second is set back at once, from a thread whose own number it is already.
    """
    before = torch.get_num_threads()
    started = Barrier(threads + 1)

    def limit() -> None:
        torch.get_num_threads()  # a thread's first use of torch takes the process's number, so that must come first
        torch.set_num_threads(1)
        started.wait()

    pool = ThreadPoolExecutor(threads, thread_name_prefix="extractor")
    limited = [pool.submit(limit) for _ in range(threads)]
    started.wait()
    for future in limited:
        future.result()
    torch.set_num_threads(before)
    return pool


def in_halves(function: Callable[[Tensor], Tensor], batch: Tensor) -> Tensor:
    """Apply a model to a batch, or where the device's memory is too small, to its halves, and their halves.

    Args:
        function: from ``[B, ...]`` to ``[B, ...]``.
        batch: ``[B, ...]``, not empty.

    Returns:
        The results in order, ``[B, ...]``.

    Raises:
        ImagepivotError: the memory does not even hold one image.
    """
    try:
        return function(batch)
    except torch.cuda.OutOfMemoryError as error:
        if len(batch) == 1:
            raise ImagepivotError(
                f"the device's memory does not hold the model and one image ({error}): another process probably uses "
                "the device; stop it or choose another device"
            ) from error
    # Outside the handler: the exception keeps the failed attempt's memory alive.
    half = (len(batch) + 1) // 2
    logger.warning("out of device memory with %d images at once; going on with %d", len(batch), half)
    torch.cuda.empty_cache()
    return torch.cat([in_halves(function, part) for part in batch.split(half)])
