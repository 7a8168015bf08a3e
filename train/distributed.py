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

__all__ = ["Processes", "join_processes"]


@dataclass(frozen=True)
class Processes:
    """This process among those that train the model.

    Attributes:
        rank: index of this process.
        size: number of processes.
    """

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is the process that evaluates and writes."""
        return self.rank == 0

    def rows(self, count: int) -> slice:
        """Return this process's part of ``count`` rows; parts differ by one row at most."""
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def whole(self, part: Tensor, count: int) -> Tensor:
        """Join the embeddings of all processes' rows into ``[count, E]``; gradients flow back to every part."""
        if self.size == 1:
            return part
        rows = self.rows(count)
        # All processes compute the whole loss, and the gradient of the sum adds up over them; DDP, which averages the gradients of
        # the parameters, takes that factor out again.
        padded = torch.cat([part.new_zeros(rows.start, part.shape[1]), part, part.new_zeros(count - rows.stop, part.shape[1])])
        return all_reduce(padded)

    def wrap(self, module: nn.Module) -> nn.Module:
        """Return the module with gradients averaged over processes."""
        # A batch of only captions leaves the image encoder without a gradient, and one language the encoders of the others.
        return module if self.size == 1 else DistributedDataParallel(module, find_unused_parameters=True)

    def agree(self, value: float, device: torch.device) -> float:
        """Return the first process's value in all processes."""
        if self.size == 1:
            return value
        shared = torch.tensor(value, dtype=torch.float64, device=device)
        dist.broadcast(shared, src=0)
        return float(shared)


@contextmanager
def join_processes(device: torch.device) -> Iterator[Processes]:
    """Join the processes that ``torchrun`` started, if it did; otherwise this one is alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Processes()
        return
    if device.type == "cuda":
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    try:
        yield Processes(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()
