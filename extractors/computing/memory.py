"""Memory: what a process holds but does not use, and a GPU's that is too small for a batch."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import lru_cache

import torch

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


def release_unused_memory() -> None:
    """Return freed memory to the operating system, if the C library has a function for that.

    glibc keeps memory that its threads have freed as long as anything behind it is in use, so a process ends up holding the peaks
    of all its stages together. The call takes a few milliseconds.
    """
    _trim()(0)


@lru_cache(maxsize=1)
def _trim() -> Callable[[int], object]:
    if sys.platform != "linux":
        return lambda _: None
    # Only glibc has this function.
    return getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)
