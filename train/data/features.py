"""Image features as one array, in memory or memory-mapped.

A dataset contains one vector per image (kind ``features``), or regions with padding (kind ``regions``).

Shapes: ``I`` images, ``D`` feature width, ``R`` features of an image, ``M`` stored images, ``N`` rows, or images of a batch.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
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
from train.data.memmap import mapped_array, open_field, release

VECTORS = {"features": "feature", "regions": "features"}
"""Column of the vectors, by kind of dataset."""

_MEMORY_SHARE = 0.5
"""Maximum share of memory for features; larger ones must be memory-mapped."""
_BATCH_BYTES = 32 << 20
_BLOCK = 1024


def feature_spec(dataset: Dataset) -> FeatureSpec:
    """Return the feature specification of a dataset.

    Raises:
        DatasetError: the dataset is neither of kind ``features`` nor of kind ``regions``.
    """
    if dataset.kind not in VECTORS or dataset.spec is None:
        raise DatasetError(
            f"{dataset.folder.location!r} holds {dataset.kind}, expected features or regions: give the folder of the features"
        )
    return dataset.spec


def vector_columns(dataset: Dataset) -> list[str]:
    """Return the columns for `vectors_of`."""
    return [VECTORS[dataset.kind], *(["num_regions"] if dataset.kind == "regions" else [])]


def with_regions(dataset: Dataset, rows: pa.Table) -> pa.Table:
    """Remove images without regions: they have no features."""
    return rows.filter(pc.greater(rows["num_regions"], 0)) if dataset.kind == "regions" else rows


def vectors_of(dataset: Dataset, rows: pa.RecordBatch | pa.Table) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the features of rows with the columns of `vector_columns`.

    Returns:
        Features ``[N, D]`` or ``[N, R, D]`` in their stored type, with zeros as padding, and the numbers of
        regions ``[N]``; None for vectors.

    Raises:
        DatasetError: a number of regions is outside 0 to R.
    """
    spec = feature_spec(dataset)
    values = pc.list_flatten(rows[VECTORS[dataset.kind]]).to_numpy().reshape(rows.num_rows, *spec.shape)
    if dataset.kind != "regions":
        return values, None
    counts = rows["num_regions"].to_numpy()
    if len(counts) and not 0 <= counts.min() <= counts.max() <= spec.shape[0]:
        raise DatasetError(
            f"{dataset.folder.location!r} has images with {counts.min()} to {counts.max()} regions, "
            f"expected 0 to {spec.shape[0]}: run 'imagepivot validate' on it, and copy or extract it again"
        )
    padding = ~region_mask(counts, spec.shape[0])
    if padding.any():
        values = values.copy()
        values[padding] = 0
    return values, counts


def region_mask(counts: np.ndarray, size: int) -> np.ndarray:
    """Return a mask of the first ``counts`` of R features, bool ``[N, R]``."""
    return np.arange(size) < counts[:, np.newaxis]


def check_finite(values: np.ndarray, dataset: Dataset, image_ids: Sequence[str]) -> None:
    """Check for NaN and infinite values.

    Raises:
        DatasetError: a value is not finite.
    """
    if values.dtype.kind != "f" or np.isfinite(values).all():
        return
    invalid = ~np.isfinite(values.reshape(len(values), -1)).all(1)
    raise DatasetError(
        f"{dataset.folder.location!r} has NaN or infinite features, e.g. of image "
        f"{image_ids[int(np.flatnonzero(invalid)[0])]!r}: run 'imagepivot validate' on it, and copy or extract it again"
    )


def norms_of(values: np.ndarray) -> np.ndarray:
    """Return the norms ``[...]`` of vectors ``[..., D]``, float32, inf on overflow."""
    with np.errstate(over="ignore"):
        return np.linalg.norm(values.astype(np.float32), axis=-1)


def unit_vectors(values: np.ndarray, norms: np.ndarray | None = None) -> np.ndarray:
    """Divide vectors ``[..., D]`` by their norms, in float32; zeros stay zeros."""
    norms = norms_of(values) if norms is None else norms
    return values.astype(np.float32, copy=False) / np.where(norms > 0, norms, np.float32(1))[..., np.newaxis]


