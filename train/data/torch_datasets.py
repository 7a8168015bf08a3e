"""Pairs of captions and image features, as torch datasets for a ``DataLoader``.

`PairDataset` is map-style; `PairStream` is iterable and reads one shard of features at a time, for data
larger than memory. Captions are tokens or token ids, images are features or regions.

Shapes: ``N`` pairs, ``I`` images, ``R`` regions, ``D`` feature width, ``B`` pairs of a batch, ``T`` tokens of the longest caption.
"""

import logging
import operator
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from math import gcd
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch.utils.data import Dataset as MapDataset
from torch.utils.data import IterableDataset, get_worker_info

from schemas.dataset import Dataset, check_kind, open_dataset
from schemas.errors import DatasetError, UsageError
from schemas.keys import shard_of
from train.data.captions import labels_of, no_captions
from train.data.features import (
    VECTORS,
    ImageFeatures,
    check_finite,
    missing_images,
    read_features,
    unit_vectors,
    vector_columns,
    vectors_of,
    with_regions,
)
from train.data.pair_batches import Pair, PairBatches
from train.data.splits import MissingFeatures, lacking

KEY = ("image_id", "language", "portion", "index")
_LABELS = ("split", "language", "portion")
_CAPTIONS = {"captions": ("text", "tokens"), "encoded": ("token_ids",)}

logger = logging.getLogger(__name__)


def _caption(table: pa.Table, row: int) -> dict[str, Any]:
    """Return a row of captions as Python values, with token ids as an array."""
    return {
        name: np.array(column[row].values, np.int32) if name == "token_ids" else column[row].as_py()
        for name, column in zip(table.column_names, table.columns, strict=True)
    }


