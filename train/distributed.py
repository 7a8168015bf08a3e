"""Several processes that train one model, one per GPU, started by ``torchrun``.

Every process draws the same batches and embeds its own part of the rows. The embeddings of all parts are joined before they are
ranked, so that the negatives of a query, the loss and the steps are those of a single process, up to the order in which real
numbers are added.
"""

from __future__ import annotations

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
    """This process among those that train the model."""

    rank: int = 0
    size: int = 1

    @property
    def is_rank_zero(self) -> bool:
        """Whether this is the process that evaluates and writes."""
        return self.rank == 0

    def rows(self, count: int) -> slice:
        """Return this process's part of ``count`` rows; parts differ by one row at most."""
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def gather_rows(self, part: Encoded, count: int) -> Encoded:
        """Join what all processes encoded of their rows into ``count`` rows; gradients flow back to every part."""
        return part if self.size == 1 else self._gather_rows(part, count)

    @torch.compiler.disable  # What processes tell each other is no part of a graph.
    def _gather_rows(self, part: Encoded, count: int) -> Encoded:
        rows = self.rows(count)
        if part.values.dim() == 3:
            part = part.padded_to(self._most(part.values.shape[1], part.values.device))
        # All processes compute the whole loss, and the gradient of the sum adds up over them; DDP, which averages the gradients of
        # the parameters, takes that factor out again.
        values = all_reduce(_scatter_rows(part.values, rows, count))
        return Encoded(values, None if part.mask is None else all_reduce(_scatter_rows(part.mask.float(), rows, count)) > 0)

    def _most(self, number: int, device: torch.device) -> int:
        """Return the greatest number that any process has."""
        shared = torch.tensor(number, device=device)
        dist.all_reduce(shared, dist.ReduceOp.MAX)
        return int(shared)

    def wrap(self, module: nn.Module) -> nn.Module:
        """Return the module with gradients averaged over processes."""
        # A batch of only captions leaves the image encoder without a gradient, and one language the encoders of the others.
        return module if self.size == 1 else DistributedDataParallel(module, find_unused_parameters=True)

    def broadcast(self, value: float, device: torch.device) -> float:
        """Return the first process's value in all processes."""
        if self.size == 1:
            return value
        shared = torch.tensor(value, dtype=torch.float64, device=device)
        dist.broadcast(shared, src=0)
        return float(shared)

    def all_reduce_max(self, value: int) -> int:
        """Return the greatest value of all processes, in all of them; none goes on before the last has come here."""
        if self.size == 1:
            return value
        shared = torch.tensor(value)  # On the CPU, so that nothing waits for a GPU.
        dist.all_reduce(shared, dist.ReduceOp.MAX)
        return int(shared)


def _scatter_rows(part: Tensor, rows: slice, count: int) -> Tensor:
    """Return ``count`` rows, all zeros but those of the part."""
    before, after = (part.new_zeros(size, *part.shape[1:]) for size in (rows.start, count - rows.stop))
    return torch.cat([before, part, after])


@contextmanager
def join_processes(device: torch.device) -> Iterator[DistributedContext]:
    """Join the processes that ``torchrun`` started, if it did; otherwise this one is alone. A GPU becomes this process's own."""
    if device.type == "cuda":  # Otherwise NCCL, and whatever names no device, would open contexts on the first GPU as well.
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
