"""Memory that a process holds but does not use."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import lru_cache

__all__ = ["release_unused_memory"]


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
