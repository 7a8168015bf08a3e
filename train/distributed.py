"""Several processes that train one model, one a GPU, started by ``torchrun``.

Every process draws the same batches and embeds its own part of the rows; the embeddings of all parts are brought together before
they are ranked, so that the negatives of a query, the loss and the steps are those of a single process (but for the order in which
real numbers are added up).
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
        rank: number of this process.
        size: number of processes.
    """

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is the process that evaluates and writes."""
        return self.rank == 0

    def rows(self, count: int) -> slice:
        """This process's rows of a batch of ``count``; the parts differ by one row at most."""
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def whole(self, part: Tensor, count: int) -> Tensor:
        """Embeddings ``[count, E]`` of a whole batch from those of this process's rows; gradients flow back to every part."""
        if self.size == 1:
            return part
        rows = self.rows(count)
        # The gradient of the sum is summed over processes that all compute the whole loss; DDP's mean of the parameters' gradients
        # takes that factor out again.
        padded = torch.cat([part.new_zeros(rows.start, part.shape[1]), part, part.new_zeros(count - rows.stop, part.shape[1])])
        return all_reduce(padded)

    def wrap(self, module: nn.Module) -> nn.Module:
        """The module with gradients that are averaged over processes."""
        # A batch of captions alone leaves the image encoder without a gradient, one language the encoders of the others.
        return module if self.size == 1 else DistributedDataParallel(module, find_unused_parameters=True)

    def agree(self, value: float, device: torch.device) -> float:
        """The first process's value, in all of them."""
        if self.size == 1:
            return value
        shared = torch.tensor(value, dtype=torch.float64, device=device)
        dist.broadcast(shared, src=0)
        return float(shared)


@contextmanager
def join_processes(device: torch.device) -> Iterator[Processes]:
    """Joins the processes that ``torchrun`` started; on its own without it."""
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
