"""Captions joined with the features of their images, as torch datasets for a ``DataLoader``.

`PairDataset` holds all pairs and returns any of them by its number; `PairStream` reads one shard of features at a time, for data
that memory does not hold. Both take captions as tokens or token ids, and images as features or regions.

Letters in shapes: ``N`` pairs, ``I`` images, ``B`` pairs of a batch, ``T`` tokens of the longest caption in a batch.
"""

from __future__ import annotations

import logging
import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from math import gcd
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor
from torch.utils.data import Dataset as MapDataset
from torch.utils.data import IterableDataset, get_worker_info

from schemas.dataset import Dataset, open_dataset
from schemas.errors import DatasetError, UsageError
from schemas.keys import shard_of
from schemas.kinds import numpy_type
from schemas.vocabulary import PAD
from train.data.captions import labels_of, no_captions
from train.data.features import (
    VECTORS,
    ImageFeatures,
    check_finite,
    check_memory,
    missing_images,
    read_features,
    unit_vectors,
    vector_columns,
    vectors_of,
    with_regions,
)
from train.data.splits import MissingFeatures, lacking

KEY = ("image_id", "language", "portion", "index")
_LABELS = ("split", "language", "portion")
_CAPTIONS = {"captions": ("text", "tokens"), "encoded": ("token_ids",)}

logger = logging.getLogger(__name__)


class CaptionRows:
    """Captions of a table, by number. Arrow keeps the text: as Python objects it would take many times the memory."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table.combine_chunks()

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, number: int) -> dict[str, Any]:
        row = {name: self.table[name][number].as_py() for name in self.table.column_names if name != "token_ids"}
        if "token_ids" in self.table.column_names:
            row["token_ids"] = np.array(self.table["token_ids"][number].values, np.int32)
        return row


class PairSource:
    """The two datasets, and what is read of them: arguments and errors of `PairDataset`.

    ``labels`` are the selected values of each label, in the order of `_LABELS`.
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
        if texts.kind not in _CAPTIONS:
            raise DatasetError(f"{texts.folder.location!r} holds {texts.kind}, expected captions, encoded or not")
        if images.kind not in VECTORS:
            raise DatasetError(f"{images.folder.location!r} holds {images.kind}, expected features or regions")
        available = [name for name in images.schema.names if name != "image_id"]
        if unknown := [name for name in columns if name not in available]:
            raise UsageError(f"{images.folder.location!r} has no column {unknown[0]!r}. It has: {', '.join(available)}")
        self.captions, self.features, self.l2 = texts, images, l2
        self.columns = tuple(columns) or tuple(available)
        self.vectors = VECTORS[images.kind]  # Name of the column with the features.
        self.labels = {label: tuple(values) for label, values in zip(_LABELS, labels, strict=True) if values}
        _check_labels(texts, self.labels)

    def captions_of(self, number: int, columns: Sequence[str] | None = None) -> pa.Table:
        """Read the selected captions of a shard: their keys and splits, and these columns (by default their content)."""
        content = _CAPTIONS[self.captions.kind] if columns is None else columns
        table = self.captions.shard(number, [*KEY, "split", *content])
        for label in _LABELS:  # Dictionaries of several shards differ.
            place = table.column_names.index(label)
            table = table.set_column(place, label, table[label].cast(pa.string()))
        for label, values in self.labels.items():
            table = table.filter(pc.is_in(table[label], pa.array(values)))
        return table

    def captions_beside(self, shard: int, image_ids: pa.ChunkedArray) -> tuple[pa.Table, np.ndarray]:
        """Read the selected captions of the images in a shard of features, and the positions of their images there.

        An image is in the shard that its id determines, so that only shards of captions with the same remainder can hold it.
        """
        step = gcd(self.captions.num_shards, self.features.num_shards)
        numbers = range(shard % step, self.captions.num_shards, step)
        tables, positions = [], []
        for number in numbers:
            table = self.captions_of(number)
            found = pc.index_in(table["image_id"], image_ids.combine_chunks())
            tables.append(table.filter(pc.is_valid(found)))
            positions.append(pc.drop_null(found).to_numpy())
        return pa.concat_tables(tables), np.concatenate(positions)

    def pairs_by_shard(self, captions: pa.Table) -> np.ndarray:
        """Return the number of captions whose images are in each shard of features, int64 ``[num_shards]``."""
        counts = captions["image_id"].value_counts()
        shards = [shard_of(image_id, self.features.num_shards) for image_id in counts.field("values").to_pylist()]
        pairs = np.zeros(self.features.num_shards, np.int64)
        np.add.at(pairs, shards, counts.field("counts").to_numpy())
        return pairs

    def without_missing(self, captions: pa.Table, allowed: bool) -> tuple[tuple[MissingFeatures, ...], pa.Table]:
        """Return which images of captions lack features, by split, and the captions of all others."""
        image_ids = pc.unique(captions["image_id"])
        missing = image_ids.take(pa.array(missing_images(self.features, image_ids)))
        if not len(missing):
            return (), captions
        lacks = pc.is_in(captions["image_id"], missing)
        found = []
        for split in sorted(pc.unique(captions["split"]).to_pylist()):
            of_split = pc.equal(captions["split"], split)
            rows = captions.filter(pc.and_(of_split, lacks))
            if not len(rows):
                continue
            found.append(MissingFeatures.of(split, sorted(pc.unique(rows["image_id"]).to_pylist()), len(rows), self.features))
            if not allowed:
                whole = captions.filter(of_split)
                raise lacking(self.features, found[0], images=len(pc.unique(whole["image_id"])), captions=len(whole))
        kept = captions.filter(pc.invert(lacks))
        _check_labels(self.captions, self.labels, kept, f" whose images have features in {self.features.folder.location!r}")
        for entry in found:
            logger.warning(entry.remark)
        return tuple(found), kept

    def read_vectors(self, image_ids: Sequence[str], memory_map: str | os.PathLike[str] | None) -> ImageFeatures:
        """Read the features of images, in their order; arguments as in `train.data.features.read_features`."""
        advice = "take a PairStream, or name a folder as memory_map"
        return read_features(self.features, image_ids, l2=self.l2, memory_map=memory_map, advice=advice)

    def read_column(self, name: str, image_ids: Sequence[str]) -> np.ndarray:
        """Read another column for images, in their order, a few at a time so that nothing is held twice."""
        shape, field = (len(image_ids), *self.features.shape_of(name)), self.features.schema.field(name).type
        dtype = numpy_type(field)
        check_memory(int(np.prod(shape)) * dtype.itemsize, len(image_ids), "take a PairStream, or leave out this column")
        array, requested = np.empty(shape, dtype), pa.array(image_ids, pa.string())
        for batch in self.features.batches(["image_id", name]):
            positions = pc.fill_null(pc.index_in(batch["image_id"], requested), -1).to_numpy()
            column = batch[name]
            flat = column.flatten() if pa.types.is_fixed_size_list(column.type) else column
            values = flat.to_numpy().reshape(len(positions), *shape[1:])[positions >= 0]
            check_finite(values, self.features, [image_ids[n] for n in positions[positions >= 0].tolist()])
            array[positions[positions >= 0]] = values
        return array

    def images_of(self, shard: int) -> pa.Table:
        """Read the images of a shard that have features: their ids, and what `values` needs."""
        columns = dict.fromkeys(["image_id", *self.columns, *vector_columns(self.features)[1:]])
        return with_regions(self.features, self.features.shard(shard, list(columns)))

    def values(self, images: pa.Table, name: str) -> np.ndarray | list[object]:
        """Return the values of a column of images that `images_of` read."""
        values = vectors_of(self.features, images)[0] if name == self.vectors else self.features.values(images[name], name)
        if isinstance(values, np.ndarray):
            check_finite(values, self.features, images["image_id"].to_pylist())
            return unit_vectors(values) if self.l2 and name == self.vectors else values
        return values


