"""The captions and images that torch datasets join: which of them are selected, and how they are read."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.dataset import Dataset, open_dataset
from schemas.errors import DatasetError, UsageError
from schemas.keys import shard_of
from schemas.kinds import numpy_type
from train.data.captions import labels_of, no_captions
from train.data.features import ImageFeatures, check_memory, missing_images, read_features
from train.data.splits import MissingFeatures, lacking
from train.data.vectors import VECTORS, check_finite, unit_vectors, vector_columns, vectors_of, with_regions

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


@dataclass(frozen=True)
class PairSource:
    """The two datasets, and what is read of them.

    Attributes:
        captions: captions, encoded or not.
        features: features or regions.
        labels: the selected values of each label; all of a label that is not there.
        columns: the columns of the images.
        l2: whether to divide the vectors by their norms.
    """

    captions: Dataset
    features: Dataset
    labels: Mapping[str, tuple[str, ...]]
    columns: tuple[str, ...]
    l2: bool

    @classmethod
    def open(
        cls,
        captions: str | os.PathLike[str],
        features: str | os.PathLike[str],
        labels: tuple[Sequence[str], ...],
        columns: Sequence[str],
        l2: bool,
    ) -> PairSource:
        """Open both datasets and check the selection; arguments as in `train.data.torch_datasets.PairDataset`.

        Raises:
            UsageError: a selection is no list, or there is no such column.
            DatasetError: a dataset is missing or of another kind, or there are no such captions.
        """
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
        chosen = {label: tuple(values) for label, values in zip(_LABELS, labels, strict=True) if values}
        _check_labels(texts, chosen)
        return cls(texts, images, chosen, tuple(columns) or tuple(available), l2)

    @property
    def vectors(self) -> str:
        """Name of the column with the features."""
        return VECTORS[self.features.kind]

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
        """Read the features of images, in their order; arguments as in `train.data.read_features`."""
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
