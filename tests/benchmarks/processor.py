"""What a benchmark's machine can do, and how evenly it did it: instruction sets, load, and the rate of a fixed piece of work."""

import atexit
import os
import platform
import time
from functools import cache
from pathlib import Path

import numpy as np

CLASSES = ("AVX2", "AVX-512", "AVX-512 with bf16", "AMX")
"""Classes of processors, by what torch's kernels use for matrix products. An older one is named by its system."""

_SETS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16")
_SIDE = 1024
_SECONDS = 0.5


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


@cache
def instruction_sets() -> tuple[str, ...]:
    """Return those of the instruction sets that decide about products which this processor has, as Linux names them."""
    return tuple(name for name in _SETS if name in _cpuinfo("flags").split())


def processor_class() -> str:
    """Return one of `CLASSES`, or the name of the architecture."""
    sets = instruction_sets()
    for name, needed in (("AMX", "amx_bf16"), ("AVX-512 with bf16", "avx512_bf16"), ("AVX-512", "avx512f"), ("AVX2", "avx2")):
        if needed in sets:
            return name
    return platform.machine()


def computes_bf16() -> bool:
    """Return whether there are instructions for bfloat16; elsewhere torch computes it in software, many times slower."""
    return not {"avx512_bf16", "amx_bf16"}.isdisjoint(instruction_sets())


def name_of_kind() -> str:
    """Return maker and class: processors of one class by different makers differ in what they are fast at."""
    maker = next((maker for maker in ("AMD", "Intel") if maker in model()), "")
    return ", ".join(filter(None, (maker, processor_class())))


@cache
def model() -> str:
    """Return the name of the processor."""
    return _cpuinfo("model name") or platform.processor()


def machine() -> str:
    """Describe processor, instruction sets and load, for the record; at the end of the process, print how the last two changed."""
    conditions = Conditions()
    conditions.report_at_exit()
    sets = " ".join(instruction_sets()) or "no vector instructions that are known"
    return f"{model()} ({processor_class()}: {sets}), {cores()} cores, {conditions}, Python {platform.python_version()}"


class Conditions:
    """Load, and the rate of a product of two fixed matrices, now; `later` compares them with what they have become.

    The product's rate by the clock sinks with the load and the frequency, that by processor time with the frequency alone and with
    what neighbours do to caches and shared cores.
    """

    def __init__(self) -> None:
        self._load = os.getloadavg()[0]
        self._by_clock, self._by_processor = _product_rates()

    def __str__(self) -> str:
        return (
            f"load {self._load:.1f}, matrix product {self._by_clock:.0f} GFLOP/s ({self._by_processor:.0f} by processor time)"
        )

    def later(self) -> str:
        """Measure again; return in words what changed since."""
        now = Conditions()
        return (
            f"load {self._load:.1f} before and {now._load:.1f} after; matrix product {now._by_clock / self._by_clock:.2f} times as "
            f"fast as before ({now._by_processor / self._by_processor:.2f} by processor time)"
        )

    def report_at_exit(self) -> None:
        """Print at the end of the process what changed."""
        atexit.register(lambda: print(f"conditions: {self.later()}", flush=True))


def _product_rates() -> tuple[float, float]:
    """Return GFLOP/s of float32 products: by the clock, and per core by processor time."""
    left = np.random.default_rng(0).random((_SIDE, _SIDE), np.float32)
    left @ left  # Starts the threads.
    products, started, worked = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - started < _SECONDS:
        left @ left
        products += 1
    flop = 2e-9 * products * _SIDE**3
    return flop / (time.perf_counter() - started), flop / (time.process_time() - worked)


def _cpuinfo(field: str) -> str:
    path = Path("/proc/cpuinfo")
    for line in path.read_text().splitlines() if path.exists() else ():
        name, _, value = line.partition(":")
        if name.strip() == field:
            return value.strip()
    return ""
