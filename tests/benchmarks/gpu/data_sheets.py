"""What NVIDIA publishes of its GPUs, and the least time that counts take at these rates."""

from __future__ import annotations

from dataclasses import dataclass

from tests.benchmarks.gpu.counting import Counts

__all__ = ["DATA_SHEETS", "LAUNCH_SECONDS", "DataSheet", "Estimate"]

LAUNCH_SECONDS = 10e-6
"""Assumed time of the host for an operation of torch; nothing that NVIDIA publishes. The part ``rates`` measures it."""


@dataclass(frozen=True)
class DataSheet:
    """Peak rates, without sparsity.

    Attributes:
        name: the GPU.
        tflops: 10¹² operations a second by precision, a multiply-add being two; None where the GPU has no such units.
        bandwidth: 10⁹ bytes of its memory a second.
        source: address.
    """

    name: str
    tflops: dict[str, float | None]
    bandwidth: float
    source: str


# Where a data sheet only has the rate with sparsity, it is twice the one without.
DATA_SHEETS = (
    DataSheet("H100 SXM", {"fp32": 67, "tf32": 494.5, "bf16": 989.5}, 3350, "https://www.nvidia.com/en-us/data-center/h100/"),
    DataSheet(
        "A100 SXM 80 GB", {"fp32": 19.5, "tf32": 156, "bf16": 312}, 2039, "https://www.nvidia.com/en-us/data-center/a100/"
    ),
    DataSheet("L4", {"fp32": 30.3, "tf32": 60, "bf16": 121}, 300, "https://www.nvidia.com/en-us/data-center/l4/"),
    # Its 65 are those of fp16: it has neither TF32 nor bf16.
    DataSheet("T4", {"fp32": 8.1, "tf32": None, "bf16": 65}, 320, "https://www.nvidia.com/en-us/data-center/tesla-t4/"),
)


@dataclass(frozen=True)
class Estimate:
    """The least seconds that a batch takes.

    Attributes:
        products: of the operations whose multiply-adds take longer than their bytes, at the peak rate of their type.
        memory: of those whose bytes take longer.
        launches: of the host, for all operations.
    """

    products: float
    memory: float
    launches: float

    @property
    def seconds(self) -> float:
        """Device and host work at the same time."""
        return max(self.products + self.memory, self.launches)

    @property
    def bound(self) -> str:
        """What takes longest."""
        if self.launches > self.products + self.memory:
            return "launches"
        return "products" if self.products > self.memory else "memory"

    @staticmethod
    def of(counts: Counts, sheet: DataSheet, precision: str) -> Estimate | None:
        """Estimate a batch; None where the GPU does not compute in the precision."""
        peaks = {16: sheet.tflops["bf16"], 32: sheet.tflops["tf32" if precision == "tf32" else "fp32"]}
        if peaks[32] is None:
            return None
        totals = {"products": 0.0, "memory": 0.0}
        for operation in counts.operations:
            products = 2 * operation.macs / (1e12 * (peaks[operation.bits] or 1)) if operation.macs else 0.0
            memory = operation.bytes / (1e9 * sheet.bandwidth)
            totals["products" if products > memory else "memory"] += max(products, memory)
        return Estimate(**totals, launches=counts.launches * LAUNCH_SECONDS)
