"""Captions joined with the features of their images, as torch datasets for a ``DataLoader``.

`PairDataset` holds all pairs and returns any of them by its number; `PairStream` reads one shard of features at a time, for data
that memory does not hold. Both take captions as tokens or token ids, and images as features or regions.

Letters in shapes: ``N`` pairs, ``I`` images, ``B`` pairs of a batch, ``T`` tokens of the longest caption in a batch.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from torch.utils.data import Dataset as MapDataset
from torch.utils.data import IterableDataset, get_worker_info

from schemas.errors import UsageError
from schemas.vocabulary import PAD
from train.data.pair_sources import KEY, CaptionRows, PairSource

Pair = dict[str, Any]


class PairDataset(MapDataset[Pair]):
    """Pairs of a caption and its image, by number: sorted by the captions' keys, whatever the number of shards.

    A pair is a dict of ``image_id``, ``language``, ``portion``, ``index``, ``split``; of ``token_ids`` (int32 array), or ``text``
    and ``tokens`` where the captions are not encoded; and of the columns of the image: ``feature``, or ``features`` ``[R, D]``,
    ``boxes`` ``[R, 4]``, ``num_regions`` and the others of regions. Vectors are numpy arrays of their own shape.

    Args:
        captions: folder of captions, encoded or not.
        features: folder of features or regions.
        splits: only captions of these splits; of all by default.
        languages: only captions in these languages.
        portions: only captions of these portions.
        columns: only these columns of the images.
        l2: divide each feature (of each region) by its Euclidean norm; it is a float32 then.
        memory_map: folder for a file with the features of the whole dataset, which is mapped instead of being held in memory.
            Processes share it, and so do later datasets and trainings with this folder, whatever they select.
        allow_missing_features: leave out captions of images that lack features, with a warning, instead of raising an error;
            ``missing_features`` says which. An image in which no region was found lacks them.

    Raises:
        UsageError: the arguments make no sense, or the features do not fit into memory.
        DatasetError: a dataset is missing or of another kind, there are no such captions, or images lack features.

    Example:
        >>> pairs = PairDataset("build/demo/encoded", "build/demo/features", splits=["train"])  # doctest: +SKIP
        >>> loader = torch.utils.data.DataLoader(pairs, batch_size=8, shuffle=True, collate_fn=collate_pairs)  # doctest: +SKIP
    """

    def __init__(
        self,
        captions: str | os.PathLike[str],
        features: str | os.PathLike[str],
        *,
        splits: Sequence[str] = (),
        languages: Sequence[str] = (),
        portions: Sequence[str] = (),
        columns: Sequence[str] = (),
        l2: bool = False,
        memory_map: str | os.PathLike[str] | None = None,
        allow_missing_features: bool = False,
    ) -> None:
        self._source = source = PairSource.open(captions, features, (splits, languages, portions), columns, l2)
        table = pa.concat_tables(source.captions_of(number) for number in range(source.captions.num_shards))
        self.missing_features, kept = source.without_missing(table, allow_missing_features)
        self._rows = CaptionRows(kept.sort_by([(name, "ascending") for name in KEY]))
        images = self._rows.table["image_id"].combine_chunks().dictionary_encode()
        # The rows are sorted, so that the ids are, too.
        self.image_ids: tuple[str, ...] = tuple(images.dictionary.to_pylist())
        self.images: np.ndarray = images.indices.to_numpy()
        self._vectors = source.read_vectors(self.image_ids, memory_map) if source.vectors in source.columns else None
        self._columns = {
            name: None if name == source.vectors else source.read_column(name, self.image_ids) for name in source.columns
        }

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> Pair:
        number = range(len(self))[operator.index(number)]
        image = int(self.images[number])
        return self._rows[number] | {name: self._value(column, image) for name, column in self._columns.items()}

    def __iter__(self) -> Iterator[Pair]:
        return (self[number] for number in range(len(self)))

    def _value(self, column: np.ndarray | None, image: int) -> object:
        """Return the value of an image in a column; None stands for that of the features."""
        if column is not None:
            return _value(column, image)
        assert self._vectors is not None
        return self._vectors.as_stored(np.array([image]))[0]


class PairStream(IterableDataset[Pair]):
    """Pairs as in `PairDataset`, one shard of features after the other: a process holds one of them at a time.

    With a ``DataLoader``, each worker takes some of the shards, so that every pair comes once; more workers than shards have
    nothing to do. Captions with the same number of shards as the features are read with them; others are looked up, which takes
    longer. The number of pairs is ``num_pairs``; there is no ``len``, because the last batch of each worker may be short.

    Processes that train together get the same number of pairs in every epoch, ``num_pairs // world_size``, and thus of batches.
    Each takes its stretch of the shards in their order, and two neighbours share a shard. The pairs that are left over, fewer
    than there are processes, are dropped: the last in the order of the epoch.

    Args:
        captions: as in `PairDataset`.
        features: as in `PairDataset`.
        splits: as in `PairDataset`.
        languages: as in `PairDataset`.
        portions: as in `PairDataset`.
        columns: as in `PairDataset`.
        l2: as in `PairDataset`.
        shuffle: draw the order of the shards, and of the pairs within each. It depends on the seed and on the epoch, which
            `set_epoch` sets.
        seed: seed of the order.
        rank: number of this process among those that train together, from 0.
        world_size: number of processes that train together, at most the number of shards.
        allow_missing_features: as in `PairDataset`.

    Raises:
        UsageError: the arguments make no sense.
        DatasetError: a dataset is missing or of another kind, there are no such captions, or images lack features.
    """

    def __init__(
        self,
        captions: str | os.PathLike[str],
        features: str | os.PathLike[str],
        *,
        splits: Sequence[str] = (),
        languages: Sequence[str] = (),
        portions: Sequence[str] = (),
        columns: Sequence[str] = (),
        l2: bool = False,
        shuffle: bool = False,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        allow_missing_features: bool = False,
    ) -> None:
        if not 0 <= rank < world_size:
            raise UsageError(f"rank is {rank} of {world_size} processes, expected 0 to {world_size - 1}")
        if seed < 0:
            raise UsageError(f"seed is {seed}, expected 0 or more")
        self._source = source = PairSource.open(captions, features, (splits, languages, portions), columns, l2)
        shards = (source.captions_of(number, ()) for number in range(source.captions.num_shards))
        self.missing_features, kept = source.without_missing(pa.concat_tables(shards), allow_missing_features)
        self.num_pairs = len(kept)
        self._counts = source.pairs_by_shard(kept) if world_size > 1 else None
        if self._counts is not None and not world_size <= min(len(self._counts), self.num_pairs):
            raise UsageError(
                f"world_size is {world_size}, and there are {self.num_pairs:,} pairs in {len(self._counts)} shards of features: "
                "start at most as many processes, or make the features again with more shards"
            )
        self._shuffle, self._seed = shuffle, seed
        self._rank, self._world_size = rank, world_size
        # In shared memory, so that workers that live through several epochs see it.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of an epoch, before its first pair is drawn; workers see it as well."""
        self._epoch.fill_(epoch)

    def __iter__(self) -> Iterator[Pair]:
        worker = get_worker_info()
        workers, number = (worker.num_workers, worker.id) if worker is not None else (1, 0)
        epoch, shards = int(self._epoch), np.arange(self._source.features.num_shards)
        if self._shuffle:
            shards = np.random.default_rng((self._seed, epoch)).permutation(shards)
        if self._counts is None:
            for shard in shards[number::workers].tolist():
                yield from self._pairs_of(shard, epoch, slice(None))
            return
        share = self.num_pairs // self._world_size
        start, stop = (self._rank * share + share * part // workers for part in (number, number + 1))
        ends = np.cumsum(self._counts[shards])
        for shard, begin, end in zip(shards.tolist(), (ends - self._counts[shards]).tolist(), ends.tolist(), strict=True):
            if max(begin, start) < min(end, stop):
                yield from self._pairs_of(shard, epoch, slice(max(begin, start) - begin, min(end, stop) - begin))

    def _pairs_of(self, shard: int, epoch: int, part: slice) -> Iterator[Pair]:
        source = self._source
        images = source.images_of(shard)
        kept, positions = source.captions_beside(shard, images["image_id"])
        rows = CaptionRows(kept)
        columns = {name: source.values(images, name) for name in source.columns}
        order = np.arange(len(rows))
        if self._shuffle:
            order = np.random.default_rng((self._seed, epoch, shard)).permutation(order)
        for row in order[part].tolist():
            yield rows[row] | {name: _value(column, int(positions[row])) for name, column in columns.items()}


def collate_pairs(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Join pairs into a batch, for the ``collate_fn`` of a ``DataLoader``.

    Returns:
        ``token_ids`` int64 ``[B, T]``, padded with 0 (``<pad>``), and ``lengths`` int64 ``[B]``; arrays and numbers as tensors
        ``[B, ...]``; text, tokens and labels as lists.
    """
    batch: dict[str, Any] = {}
    for name, first in pairs[0].items():
        values = [pair[name] for pair in pairs]
        if name == "token_ids":
            batch["token_ids"], batch["lengths"] = _padded(values)
        elif isinstance(first, np.ndarray):
            batch[name] = torch.from_numpy(np.stack(values))
        else:
            batch[name] = torch.tensor(values) if isinstance(first, int) else values
    return batch


def _padded(captions: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
    lengths = np.array([len(caption) for caption in captions], np.int64)
    padded = np.full((len(captions), lengths.max()), PAD, np.int64)
    padded[np.arange(padded.shape[1]) < lengths[:, None]] = np.concatenate(captions)
    return torch.from_numpy(padded), torch.from_numpy(lengths)


def _value(column: np.ndarray | list[object], number: int) -> object:
    """Return a value of its own: nothing that is done to it changes the dataset."""
    value = column[number]
    return np.array(value) if isinstance(value, np.ndarray) else value.item() if isinstance(value, np.generic) else value
