"""Memory that a process holds and does not use."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import lru_cache

__all__ = ["release_unused_memory"]


def release_unused_memory() -> None:
    """Give freed memory back to the operating system, where the C library can be asked to.

    glibc keeps what its threads have freed while anything behind it is in use, so that a process comes to hold the peaks of all its
    stages together. Takes some milliseconds.
    """
    _trim()(0)


@lru_cache(maxsize=1)
def _trim() -> Callable[[int], object]:
    if sys.platform != "linux":
        return lambda _: None
    # Only glibc has it.
    return getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)
