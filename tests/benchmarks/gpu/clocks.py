"""Rates, waits and the share of time in which a device works."""

from __future__ import annotations

import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.benchmarks.gpu.reporting import Settings

_ROOT = Path(__file__).parents[3]
_PACKAGES = tuple(f"{_ROOT / name}/" for name in ("extractors", "pipelines", "schemas", "train"))


def rate(settings: Settings, call: Callable[[], Any], items: int, *, seconds: float = 0.5) -> float:
    """Return items a second of a call that makes ``items`` of them: after two calls that warm up, at least three are timed.

    The second call gives the number of calls that take ``seconds``. Reading the clock between calls would count launches alone.
    """
    _time_calls(settings, call, 1)
    taken = _time_calls(settings, call, 1)
    if settings.is_quick:
        return items / taken
    calls = max(3, round(seconds / taken))
    return calls * items / _time_calls(settings, call, calls)


def _time_calls(settings: Settings, call: Callable[[], Any], calls: int) -> float:
    settings.synchronize()
    started = time.perf_counter()
    for _ in range(calls):
        call()
    settings.synchronize()
    return time.perf_counter() - started


def covered(intervals: list[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def busy_share(settings: Settings, call: Callable[[], Any], calls: int) -> tuple[float, int]:
    """Return the share of the time of calls in which a GPU runs at least one kernel or copy, and their number for each call.

    The profiler takes time of the host for every operation, so that the share is too small where launches are what takes long.
    """
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    call()
    settings.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        started = time.perf_counter()
        for _ in range(calls):
            call()
        settings.synchronize()
        elapsed = time.perf_counter() - started
    events = [event for event in profiler.events() or [] if event.device_type == DeviceType.CUDA]
    intervals = [(event.time_range.start / 1e6, event.time_range.end / 1e6) for event in events]
    return covered(intervals) / elapsed, len(events) // calls


@contextmanager
def waits_of(settings: Settings) -> Iterator[Counter[str]]:
    """Count how often the host waits for a GPU inside the block, by line of the project."""
    lines: Counter[str] = Counter()

    def note(message: Any, category: Any, *rest: Any) -> None:
        if "called a synchronizing" in str(message):  # Torch also warns, once, that this mode is a prototype.
            lines[_line()] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield lines
        finally:
            torch.cuda.set_sync_debug_mode("default")


def _line() -> str:
    for frame in reversed(traceback.extract_stack()):
        if frame.filename.startswith(_PACKAGES):
            return f"{Path(frame.filename).relative_to(_ROOT)}:{frame.lineno}"
    return "?"


@contextmanager
def nothing_waits() -> Iterator[None]:
    """Raise an error inside the block where the host waits for a GPU, but where a result is fetched with ``Tensor.cpu``."""
    fetch = torch.Tensor.cpu

    def fetched(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        torch.cuda.set_sync_debug_mode("default")
        try:
            return fetch(tensor, *args, **options)
        finally:
            torch.cuda.set_sync_debug_mode("error")

    with mock.patch.object(torch.Tensor, "cpu", fetched):
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