def _check_labels(
    captions: Dataset, chosen: Mapping[str, Sequence[str]], kept: pa.Table | None = None, where: str = ""
) -> None:
    """Check that each selected label still has captions."""
    if kept is None:
        present = {
            labels for labels in labels_of(captions) if all(labels[_LABELS.index(name)] in chosen[name] for name in chosen)
        }
    else:
        present = set(zip(*(kept[label].to_pylist() for label in _LABELS), strict=True))
    for place, label in enumerate(_LABELS):
        for value in chosen.get(label, ()):
            if not any(labels[place] == value for labels in present):
                others = "".join(f", {name} {'/'.join(chosen[name])}" for name in chosen if name != label)
                raise DatasetError(no_captions(captions, f"{label} {value!r}{others}{where}"))
    if not present:
        raise DatasetError(no_captions(captions, f"any split{where}"))


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
        self._source = source = PairSource(captions, features, (splits, languages, portions), columns, l2)
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
        captions, features, splits, languages, portions, columns, l2, allow_missing_features: as in `PairDataset`.
        shuffle: draw the order of the shards, and of the pairs within each. It depends on the seed and on the epoch, which
            `set_epoch` sets.
        seed: seed of the order.
        rank: number of this process among those that train together, from 0.
        world_size: number of processes that train together, at most the number of shards.

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
        self._source = source = PairSource(captions, features, (splits, languages, portions), columns, l2)
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
