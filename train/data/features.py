"""Image features as one array, in memory or mapped from a file.

Letters in shapes: ``I`` images, ``D`` feature width, ``R`` features of an image.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.dataset import Dataset
from schemas.errors import DatasetError, UsageError
from schemas.features import FeatureSpec
from schemas.fingerprints import sha256_of_json
from schemas.parameters import FeaturesParameters
from train.data.mapping import mapped_array

__all__ = [
    "MEMORY_SHARE",
    "ImageFeatures",
    "check_finite",
    "check_memory",
    "extractor_fingerprint",
    "feature_spec",
    "fill_columns",
    "missing_images",
    "read_features",
    "unit_vectors",
    "vectors_identity",
]

MEMORY_SHARE = 0.5
"""Share of the machine's memory that features may occupy; larger ones are mapped from a file."""

_BATCH_BYTES = 32 << 20


@dataclass(frozen=True)
class ImageFeatures:
    """Features of images.

    Attributes:
        array: float32 ``[I, D]``, or ``[I, R, D]`` where the dataset has several for each image; rows in the order of the requested
            images. May be mapped from a file, read-only.
        spec: the feature that the dataset holds.
    """

    array: np.ndarray
    spec: FeatureSpec

    def __len__(self) -> int:
        return len(self.array)

    @property
    def width(self) -> int:
        """Width of a feature, D."""
        return self.array.shape[-1]


def extractor_fingerprint(dataset: Dataset) -> str:
    """Return the fingerprint of the extractor that made the features; a model is used with features of one extractor only.

    It does not depend on the images. The manifest states it; for imported features, about which nothing else is known, it is the
    SHA-256 of their name, shape, type and source.

    Raises:
        DatasetError: the dataset is not of kind ``features``.
    """
    spec = feature_spec(dataset)
    stated = FeaturesParameters.from_json(dataset.manifest.parameters).extractor_fingerprint
    return stated or sha256_of_json(spec.to_json())


def missing_images(dataset: Dataset, image_ids: Sequence[str]) -> np.ndarray:
    """Return the positions in ``image_ids``, int64, of images without features. Reads only the ids."""
    requested = pa.array(image_ids, pa.string())
    present = np.zeros(len(image_ids), bool)
    for table in dataset.shards(["image_id"]):
        present[pc.drop_null(pc.index_in(table["image_id"], requested)).to_numpy()] = True
    return np.flatnonzero(~present)


def read_features(
    dataset: Dataset,
    image_ids: Sequence[str],
    *,
    l2: bool = False,
    memory_map: str | os.PathLike[str] | None = None,
    memory_share: float = MEMORY_SHARE,
) -> ImageFeatures:
    """Read the features of images.

    Args:
        dataset: a dataset of kind ``features``.
        image_ids: the images, each once.
        l2: divide each feature by its Euclidean norm; a feature of zeros stays as it is.
        memory_map: folder for files with features that do not fit into memory; a later call with the same arguments uses its
            file again.
        memory_share: share of the machine's memory that the features may occupy.

    Raises:
        DatasetError: the dataset is of another kind, or lacks an image.
        UsageError: the features are too large, and there is no ``memory_map``.
    """
    spec = feature_spec(dataset)
    missing = missing_images(dataset, image_ids)
    if len(missing):
        raise DatasetError(
            f"{dataset.folder.location!r} lacks the features of {len(missing):,} of {len(image_ids):,} images: "
            f"{_first([image_ids[n] for n in missing[:6].tolist()])}"
        )
    shape = len(image_ids), *spec.shape

    def fill(array: np.ndarray) -> None:
        fill_columns({"feature": array}, dataset, image_ids, l2=l2)

    size = 4 * len(image_ids) * spec.width
    if memory_map is not None and size > memory_share * _memory():
        identity = vectors_identity(dataset, "feature", image_ids, l2=l2)
        return ImageFeatures(mapped_array(memory_map, identity, shape, np.float32, fill), spec)
    check_memory(size, len(image_ids), "name a folder on a fast disk with --memory-map", memory_share)
    array = np.empty(shape, np.float32)
    fill(array)
    return ImageFeatures(array, spec)


