"""The C library's allocator, set so that a process keeps the memory that it has freed, for its next batch.

By itself glibc maps each buffer of more than 128 KB to 32 MB anew (the limit adapts), returns the end of its heap whenever enough
of it is free, and gives each thread a heap of its own. Batches whose buffers come and go are then paid for twice: each page of each
buffer is a fault of the processor, and a call of the system returns it.
"""

from __future__ import annotations

import ctypes
import os
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # glibc's numbers of its settings, see mallopt(3)
_NEVER = -1
_LARGEST_KEPT = 2**28
"""Bytes from which a buffer is still mapped: VGG19's largest maps of ten crops have half as many."""
_LARGEST_ONCE = 2**25  # Before glibc 2.35 the limit cannot be higher.


def keep_freed_memory() -> bool:
    """Let this process keep what it frees: one heap for all threads, never trimmed, and mapped buffers only above 256 MB.

    Call it where a process begins, before threads are started. What the process holds is then the peak of what it needed;
    `malloc_trim`, where it is called, still returns memory. Nothing happens where the user has set glibc's allocator, by one of its
    environment variables ``MALLOC_*`` or by ``GLIBC_TUNABLES``, or where the C library has no such settings (musl, macOS).

    Returns:
        Whether the allocator was set.
    """
    if sys.platform != "linux" or _is_set_by_user():
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or not mallopt(_ARENA_MAX, 1):  # musl has none, and others' always says no.
        return False
    mallopt(_TRIM_THRESHOLD, _NEVER)
    if not mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT):
        mallopt(_MMAP_THRESHOLD, _LARGEST_ONCE)
    return True


def _is_set_by_user() -> bool:
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    return "glibc.malloc." in tunables or any(name.startswith("MALLOC_") for name in os.environ)
