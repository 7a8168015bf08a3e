"""The captions of a batch as a tree of prefixes: no padding, and a prefix that captions share is processed once.

The state of a GRU after some tokens depends on these tokens alone. All captions begin with ``<start>``, and many continue with "a
man": on average, 128 English captions of Multi30K (comparable) have 1,965 tokens and 1,650 distinct prefixes.

Letters in shapes: ``B`` captions of the batch, ``P`` distinct prefixes of them, ``V`` distinct tokens among them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from train.data.batches import CaptionBatch
from train.devices import upload


@dataclass(frozen=True)
class PackedCaptions:
    """Captions as a tree of their prefixes. Prefix 0 is empty; from 1 on come those of one token, then those of two, and so on.

    Attributes:
        tokens: int64 ``[V]``, the distinct token ids, ascending.
        last_tokens: int64 ``[P]``, the last token of each prefix as an index into ``tokens``.
        parents: int64 ``[P]``, the number of each prefix without its last token.
        ends: int64 ``[B]``, the number of each whole caption, in the requested order.
        step_sizes: number of prefixes of one token, of two tokens, and so on; they add up to P.
    """

    tokens: Tensor
    last_tokens: Tensor
    parents: Tensor
    ends: Tensor
    step_sizes: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.ends)

    def steps(self, of_prefixes: Tensor) -> tuple[Tensor, ...]:
        """Split ``[P, ...]`` into the prefixes of one token, of two tokens, and so on."""
        return of_prefixes.split(self.step_sizes)

    def to(self, device: torch.device | str) -> PackedCaptions:
        """Return the same captions on a device; ``step_sizes`` stay Python numbers."""
        names = ("tokens", "last_tokens", "parents", "ends")
        moved: dict[str, Any] = {name: upload(getattr(self, name), torch.device(device)) for name in names}
        return replace(self, **moved)


def pack(captions: CaptionBatch) -> PackedCaptions:
    """Pack captions; the result is on the CPU, and in the order of the batch."""
    grid = captions.padded(-1)  # [B, steps]
    order = np.lexsort(grid.T[::-1]) if grid.size else np.arange(len(captions))
    grid = grid[order]
    # Among sorted captions a prefix is new if anything in it differs from the previous caption.
    new = np.ones(grid.shape, bool)
    new[1:] = np.logical_or.accumulate(grid[1:] != grid[:-1], axis=1)
    new &= grid >= 0
    numbers = new.T.cumsum().reshape(new.T.shape)  # [steps, B]
    parents = np.concatenate([np.zeros_like(numbers[:1]), numbers[:-1]])[new.T]
    ends = np.empty(len(captions), dtype=np.int64)
    ends[order] = numbers[captions.lengths[order] - 1, np.arange(len(captions))]
    tokens, last_tokens = np.unique(grid.T[new.T], return_inverse=True)
    return PackedCaptions(
        tokens=torch.from_numpy(tokens),
        last_tokens=torch.from_numpy(last_tokens),
        parents=torch.from_numpy(parents),
        ends=torch.from_numpy(ends),
        step_sizes=tuple(new.sum(axis=0).tolist()),
    )
