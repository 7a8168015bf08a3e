"""Batches of pairs by index, for training loops that resume within an epoch."""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset as MapDataset

from schemas.errors import UsageError
from schemas.vocabulary import PAD
from train.data.batches import CaptionBatch

Pair = dict[str, Any]
_Read = Callable[[int, int, int], Iterable[Pair]]


class PairBatches(MapDataset[dict[str, Any]]):
    """Batches of an epoch by index, from `PairDataset.batch` or `PairStream.batch`.

    A batch is a function of its index, the epoch and the arguments, so that any number of workers give the same order. The entry
    ``state`` of a batch is the state after it: save that of the last batch that was trained on, and load it before the loop. A
    loader without a batch size takes the batches, which ``torchdata.StatefulDataLoader`` resumes by its own state, too.

    ``len`` is the number of batches from the loaded state to the end of the epoch.

    Examples:
        >>> batches = imagepivot.PairDataset("encoded", "features").batch(8, shuffle=True, seed=1)
        >>> loader = torch.utils.data.DataLoader(batches, batch_size=None)
        >>> state = next(iter(loader))["state"]
        >>> batches.load_state_dict(state)
        >>> next(iter(loader))["state"]["batch"]
        2
    """

    def __init__(self, read: _Read, num_pairs: int, batch_size: int, drop_last: bool, **arguments: Any) -> None:
        if batch_size < 1:
            raise UsageError(f"batch_size is {batch_size}, expected 1 or more")
        self._read, self._num_pairs, self._batch_size = read, num_pairs, batch_size
        self._num_batches = num_pairs // batch_size if drop_last else -(-num_pairs // batch_size)
        self._arguments = {"batch_size": batch_size, "pairs": num_pairs, "drop_last": drop_last, **arguments}
        # Epoch and first batch, in shared memory for persistent workers.
        self._start = torch.zeros(2, dtype=torch.int64).share_memory_()

    @property
    def epoch(self) -> int:
        """The current epoch."""
        return int(self._start[0])

    def __len__(self) -> int:
        return self._num_batches - int(self._start[1])

    def __getitem__(self, index: int) -> dict[str, Any]:
        epoch, first = self._start.tolist()
        batch = range(first, self._num_batches)[operator.index(index)]
        start = batch * self._batch_size
        pairs = self._read(epoch, start, min(start + self._batch_size, self._num_pairs))
        return {**collate_pairs(list(pairs)), "state": {**self._arguments, "epoch": epoch, "batch": batch + 1}}

    def set_epoch(self, epoch: int) -> None:
        """Begin another epoch with its first batch, also in workers."""
        if epoch != self.epoch:
            self._start.copy_(torch.tensor([epoch, 0]))

    def state_dict(self) -> dict[str, Any]:
        """Return the state before the batch of index 0."""
        epoch, batch = self._start.tolist()
        return {**self._arguments, "epoch": epoch, "batch": batch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the batch that had this ``state``.

        Raises:
            UsageError: it is the state of other batches.
        """
        for name, value in self._arguments.items():
            if state.get(name) != value:
                raise UsageError(
                    f"{name} of the state is {state.get(name)!r}, expected {value!r}: create the batches as before"
                )
        self._start.copy_(torch.tensor([state["epoch"], state["batch"]]))


def collate_pairs(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Collate pairs into a batch, as ``collate_fn`` of a ``DataLoader``.

    Returns:
        ``token_ids`` int64 ``[B, T]``, padded with 0 (``<pad>``), and ``lengths`` int64 ``[B]``; arrays and
        numbers as tensors ``[B, ...]``; text, tokens and labels as lists.
    """
    batch: dict[str, Any] = {}
    for name, first in pairs[0].items():
        values = [pair[name] for pair in pairs]
        if name == "token_ids":
            captions = CaptionBatch(np.concatenate(values), np.cumsum([0, *map(len, values)]), np.arange(len(values)))
            batch["token_ids"], batch["lengths"] = torch.from_numpy(captions.padded(PAD)), torch.from_numpy(captions.lengths)
        elif isinstance(first, np.ndarray):
            batch[name] = torch.from_numpy(np.stack(values))
        else:
            batch[name] = torch.tensor(values) if isinstance(first, int) else values
    return batch