def check_memory(size: int, images: int, advice: str, memory_share: float = MEMORY_SHARE) -> None:
    """Check that features fit into memory.

    Args:
        size: their size in bytes.
        images: number of images.
        advice: what to do if they do not.
        memory_share: share of the machine's memory that they may occupy.

    Raises:
        UsageError: they do not fit.
    """
    if size > memory_share * _memory():
        raise UsageError(
            f"the features of {images:,} images take {size / 1e9:.1f} GB, more than {memory_share:.0%} of this machine's "
            f"memory: {advice} for a copy that is mapped into memory"
        )


def _memory() -> int:
    """Return the machine's memory in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def feature_spec(dataset: Dataset) -> FeatureSpec:
    """Return the feature that a dataset holds.

    Raises:
        DatasetError: the dataset is not of kind ``features``.
    """
    if dataset.kind == "regions":
        raise DatasetError(
            f"{dataset.folder.location!r} holds regions, but the models here take one vector per image: give features, "
            "for example of 'resnet50-pool'"
        )
    if dataset.kind != "features" or dataset.spec is None:
        raise DatasetError(
            f"{dataset.folder.location!r} holds {dataset.kind}, expected features: give the folder of the features"
        )
    return dataset.spec


def _first(names: Sequence[str]) -> str:
    """Return the first five of up to six names, for messages."""
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def fill_columns(arrays: Mapping[str, np.ndarray], dataset: Dataset, image_ids: Sequence[str], *, l2: bool = False) -> None:
    """Put the values of each image into the row of its id, a few at a time so that nothing is held twice.

    Args:
        arrays: by column, the array to fill; its first axis is that of ``image_ids``.
        dataset: a dataset with one row per image.
        image_ids: the images, each once.
        l2: divide the vectors in each array by their Euclidean norm, over the last axis; a vector of zeros stays zero.

    Raises:
        DatasetError: a value is not finite.
    """
    requested = pa.array(image_ids, pa.string())
    rows = max(1, _BATCH_BYTES // max(1, 4 * sum(array[:1].size for array in arrays.values())))
    for batch in dataset.batches(["image_id", *arrays], batch_size=rows):
        positions = pc.fill_null(pc.index_in(batch["image_id"], requested), -1).to_numpy()
        for name, array in arrays.items():
            column = batch[name]
            flat = column.flatten() if pa.types.is_fixed_size_list(column.type) else column
            values = flat.to_numpy().reshape(len(positions), *array.shape[1:])[positions >= 0]
            check_finite(values, dataset, [image_ids[n] for n in positions[positions >= 0].tolist()])
            array[positions[positions >= 0]] = unit_vectors(values) if l2 else values


def vectors_identity(dataset: Dataset, column: str, image_ids: Sequence[str], *, l2: bool) -> list[object]:
    """Return what the vectors of images depend on, for `train.data.mapping.mapped_array`: the bytes of the shards too."""
    return [[shard.sha256 for shard in dataset.manifest.shards], column, list(image_ids), l2]


def check_finite(values: np.ndarray, dataset: Dataset, image_ids: Sequence[str]) -> None:
    """Check that no value is NaN or infinite.

    Args:
        values: ``[images, ...]``.
        dataset: where they come from, for the message.
        image_ids: the images.

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


def unit_vectors(values: np.ndarray) -> np.ndarray:
    """Return vectors ``[..., D]`` divided by their Euclidean norms, in float32; a vector of zeros stays zero."""
    values = values.astype(np.float32)
    norms = np.linalg.norm(values, axis=-1, keepdims=True)
    return values / np.where(norms > 0, norms, 1)