class PairSource:
    """Readers of the captions and features of pairs.

    ``labels`` are the selected values of each label, in the order of `_LABELS`. For the rest see `PairDataset`.
    """

    def __init__(
        self,
        captions: str | os.PathLike[str],
        features: str | os.PathLike[str],
        labels: tuple[Sequence[str], ...],
        columns: Sequence[str],
        l2: bool,
    ) -> None:
        for name, values in (*zip(("splits", "languages", "portions"), labels, strict=True), ("columns", columns)):
            if isinstance(values, str):
                raise UsageError(f"{name} is {values!r}, expected a list, e.g. [{values!r}]")
        texts, images = open_dataset(captions), open_dataset(features)
        check_kind(texts, *_CAPTIONS)
        check_kind(images, *VECTORS)
        available = [name for name in images.schema.names if name != "image_id"]
        if unknown := [name for name in columns if name not in available]:
            raise UsageError(f"{images.folder.location!r} has no column {unknown[0]!r}. It has: {', '.join(available)}")
        self.captions, self.features, self.l2 = texts, images, l2
        self.columns = tuple(columns) or tuple(available)
        self.vectors = VECTORS[images.kind]  # Column of the features.
        self.labels = {label: tuple(values) for label, values in zip(_LABELS, labels, strict=True) if values}
        _check_labels(texts, self.labels, labels_of(texts))

    def captions_of(self, shard: int, columns: Sequence[str] | None = None) -> pa.Table:
        """Read keys, splits and columns of the selected captions of a shard."""
        content = _CAPTIONS[self.captions.kind] if columns is None else columns
        table = self.captions.shard(shard, [*KEY, "split", *content])
        for label in _LABELS:  # Shards have different dictionaries.
            position = table.column_names.index(label)
            table = table.set_column(position, label, table[label].cast(pa.string()))
        for label, values in self.labels.items():
            table = table.filter(pc.is_in(table[label], pa.array(values)))
        return table

    def captions_beside(self, shard: int, image_ids: pa.ChunkedArray) -> tuple[pa.Table, np.ndarray]:
        """Read the selected captions of a shard of features, and their images' positions.

        The id of an image determines its shard. Only shards of captions with the same remainder can contain it.
        """
        step = gcd(self.captions.num_shards, self.features.num_shards)
        tables, positions = [], []
        for caption_shard in range(shard % step, self.captions.num_shards, step):
            table = self.captions_of(caption_shard)
            indices = pc.index_in(table["image_id"], image_ids.combine_chunks())
            tables.append(table.filter(pc.is_valid(indices)))
            positions.append(pc.drop_null(indices).to_numpy())
        return pa.concat_tables(tables), np.concatenate(positions)

    def without_missing(self, captions: pa.Table, allowed: bool) -> tuple[tuple[MissingFeatures, ...], pa.Table]:
        """Return images without features, by split, and the captions of all other images."""
        image_ids = pc.unique(captions["image_id"])
        missing_ids = image_ids.take(pa.array(missing_images(self.features, image_ids)))
        if not len(missing_ids):
            return (), captions
        lacks = pc.is_in(captions["image_id"], missing_ids)
        missing = []
        for split in sorted(pc.unique(captions["split"]).to_pylist()):
            in_split = pc.equal(captions["split"], split)
            rows = captions.filter(pc.and_(in_split, lacks))
            if not len(rows):
                continue
            missing.append(MissingFeatures.of(split, sorted(pc.unique(rows["image_id"]).to_pylist()), len(rows), self.features))
            if not allowed:
                whole = captions.filter(in_split)
                raise lacking(self.features, missing[0], images=len(pc.unique(whole["image_id"])), captions=len(whole))
        complete = captions.filter(pc.invert(lacks))
        remaining = set(zip(*(complete[label].to_pylist() for label in _LABELS), strict=True))
        _check_labels(
            self.captions, self.labels, remaining, f" whose images have features in {self.features.folder.location!r}"
        )
        for entry in missing:
            logger.warning(entry.remark)
        return tuple(missing), complete

    def read_column(self, name: str, image_ids: Sequence[str]) -> np.ndarray | list[object]:
        """Read a column without the features of images, in their order."""
        table = self.features.table(["image_id", name])
        rows = pc.index_in(pa.array(image_ids, pa.string()), table["image_id"].combine_chunks())
        return self.values(table.take(rows), name)

    def images_of(self, shard: int) -> pa.Table:
        """Read ids, and the columns for `values`, of the images with features in a shard."""
        columns = dict.fromkeys(["image_id", *self.columns, *vector_columns(self.features)[1:]])
        return with_regions(self.features, self.features.shard(shard, list(columns)))

    def values(self, images: pa.Table, name: str) -> np.ndarray | list[object]:
        """Return the values of a column of images from `images_of`."""
        values = vectors_of(self.features, images)[0] if name == self.vectors else self.features.values(images[name], name)
        if isinstance(values, np.ndarray):
            check_finite(values, self.features, images["image_id"].to_pylist())
            return unit_vectors(values) if self.l2 and name == self.vectors else values
        return values


def _check_labels(
    captions: Dataset, chosen: Mapping[str, Sequence[str]], existing: Collection[tuple[str, ...]], where: str = ""
) -> None:
    """Check that each selected label is among existing splits, languages and portions."""
    present = {labels for labels in existing if all(labels[_LABELS.index(name)] in chosen[name] for name in chosen)}
    for position, label in enumerate(_LABELS):
        for value in chosen.get(label, ()):
            if not any(labels[position] == value for labels in present):
                others = "".join(f", {name} {'/'.join(chosen[name])}" for name in chosen if name != label)
                raise DatasetError(no_captions(captions, f"{label} {value!r}{others}{where}"))
    if not present:
        raise DatasetError(no_captions(captions, f"any split{where}"))


@lru_cache(maxsize=4)
def _permutation(seed: tuple[int, ...], count: int) -> np.ndarray:
    return np.random.default_rng(seed).permutation(count)


