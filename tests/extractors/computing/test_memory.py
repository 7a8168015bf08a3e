import ctypes
import os
from pathlib import Path

import pytest
import torch

from extractors.computing.memory import release_unused_memory


def resident() -> int:
    """Return the resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "malloc_trim") or not Path("/proc/self/statm").exists(), reason="needs Linux with glibc"
)
def test_what_was_freed_between_things_in_use_goes_back():
    pieces = [torch.ones(16_000) for _ in range(4000)]  # 64 KB each, 256 MB
    pinned = pieces[::50]
    del pieces
    held = resident()
    release_unused_memory()
    assert held - resident() > 200e6
    assert all(piece.sum() == 16_000 for piece in pinned)
