"""Out-of-memory handling on a GPU, and release of freed host memory.

Shapes: ``B`` images of a batch.
"""

import ctypes
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from schemas.errors import ImagepivotError

logger = logging.getLogger(__name__)

# Messages of torch and NVIDIA's libraries. cuDNN without memory for a workspace finds no engine.
_OUT_OF_MEMORY = (
    "out of memory",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "unable to find an engine",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error reports that GPU memory is exhausted.

    cuBLAS and cuDNN report it as plain `RuntimeError`. cuDNN's "unable to find an engine" with a single image has other causes.
    """
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)


@dataclass
class BatchLimits:
    """Maximum batch sizes of an extractor, learned from out-of-memory errors.

    Attributes:
        max_items: maximum number of items by item shape; unlimited for other shapes.
    """

    max_items: dict[tuple[int, ...], int] = field(default_factory=dict)
    warned: bool = False


def run_with_oom_retry(function: Callable[[Tensor], Tensor], batch: Tensor, limits: BatchLimits | None = None) -> Tensor:
    """Apply a model to a batch; halve the batch while GPU memory runs out.

    Args:
        function: from ``[B, ...]`` to ``[B, ...]``.
        batch: ``[B, ...]``, possibly empty.
        limits: known maximum batch sizes; updated.

    Raises:
        ImagepivotError: memory runs out even for one image.
    """
    limits = BatchLimits() if limits is None else limits
    shape = tuple(batch.shape[1:])
    size = min(len(batch), limits.max_items.get(shape, len(batch)))
    results: list[Tensor] = []
    start = 0
    while not results or start < len(batch):
        part, result = batch[start : start + size], None
        try:
            result = function(part)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            if len(part) <= 1:
                raise ImagepivotError(
                    f"the GPU memory is too small for the model and one image ({error}): another process "
                    "probably uses the GPU; stop it, or choose another GPU with --device"
                ) from error
        # Outside the exception handler, since the exception keeps the failed attempt's memory alive.
        if result is None:
            size = (len(part) + 1) // 2
            limits.max_items[shape] = size
            torch.cuda.empty_cache()
            continue
        if shape in limits.max_items and not limits.warned:
            limits.warned = True
            logger.warning("out of GPU memory with a batch of %d images: continuing with %d", len(batch), size)
        results.append(result)
        start += size
    return torch.cat(results) if len(results) > 1 else results[0]


def release_unused_memory() -> None:
    """Return memory that glibc keeps after freeing to the operating system."""
    if sys.platform == "linux":
        getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)(0)
