"""Data-parallel training under ``torchrun``, one process per GPU.

Every process draws the same batches and encodes its own rows. All rows are gathered before the loss, so that
negatives, loss and steps equal those of a single process, up to the order of additions.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.parallel import DistributedDataParallel

from train.models.retrieval_model import Encoded


@dataclass(frozen=True)
class DistributedContext:
    """Rank and number of processes."""

    rank: int = 0
    size: int = 1

    @property
    def is_rank_zero(self) -> bool:
        """True in the process that evaluates and writes."""
        return self.rank == 0

    def rows(self, count: int) -> slice:
        """Return this process's part of some rows; part sizes differ by at most one."""
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def gather_rows(self, part: Encoded, count: int) -> Encoded:
        """All-gather ``count`` encoded rows; gradients flow back to every part."""
        return part if self.size == 1 else self._gather_rows(part, count)

    @torch.compiler.disable  # Communication cannot be traced.
    def _gather_rows(self, part: Encoded, count: int) -> Encoded:
        rows = self.rows(count)
        if part.values.dim() == 3:
            size = torch.tensor(part.values.shape[1], device=part.values.device)
            dist.all_reduce(size, dist.ReduceOp.MAX)
            part = part.padded_to(int(size))
        # Every process computes the whole loss, so that its gradient is summed over processes; DDP divides by their number.
        values = all_reduce(_scatter_rows(part.values, rows, count))
        return Encoded(values, None if part.mask is None else all_reduce(_scatter_rows(part.mask.float(), rows, count)) > 0)

    def wrap(self, module: nn.Module) -> nn.Module:
        """Wrap a module so that gradients are averaged over processes."""
        # Encoders of images, or of languages, that a batch does not contain have no gradient.
        return module if self.size == 1 else DistributedDataParallel(module, find_unused_parameters=True)

    def broadcast(self, value: float, device: torch.device) -> float:
        """Return the value of rank 0 in all processes."""
        if self.size == 1:
            return value
        shared = torch.tensor(value, dtype=torch.float64, device=device)
        dist.broadcast(shared, src=0)
        return float(shared)

    def all_reduce_max(self, value: int) -> int:
        """Return the maximum over all processes; also a barrier."""
        if self.size == 1:
            return value
        shared = torch.tensor(value)  # On the CPU, to avoid synchronising with a GPU.
        dist.all_reduce(shared, dist.ReduceOp.MAX)
        return int(shared)


def _scatter_rows(part: Tensor, rows: slice, count: int) -> Tensor:
    """Pad a part with zeros to ``count`` rows."""
    before, after = (part.new_zeros(size, *part.shape[1:]) for size in (rows.start, count - rows.stop))
    return torch.cat([before, part, after])


@contextmanager
def join_processes(device: torch.device) -> Iterator[DistributedContext]:
    """Join the processes of ``torchrun``, if any, inside the block."""
    if device.type == "cuda":  # Otherwise NCCL and calls without a device open contexts on the first GPU.
        torch.cuda.set_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield DistributedContext()
        return
    if device.type == "cuda":
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    try:
        yield DistributedContext(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()
