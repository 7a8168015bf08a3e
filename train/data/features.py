"""Image features as one array, in memory or mapped from a file.

A dataset holds one vector for each image (kind ``features``), or regions, of which some may be padding (kind ``regions``).

Letters in shapes: ``I`` images, ``D`` feature width, ``R`` features of an image, ``M`` images whose features are held, ``N`` rows,
or images of a batch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.dataset import Dataset
from schemas.errors import DatasetError, UsageError
from schemas.features import FeatureSpec
from schemas.fingerprints import sha256_of_json
from schemas.parameters import FeaturesParameters
from schemas.process.resources import memory_limit
from train.data.memmap import MappedField, mapped_array, release

VECTORS = {"features": "feature", "regions": "features"}
"""Name of the column with the vectors, by kind of the dataset."""


def feature_spec(dataset: Dataset) -> FeatureSpec:
    """Return the feature that a dataset holds.

    Raises:
        DatasetError: the dataset is neither of kind ``features`` nor of kind ``regions``.
    """
    if dataset.kind not in VECTORS or dataset.spec is None:
        raise DatasetError(
            f"{dataset.folder.location!r} holds {dataset.kind}, expected features or regions: give the folder of the features"
        )
    return dataset.spec


def vector_columns(dataset: Dataset) -> list[str]:
    """Return the columns that `vectors_of` needs."""
    return [VECTORS[dataset.kind], *(["num_regions"] if dataset.kind == "regions" else [])]


def with_regions(dataset: Dataset, rows: pa.Table) -> pa.Table:
    """Return rows without those of images in which no region was found: they have no features."""
    return rows.filter(pc.greater(rows["num_regions"], 0)) if dataset.kind == "regions" else rows


def vectors_of(dataset: Dataset, rows: pa.RecordBatch | pa.Table) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the features of rows that were read.

    The rows have the columns that `vector_columns` names.

    Returns:
        Features ``[N, D]`` or ``[N, R, D]`` in their stored type, zeros in the place of padding whatever stands there; and how many
        of the R are in use, ``[N]``, None where the dataset has no padding.

    Raises:
        DatasetError: more regions are in use than there is room for, or fewer than none.
    """
    spec = feature_spec(dataset)
    values = _array(rows[VECTORS[dataset.kind]]).flatten().to_numpy().reshape(rows.num_rows, *spec.shape)
    if dataset.kind != "regions":
        return values, None
    counts = _array(rows["num_regions"]).to_numpy()
    if len(counts) and not 0 <= counts.min() <= counts.max() <= spec.shape[0]:
        raise DatasetError(
            f"{dataset.folder.location!r} says that between {counts.min()} and {counts.max()} regions of an image are in use, "
            f"expected 0 to {spec.shape[0]}: run 'imagepivot validate' on it, and copy or extract it again"
        )
    padding = ~in_use(counts, spec.shape[0])
    if padding.any():
        values = values.copy()
        values[padding] = 0
    return values, counts


def in_use(counts: np.ndarray, room: int) -> np.ndarray:
    """Return which of the features of each image are in use, bool ``[N, R]``: so many, from the first on."""
    return np.arange(room) < counts[:, np.newaxis]


def check_finite(values: np.ndarray, dataset: Dataset, image_ids: Sequence[str]) -> None:
    """Check that no value is NaN or infinite.

    Raises:
        DatasetError: a value is not finite.
    """
    if values.dtype.kind != "f" or np.isfinite(values).all():
        return
    broken = ~np.isfinite(values.reshape(len(values), -1)).all(1)
    raise DatasetError(
        f"{dataset.folder.location!r} holds features that are not finite numbers, among them that of image "
        f"{image_ids[int(np.flatnonzero(broken)[0])]!r}: run 'imagepivot validate' on it, and copy or extract it again"
    )


def norms_of(values: np.ndarray) -> np.ndarray:
    """Return the Euclidean norms ``[...]`` of vectors ``[..., D]``, in float32; infinite where the sum of squares is too large."""
    with np.errstate(over="ignore"):
        return np.linalg.norm(values.astype(np.float32), axis=-1)


def unit_vectors(values: np.ndarray, norms: np.ndarray | None = None) -> np.ndarray:
    """Return vectors ``[..., D]`` divided by their Euclidean norms, in float32; a vector of zeros stays zero."""
    norms = norms_of(values) if norms is None else norms
    return values.astype(np.float32, copy=False) / np.where(norms > 0, norms, np.float32(1))[..., np.newaxis]


