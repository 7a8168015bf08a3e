"""Memory: batches that are halved where a GPU's is too small, and what a process holds but does not use.

Letters in shapes: ``B`` images of a batch.
"""

from __future__ import annotations

import ctypes
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from schemas.errors import ImagepivotError

logger = logging.getLogger(__name__)

# What torch and NVIDIA's libraries say where memory is short. cuDNN takes its workspace from torch, and where there is none left
# for any of its algorithms, it finds none.
_OUT_OF_MEMORY = (
    "out of memory",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "unable to find an engine",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error says that the memory of a GPU is too small.

    cuBLAS and cuDNN report that as plain `RuntimeError`. cuDNN's "unable to find an engine" may have other causes; it then comes
    again with a single image.
    """
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)


@dataclass
class BatchLimits:
    """The sizes of batches that fit into the memory of a device, as one extractor has found out.

    Attributes:
        max_items: greatest number of items, by the shape of an item; an item of a shape that is not there has always fitted.
        warned: whether the log says so already.
    """

    max_items: dict[tuple[int, ...], int] = field(default_factory=dict)
    warned: bool = False


def run_with_oom_retry(function: Callable[[Tensor], Tensor], batch: Tensor, limits: BatchLimits | None = None) -> Tensor:
    """Apply a model to a batch, or if the memory of the device is too small, to its halves, and to halves of those.

    Args:
        function: from ``[B, ...]`` to ``[B, ...]``.
        batch: ``[B, ...]``; of an empty one the function makes what it makes.
        limits: what has fitted before. Larger batches are not tried again, and what is found now is noted.

    Returns:
        The results in order, ``[B, ...]``.

    Raises:
        ImagepivotError: the memory is too small even for one image.
    """
    results = run_parts_with_oom_retry(function, batch, limits)
    return torch.cat(results) if len(results) > 1 else results[0]


def run_parts_with_oom_retry(
    function: Callable[[Tensor], Tensor], batch: Tensor, limits: BatchLimits | None = None
) -> list[Tensor]:
    """Do what `run_with_oom_retry` does, and return the results of the parts; at least one, even of an empty batch."""
    limits = BatchLimits() if limits is None else limits
    shape = tuple(batch.shape[1:])
    size = min(len(batch), limits.max_items.get(shape, len(batch)))
    results: list[Tensor] = []
    start = 0
    while not results or start < len(batch):
        found = _attempt(function, batch[start : start + size])
        # Outside the handler: the exception keeps the failed attempt's memory alive.
        if found is None:
            size = (len(batch[start : start + size]) + 1) // 2
            limits.max_items[shape] = size
            torch.cuda.empty_cache()
            continue
        if shape in limits.max_items and not limits.warned:
            limits.warned = True
            logger.warning("out of device memory with %d images at once; going on with %d", len(batch), size)
        results.append(found)
        start += size
    return results


def _attempt(function: Callable[[Tensor], Tensor], part: Tensor) -> Tensor | None:
    """Return the result of a part; None if memory ran out."""
    try:
        return function(part)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        if len(part) > 1:
            return None
        raise ImagepivotError(
            f"the device's memory does not hold the model and one image ({error}): another process probably uses "
            "the device; stop it or choose another device"
        ) from error


def release_unused_memory() -> None:
    """Return freed memory to the operating system, if the C library has a function for that, as glibc alone.

    glibc keeps memory that its threads have freed as long as anything behind it is in use, so a process ends up holding the peaks
    of all its stages together. The call takes a few milliseconds.
    """
    if sys.platform == "linux":
        getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)(0)
