"""Numbers of threads of torch, for the block of a ``with``."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def threads_of_torch(number: int) -> Iterator[None]:
    """Let torch compute with a number of threads; restore its own afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
