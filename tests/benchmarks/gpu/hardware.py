"""The machine, and what it reaches of the rates that its data sheet names."""

from __future__ import annotations

import platform
from typing import Any

import torch

from tests.benchmarks.gpu.clocks import rate
from tests.benchmarks.gpu.reporting import Part, Row, Settings
from tests.benchmarks.gpu.subjects import DTYPES, fastest, precisions_of
from tests.benchmarks.processor import cores, machine


def describe(device: torch.device) -> dict[str, Any]:
    """Describe the machine; the same machine has the same description."""
    found: dict[str, Any] = {
        "processor": machine().partition(",")[0],
        "cores": cores(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gpu": None,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "gpu": properties.name,
            "gpu_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    return found


def _subjects(settings: Settings) -> list[tuple[str]]:
    products = [f"product of matrices, {precision}" for precision in precisions_of(settings.device)]
    return [(what,) for what in (*products, "copy in memory", "launch", "copy to the device", "copy from the device")]


def _measure(settings: Settings, what: str) -> Row:
    device, small = settings.device, settings.is_quick
    if what.startswith("product"):
        precision = what.rpartition(" ")[2]
        side = 256 if small else 8192
        a, b = (torch.randn(side, side, device=device).to(DTYPES[precision]) for _ in range(2))
        with fastest(precision):
            return {"rate": rate(settings, lambda: a @ b, 2 * side**3) / 1e12, "unit": "TFLOP/s"}
    if what == "copy in memory":
        source = torch.zeros(2**20 if small else 2**30, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        return {
            "rate": rate(settings, lambda: target.copy_(source), 2 * source.numel()) / 1e9,
            "unit": "GB/s, read and written",
        }
    settings.need_gpu("nothing is launched on it, and nothing copied to it")
    if what == "launch":
        one = torch.zeros(1, device=device)

        def launch() -> None:
            for _ in range(1000):
                one.add_(1)

        with torch.inference_mode():
            return {"rate": 1e6 / rate(settings, launch, 1000), "unit": "µs for an operation"}
    host = torch.zeros(2**20 if small else 2**28, dtype=torch.uint8).pin_memory()
    there = host.to(device)
    target, source = (there, host) if what == "copy to the device" else (host, there)
    return {"rate": rate(settings, lambda: target.copy_(source), host.numel()) / 1e9, "unit": "GB/s, page-locked"}


PARTS = (Part("rates", "what the machine reaches", ("what",), ("rate", "unit"), _subjects, _measure),)
