"""Settings of a process at its start: allocator, garbage collector and imports.

By default glibc maps large buffers again for each batch, trims its heap, and gives each thread its own heap.
Every batch then pays for page faults and system calls. `keep_freed_memory` prevents it.
"""

import ctypes
import gc
import os
import sys
from importlib.abc import MetaPathFinder

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # See mallopt(3).
_LARGEST_KEPT = 2**28  # Bytes, twice the largest feature maps of VGG19 with ten crops.
_LARGEST_ONCE = 2**25  # Before glibc 2.35 the limit cannot be higher.
_GC_THRESHOLD = 20_000  # Net allocations; Python's default is 700 or 2,000.


def keep_freed_memory() -> bool:
    """Let glibc keep freed memory; return whether it does.

    It then has one heap for all threads, which is never trimmed, and maps only buffers above 256 MB.

    Call it before threads are started. The process then holds its peak memory, unless `malloc_trim` is called. It has no effect
    if the user has set the allocator (``MALLOC_*``, ``GLIBC_TUNABLES``), or with other C libraries (musl, macOS).
    """
    is_set = "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "") or any(name.startswith("MALLOC_") for name in os.environ)
    if sys.platform != "linux" or is_set:
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or not mallopt(_ARENA_MAX, 1):  # Missing or without effect in other C libraries.
        return False
    mallopt(_TRIM_THRESHOLD, -1)  # Never.
    if not mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT):
        mallopt(_MMAP_THRESHOLD, _LARGEST_ONCE)
    return True


def reduce_gc() -> None:
    """Collect cyclic garbage less often: each run visits a million objects of torch."""
    _, *older = gc.get_threshold()
    gc.set_threshold(_GC_THRESHOLD, *older)


def skip_pandas() -> None:
    """Keep pyarrow from importing pandas with the first array, which takes a second."""
    if "pandas" in sys.modules:
        return
    import pyarrow as pa

    sys.meta_path.insert(0, _WithoutPandas())
    pa.array([0])
    del sys.meta_path[0]


class _WithoutPandas(MetaPathFinder):
    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if name == "pandas":
            raise ImportError(name)