def _array(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


_MEMORY_SHARE = 0.5
"""Share of the memory that features may occupy; larger ones must be mapped from a file."""

_BATCH_BYTES = 32 << 20
_BLOCK = 1024


@dataclass(frozen=True)
class ImageFeatures:
    """Features of images, kept as they are stored: what is indexed is converted, a batch at a time.

    ``features[images]`` are the features of the images in these positions (integers, or a slice), float32 ``[N, D]``, or
    ``[N, R, D]`` where the dataset has several for each image. Padding is zeros. What is mapped is pickled as the path of
    its file.

    Attributes:
        stored: ``[M, D]`` or ``[M, R, D]`` in the type of the dataset. May be mapped from a file, read-only.
        norms: float32 ``[M]`` or ``[M, R]``: Euclidean norms.
        rows: int64 ``[I]``: the row of each image in ``stored``.
        spec: the feature that the dataset holds.
        l2: whether each feature is divided by its norm when it is read; a feature of zeros stays as it is.
        counts: int32 ``[M]``: how many features are in use, from the first on; None where the dataset has no padding.
    """

    stored: np.ndarray
    norms: np.ndarray
    rows: np.ndarray
    spec: FeatureSpec
    l2: bool = False
    counts: np.ndarray | None = None

    @classmethod
    def of(cls, records: np.ndarray, rows: np.ndarray, spec: FeatureSpec, l2: bool) -> ImageFeatures:
        """Return features whose arrays are the fields of records, as a mapped copy holds them."""
        names = records.dtype.names or ()
        return cls(records["stored"], records["norms"], rows, spec, l2, records["counts"] if "counts" in names else None)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, images: np.ndarray | slice) -> np.ndarray:
        values = self.as_stored(images)
        return values if values.dtype == np.float32 else values.astype(np.float32)

    def as_stored(self, images: np.ndarray | slice) -> np.ndarray:
        """Return what indexing does, but in the stored type where features are not divided by their norms."""
        rows = self.rows[images]
        values = np.asarray(self.stored[rows])
        if self.l2:
            values = unit_vectors(values, self.norms[rows])
        if values.ndim > 2:  # Of vectors so little is mapped that it may stay.
            release(self.stored)
        return values

    def mask(self, images: np.ndarray | slice) -> np.ndarray | None:
        """Return which features of images are in use, bool ``[N, R]``; None where the dataset has no padding."""
        return None if self.counts is None else in_use(_gathered(self.counts, self.rows[images]), self.shape[1])

    def norms_of_images(self) -> np.ndarray:
        """Return the norms in the order of the images, float32 ``[I]`` or ``[I, R]``; a copy."""
        return _gathered(self.norms, self.rows)

    @property
    def array(self) -> np.ndarray:
        """All features in the order of the images, float32; a copy."""
        return self[:]

    @property
    def shape(self) -> tuple[int, ...]:
        """``(I, D)``, or ``(I, R, D)``."""
        return len(self), *self.stored.shape[1:]

    def __getstate__(self) -> dict[str, Any]:
        mapped = {name: value for name, value in vars(self).items() if isinstance(value, np.memmap)}
        return {**vars(self), **{name: MappedField(str(value.filename), name) for name, value in mapped.items()}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        opened = {name: value.open() if isinstance(value, MappedField) else value for name, value in state.items()}
        vars(self).update(opened)


def extractor_fingerprint(dataset: Dataset) -> str:
    """Return the fingerprint of the extractor that made the features; a model is used with features of one extractor only.

    It does not depend on the images. The manifest states it; for imported features, about which nothing else is known, it is the
    SHA-256 of their name, shape, type and source.

    Raises:
        DatasetError: the dataset is neither of kind ``features`` nor of kind ``regions``.
    """
    spec = feature_spec(dataset)
    stated = FeaturesParameters.from_json(dataset.manifest.parameters).extractor_fingerprint
    return stated or sha256_of_json(spec.to_json())


def missing_images(dataset: Dataset, image_ids: Sequence[str]) -> np.ndarray:
    """Return the positions in ``image_ids``, int64, of images without features. Reads only ids and numbers of regions.

    An image in which no region was found is one without features, although the dataset has a row of it: there is nothing of it
    that a model could see.
    """
    requested = pa.array(image_ids, pa.string())
    present = np.zeros(len(image_ids), bool)
    for table in dataset.shards(["image_id", *vector_columns(dataset)[1:]]):
        found = pc.index_in(with_regions(dataset, table)["image_id"], requested)
        present[pc.drop_null(found).to_numpy()] = True
    return np.flatnonzero(~present)


def read_features(
    dataset: Dataset,
    image_ids: Sequence[str],
    *,
    l2: bool = False,
    memory_map: str | os.PathLike[str] | None = None,
    advice: str = "name a folder on a fast disk with --memory-map",
) -> ImageFeatures:
    """Read the features of images.

    Args:
        dataset: a dataset of kind ``features`` or ``regions``.
        image_ids: the images, each once.
        l2: divide each feature by its Euclidean norm; a feature of zeros stays as it is.
        memory_map: folder for a copy of the whole dataset, in its stored type, which is mapped instead of read into memory. Any
            later call uses it, whatever the images and ``l2``, and processes share its memory.
        advice: what to do if they do not fit, for the message.

    Raises:
        DatasetError: the dataset is of another kind, lacks an image, or a feature is not finite.
        UsageError: the features are too large, and there is no ``memory_map``.
    """
    spec = feature_spec(dataset)
    missing = missing_images(dataset, image_ids)
    if len(missing):
        raise DatasetError(
            f"{dataset.folder.location!r} lacks the features of {len(missing):,} of {len(image_ids):,} images: "
            f"{_first([image_ids[n] for n in missing[:6].tolist()])}"
        )
    if memory_map is not None:
        return _mapped(dataset, image_ids, l2, memory_map)
    record = _record(dataset)
    check_memory(record.itemsize * len(image_ids), len(image_ids), advice)
    records = np.empty(len(image_ids), record)
    requested = pa.array(image_ids, pa.string())
    for batch in dataset.batches(["image_id", *vector_columns(dataset)], batch_size=_batch_size(spec)):
        found = pc.index_in(batch["image_id"], requested)
        if found.null_count:
            batch, found = batch.filter(found.is_valid()), found.drop_null()
        if len(found):
            positions = found.to_numpy()
            values, counts = vectors_of(dataset, batch)
            check_finite(values, dataset, [image_ids[n] for n in positions.tolist()])
            _put(records, positions, values, counts)
    return ImageFeatures.of(records, np.arange(len(image_ids)), spec, l2)


def shard_features(
    dataset: Dataset, number: int, *, chosen: pa.Array | None = None, l2: bool = False
) -> tuple[list[str], ImageFeatures]:
    """Read the images of a shard that have features, and these.

    With ``chosen``, only images of these ids.

    Raises:
        DatasetError: a feature is not finite.
    """
    table = with_regions(dataset, dataset.shard(number, ["image_id", *vector_columns(dataset)]))
    if chosen is not None:
        table = table.filter(pc.is_in(table["image_id"], chosen))
    image_ids = table["image_id"].to_pylist()
    values, counts = vectors_of(dataset, table)
    check_finite(values, dataset, image_ids)
    records = np.empty(len(values), _record(dataset))
    _put(records, slice(None), values, counts)
    return image_ids, ImageFeatures.of(records, np.arange(len(values)), feature_spec(dataset), l2)


def _gathered(array: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return some rows of a small field. The system maps some values around each, too, which are let go from time to time."""
    gathered = np.empty((len(rows), *array.shape[1:]), array.dtype)
    for start in range(0, len(rows), _BLOCK):
        part = slice(start, start + _BLOCK)
        gathered[part] = array[rows[part]]
        release(array)
    return gathered


def _record(dataset: Dataset) -> np.dtype[Any]:
    """Return the type of what is held of an image. Norms stand beside the values, so that a start need not compute them."""
    spec = feature_spec(dataset)
    counted = [("counts", np.int32)] if dataset.kind == "regions" else []
    return np.dtype([("stored", spec.dtype, spec.shape), ("norms", np.float32, spec.shape[:-1]), *counted])


def _put(records: np.ndarray, places: np.ndarray | slice, values: np.ndarray, counts: np.ndarray | None) -> None:
    records["stored"][places] = values
    records["norms"][places] = norms_of(values)
    if counts is not None:
        records["counts"][places] = counts


def _batch_size(spec: FeatureSpec) -> int:
    """Return of how many images the features are held twice while they are read."""
    return max(1, _BATCH_BYTES // (4 * spec.width))


def _mapped(dataset: Dataset, image_ids: Sequence[str], l2: bool, folder: str | os.PathLike[str]) -> ImageFeatures:
    """Map the copy of a dataset, which is made if it is not there yet."""
    spec = feature_spec(dataset)

    def fill(copy: np.ndarray) -> None:
        row = 0
        for batch in dataset.batches(vector_columns(dataset), batch_size=_batch_size(spec)):
            _put(copy, slice(row, row + batch.num_rows), *vectors_of(dataset, batch))
            row += batch.num_rows
            release(copy)

    # Features may grow without another fingerprint: the bytes of the shards count.
    identity = [dataset.fingerprint, [shard.sha256 for shard in dataset.manifest.shards]]
    copy = mapped_array(folder, identity, (len(dataset),), _record(dataset), fill)
    rows = pc.index_in(pa.array(image_ids, pa.string()), pa.array(dataset.image_ids(), pa.string())).to_numpy().astype(np.int64)
    features = ImageFeatures.of(copy, rows, spec, l2)
    # Only what is read counts. A sum of squares may also overflow.
    doubtful = np.unique(np.nonzero(~np.isfinite(features.norms_of_images()))[0])
    check_finite(features.stored[rows[doubtful]], dataset, [image_ids[n] for n in doubtful.tolist()])
    return features


def check_memory(size: int, count: int, advice: str, *, of: str = "images") -> None:
    """Check that features fit into memory: the machine's, or what a container or batch job may use of it.

    Args:
        size: their size in bytes.
        count: number of images.
        advice: what to do if they do not.
        of: what they are features of, if not of images.

    Raises:
        UsageError: they do not fit.
    """
    if size > _MEMORY_SHARE * memory_limit():
        raise UsageError(
            f"the features of {count:,} {of} take {size / 1e9:.1f} GB, more than {_MEMORY_SHARE:.0%} of the "
            f"{memory_limit() / 1e9:.1f} GB of memory that this process may use: {advice} for a copy that is mapped into memory"
        )


def _first(names: Sequence[str]) -> str:
    """Return the first five of up to six names, for messages."""
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