@dataclass(frozen=True)
class ImageFeatures:
    """Features of images, stored in the type of the dataset and converted on access.

    ``features[images]`` returns the features at some positions (integers, or a slice), float32 ``[N, D]``, or
    ``[N, R, D]`` with zeros as padding. Pickles contain the path of a memory-mapped file instead of its data.

    Attributes:
        stored: ``[M, D]`` or ``[M, R, D]`` in the type of the dataset; may be memory-mapped, read-only.
        norms: Euclidean norms, float32 ``[M]`` or ``[M, R]``.
        rows: row of each image in ``stored``, int64 ``[I]``.
        spec: feature specification of the dataset.
        l2: divide each feature by its norm on access; zeros stay zeros.
        counts: number of features of each image, int32 ``[M]``; None without padding.
    """

    stored: np.ndarray
    norms: np.ndarray
    rows: np.ndarray
    spec: FeatureSpec
    l2: bool = False
    counts: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, images: np.ndarray | slice) -> np.ndarray:
        return self.as_stored(images).astype(np.float32, copy=False)

    def as_stored(self, images: np.ndarray | slice) -> np.ndarray:
        """Return features in the stored type, or in float32 if divided by their norms."""
        rows = self.rows[images]
        values = np.asarray(self.stored[rows])
        if self.l2:
            values = unit_vectors(values, self.norms[rows])
        if values.ndim > 2:  # Single vectors map few pages.
            release(self.stored)
        return values

    def mask(self, images: np.ndarray | slice) -> np.ndarray | None:
        """Return the mask of features, bool ``[N, R]``; None without padding."""
        return None if self.counts is None else region_mask(_copy_mapped_rows(self.counts, self.rows[images]), self.shape[1])

    def norms_of_images(self) -> np.ndarray:
        """Copy the norms in the order of the images, float32 ``[I]`` or ``[I, R]``."""
        return _copy_mapped_rows(self.norms, self.rows)

    @property
    def shape(self) -> tuple[int, ...]:
        """``(I, D)``, or ``(I, R, D)``."""
        return len(self), *self.stored.shape[1:]

    def __getstate__(self) -> dict[str, Any]:
        mapped = {name: value for name, value in vars(self).items() if isinstance(value, np.memmap)}
        return {**vars(self), **{name: partial(open_field, str(value.filename), name) for name, value in mapped.items()}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        opened = {name: value() if isinstance(value, partial) else value for name, value in state.items()}
        vars(self).update(opened)


def extractor_fingerprint(dataset: Dataset) -> str:
    """Return the fingerprint of the extractor of a dataset.

    It does not depend on the images. For imported features it is the SHA-256 of their name, shape, type and source.

    Raises:
        DatasetError: the dataset is neither of kind ``features`` nor of kind ``regions``.
    """
    spec = feature_spec(dataset)
    fingerprint = FeaturesParameters.from_json(dataset.manifest.parameters).extractor_fingerprint
    return fingerprint or sha256_of_json(spec.to_json())


def missing_images(dataset: Dataset, image_ids: Sequence[str]) -> np.ndarray:
    """Return the positions of images without features or regions, int64."""
    requested = pa.array(image_ids, pa.string())
    present = np.zeros(len(image_ids), bool)
    for table in dataset.shards(["image_id", *vector_columns(dataset)[1:]]):
        positions = pc.index_in(with_regions(dataset, table)["image_id"], requested)
        present[pc.drop_null(positions).to_numpy()] = True
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
        image_ids: distinct images with features, see `missing_images`.
        l2: divide each feature by its Euclidean norm; zeros stay zeros.
        memory_map: folder for a memory-mapped copy of the whole dataset, shared by later calls and other processes.
        advice: advice in the error message about memory.

    Raises:
        DatasetError: the dataset is of another kind, or a feature is not finite.
        UsageError: the features are too large for memory without ``memory_map``.
    """
    spec = feature_spec(dataset)
    indices = pc.index_in(pa.array(image_ids, pa.string()), pa.array(dataset.image_ids(), pa.string()))
    rows, has_counts = indices.to_numpy().astype(np.int64), dataset.kind == "regions"
    counts = [("counts", np.int32)] if has_counts else []
    record = np.dtype([("stored", spec.dtype, spec.shape), ("norms", np.float32, spec.shape[:-1]), *counts])
    if memory_map is None:
        check_memory(record.itemsize * len(rows), len(rows), advice)
        records = np.empty(len(rows), record)
        _fill(records, dataset, rows)
        rows = np.arange(len(rows))
    else:
        # The fingerprint does not change when a dataset grows: include the digests of the shards.
        identity = [dataset.fingerprint, [shard.sha256 for shard in dataset.manifest.shards]]
        fill = partial(_fill, dataset=dataset, rows=np.arange(len(dataset)))
        records = mapped_array(memory_map, identity, (len(dataset),), record, fill)
    stored_counts = records["counts"] if has_counts else None
    features = ImageFeatures(records["stored"], records["norms"], rows, spec, l2, stored_counts)
    # Only requested images are checked. An infinite norm may also be an overflow.
    suspects = np.unique(np.nonzero(~np.isfinite(features.norms_of_images()))[0])
    check_finite(features.stored[rows[suspects]], dataset, [image_ids[n] for n in suspects.tolist()])
    return features


def shard_features(
    dataset: Dataset, shard: int, *, chosen: pa.Array | None = None, l2: bool = False
) -> tuple[list[str], ImageFeatures]:
    """Read the ids and features of a shard, optionally of chosen image ids only.

    Raises:
        DatasetError: a feature is not finite.
    """
    table = with_regions(dataset, dataset.shard(shard, ["image_id", *vector_columns(dataset)]))
    if chosen is not None:
        table = table.filter(pc.is_in(table["image_id"], chosen))
    image_ids = table["image_id"].to_pylist()
    values, counts = vectors_of(dataset, table)
    check_finite(values, dataset, image_ids)
    return image_ids, ImageFeatures(values, norms_of(values), np.arange(len(values)), feature_spec(dataset), l2, counts)


def _copy_mapped_rows(array: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Copy rows of a memory-mapped field in blocks, releasing the pages around them."""
    gathered = np.empty((len(rows), *array.shape[1:]), array.dtype)
    for start in range(0, len(rows), _BLOCK):
        block = slice(start, start + _BLOCK)
        gathered[block] = array[rows[block]]
        release(array)
    return gathered


def _fill(records: np.ndarray, dataset: Dataset, rows: np.ndarray) -> None:
    """Fill records with the features and norms of rows of a dataset."""
    positions = np.full(len(dataset), -1)
    positions[rows] = np.arange(len(rows))
    start, batch_size = 0, max(1, _BATCH_BYTES // (4 * feature_spec(dataset).width))
    for batch in dataset.batches(vector_columns(dataset), batch_size=batch_size):
        targets = positions[start : start + batch.num_rows]
        start += batch.num_rows
        chosen = targets >= 0
        values, counts = vectors_of(dataset, batch)
        records["stored"][targets[chosen]] = values[chosen]
        records["norms"][targets[chosen]] = norms_of(values[chosen])
        if counts is not None:
            records["counts"][targets[chosen]] = counts[chosen]
        release(records)


def check_memory(size: int, count: int, advice: str, *, of: str = "images") -> None:
    """Check that features of ``size`` bytes fit into the memory of this process.

    Raises:
        UsageError: they do not fit.
    """
    if size > _MEMORY_SHARE * memory_limit():
        raise UsageError(
            f"the features of {count:,} {of} take {size / 1e9:.1f} GB, more than {_MEMORY_SHARE:.0%} of the "
            f"{memory_limit() / 1e9:.1f} GB of memory that this process may use: {advice} for a copy that is mapped into memory"
        )
