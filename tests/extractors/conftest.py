"""Tests of the extractors compute in one thread, but where threads are their subject."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="package", autouse=True)
def _one_thread() -> Iterator[None]:
    """Let torch use one thread: with more, test processes that share the cores wait for one another and take four times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