class PairDataset(MapDataset[Pair]):
    """Pairs of a caption and its image as a map-style dataset, sorted by key.

    A pair is a dict with:

    * ``image_id``, ``language``, ``portion``, ``index``, ``split``;
    * ``token_ids`` (int32 array) of encoded captions, or ``text`` and ``tokens``;
    * the columns of the image: ``feature``, or ``features`` ``[R, D]``, ``boxes`` ``[R, 4]``, ``num_regions`` and other columns of
      regions, as numpy arrays.

    Args:
        captions: folder of captions, encoded or not.
        features: folder of features or regions.
        splits, languages, portions: captions to select, by default all.
        columns: columns of the images to select, by default all.
        l2: divide each feature by its Euclidean norm, in float32.
        memory_map: folder for a memory-mapped copy of all features, shared by processes, datasets and training runs.
        allow_missing_features: exclude captions of images without features or regions, with a warning,
            instead of raising an error; the attribute ``missing_features`` lists them.

    Raises:
        UsageError: the arguments are invalid, or the features do not fit into memory.
        DatasetError: a dataset is missing or of another kind, lacks these captions, or images lack features.

    Examples:
        >>> pairs = imagepivot.PairDataset("encoded", "features", splits=["train"])
        >>> loader = torch.utils.data.DataLoader(pairs, batch_size=8, shuffle=True, collate_fn=imagepivot.collate_pairs)
        >>> next(iter(loader))["feature"].shape
        torch.Size([8, 2048])
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
        self._source = source = PairSource(captions, features, (splits, languages, portions), columns, l2)
        table = pa.concat_tables(source.captions_of(shard) for shard in range(source.captions.num_shards))
        self.missing_features, complete = source.without_missing(table, allow_missing_features)
        # Stays in Arrow: as Python objects, text takes many times the memory.
        self._table = complete.sort_by([(name, "ascending") for name in KEY]).combine_chunks()
        images = self._table["image_id"].combine_chunks().dictionary_encode()
        self.image_ids: tuple[str, ...] = tuple(images.dictionary.to_pylist())  # Sorted like the rows.
        self.images: np.ndarray = images.indices.to_numpy()
        self._columns: dict[str, np.ndarray | list[object] | ImageFeatures] = {}
        for name in source.columns:
            if name == source.vectors:
                advice = "take a PairStream, or name a folder as memory_map"
                self._columns[name] = read_features(
                    source.features, self.image_ids, l2=l2, memory_map=memory_map, advice=advice
                )
            else:
                self._columns[name] = source.read_column(name, self.image_ids)

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> Pair:
        index = range(len(self))[operator.index(index)]
        image = int(self.images[index])
        return _caption(self._table, index) | {
            name: column.as_stored(np.array([image]))[0] if isinstance(column, ImageFeatures) else _copy_value(column, image)
            for name, column in self._columns.items()
        }

    def __iter__(self) -> Iterator[Pair]:
        return (self[index] for index in range(len(self)))

    def batch(self, batch_size: int, *, shuffle: bool = False, seed: int = 0, drop_last: bool = False) -> PairBatches:
        """Return batches by index, shuffled by seed and epoch."""
        read = partial(self._pairs_between, shuffle, seed)
        return PairBatches(read, len(self), batch_size, drop_last, shuffle=shuffle, seed=seed)

    def _pairs_between(self, shuffle: bool, seed: int, epoch: int, start: int, stop: int) -> Iterator[Pair]:
        order = _permutation((seed, epoch), len(self)) if shuffle else np.arange(len(self))
        return map(self.__getitem__, order[start:stop].tolist())


class PairStream(IterableDataset[Pair]):
    """Pairs as an iterable dataset, with one shard of features in memory at a time.

    The workers of a ``DataLoader`` share the shards, so that every pair occurs once. Captions with the same
    number of shards as the features are read fastest. ``num_pairs`` is the number of pairs; ``len`` is
    undefined, since the last batch of each worker may be short.

    In distributed training every process gets ``num_pairs // world_size`` pairs per epoch, from consecutive
    shards; the remaining pairs at the end of the epoch are dropped.

    Args:
        captions, features, splits, languages, portions, columns, l2, allow_missing_features: as in `PairDataset`.
        shuffle: shuffle the shards, and the pairs within each, by seed and epoch (`set_epoch`).
        world_size: number of processes, at most the number of shards.

    Raises:
        UsageError: the arguments are invalid.
        DatasetError: a dataset is missing or of another kind, lacks these captions, or images lack features.

    Examples:
        >>> pairs = imagepivot.PairStream("encoded", "features", splits=["train"], shuffle=True)
        >>> loader = torch.utils.data.DataLoader(pairs, batch_size=8, collate_fn=imagepivot.collate_pairs)
        >>> sum(len(batch["image_id"]) for batch in loader) == pairs.num_pairs
        True
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
        self._source = source = PairSource(captions, features, (splits, languages, portions), columns, l2)
        shards = (source.captions_of(shard, ()) for shard in range(source.captions.num_shards))
        self.missing_features, complete = source.without_missing(pa.concat_tables(shards), allow_missing_features)
        self.num_pairs = len(complete)
        counts, num_shards = complete["image_id"].value_counts(), source.features.num_shards
        image_shards = [shard_of(image_id, num_shards) for image_id in counts.field("values").to_pylist()]
        self._counts = np.bincount(image_shards, counts.field("counts"), num_shards).astype(np.int64)  # Pairs by shard.
        if not world_size <= min(len(self._counts), self.num_pairs):
            raise UsageError(
                f"world_size is {world_size}, more than the {self.num_pairs:,} pairs or {len(self._counts)} "
                "shards of features: start fewer processes, or extract the features again with more shards"
            )
        self._shuffle, self._seed = shuffle, seed
        self._rank, self._world_size = rank, world_size
        self._loaded: tuple[int, pa.Table, np.ndarray, dict[str, Any]] | None = None
        # In shared memory, for persistent workers.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, before its first pair is drawn, also in workers."""
        self._epoch.fill_(epoch)

    def __iter__(self) -> Iterator[Pair]:
        worker = get_worker_info()
        num_workers, worker_id = (worker.num_workers, worker.id) if worker is not None else (1, 0)
        epoch = int(self._epoch)
        if self._world_size == 1:
            for shard in self._shards(epoch)[worker_id::num_workers].tolist():
                yield from self._pairs_of(shard, epoch, slice(None))
            return
        share = self.num_pairs // self._world_size
        yield from self._pairs_between(epoch, share * worker_id // num_workers, share * (worker_id + 1) // num_workers)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_loaded": None}

    def batch(self, batch_size: int, *, drop_last: bool = False) -> PairBatches:
        """Return the batches of this process by index; each worker reads all shards."""
        arguments = {"shuffle": self._shuffle, "seed": self._seed, "world_size": self._world_size}
        return PairBatches(self._pairs_between, self.num_pairs // self._world_size, batch_size, drop_last, **arguments)

    def _shards(self, epoch: int) -> np.ndarray:
        """Return the shards of features in the order of an epoch."""
        shards = len(self._counts)
        return _permutation((self._seed, epoch), shards) if self._shuffle else np.arange(shards)

    def _pairs_between(self, epoch: int, start: int, stop: int) -> Iterator[Pair]:
        """Yield pairs by their positions in this process's share of an epoch."""
        start, stop = (self._rank * (self.num_pairs // self._world_size) + position for position in (start, stop))
        shards = self._shards(epoch)
        ends = np.cumsum(self._counts[shards])
        for shard, begin, end in zip(shards.tolist(), (ends - self._counts[shards]).tolist(), ends.tolist(), strict=True):
            if max(begin, start) < min(end, stop):
                yield from self._pairs_of(shard, epoch, slice(max(begin, start) - begin, min(end, stop) - begin))

    def _pairs_of(self, shard: int, epoch: int, part: slice) -> Iterator[Pair]:
        if self._loaded is None or self._loaded[0] != shard:
            self._loaded = None  # Memory holds one shard.
            images = self._source.images_of(shard)
            captions, positions = self._source.captions_beside(shard, images["image_id"])
            columns = {name: self._source.values(images, name) for name in self._source.columns}
            self._loaded = shard, captions.combine_chunks(), positions, columns
        _, table, positions, columns = self._loaded
        order = _permutation((self._seed, epoch, shard), len(table)) if self._shuffle else np.arange(len(table))
        for row in order[part].tolist():
            yield _caption(table, row) | {name: _copy_value(column, int(positions[row])) for name, column in columns.items()}


def _copy_value(column: np.ndarray | list[object], index: int) -> object:
    """Copy a value, so that changes to it do not reach the dataset."""
    value = column[index]
    return np.array(value) if isinstance(value, np.ndarray) else value.item() if isinstance(value, np.generic) else value
