"""Image features as one array, in memory or mapped from a file.

Letters in shapes: ``I`` images, ``D`` feature width, ``R`` features of an image, ``M`` images whose features are held, ``N`` those
of a batch.
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
from train.data.memory import memory_limit

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
"""Share of the memory that features may occupy; larger ones must be mapped from a file."""

_BATCH_BYTES = 32 << 20


@dataclass(frozen=True)
class ImageFeatures:
    """Features of images, kept as they are stored: what is indexed is converted, a batch at a time.

    ``features[images]`` are the features of the images in these positions (integers, or a slice), float32 ``[N, D]``, or
    ``[N, R, D]`` where the dataset has several for each image.

    Attributes:
        stored: ``[M, D]`` or ``[M, R, D]`` in the type of the dataset. May be mapped from a file, read-only.
        norms: float32 ``[M]`` or ``[M, R]``: Euclidean norms.
        rows: int64 ``[I]``: the row of each image in ``stored``.
        spec: the feature that the dataset holds.
        l2: whether each feature is divided by its norm when it is read; a feature of zeros stays as it is.
    """

    stored: np.ndarray
    norms: np.ndarray
    rows: np.ndarray
    spec: FeatureSpec
    l2: bool = False

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, images: np.ndarray | slice) -> np.ndarray:
        rows = self.rows[images]
        values = np.asarray(self.stored[rows]).astype(np.float32, copy=False)
        if self.l2:
            values /= _divisors(self.norms[rows])
        return values

    @property
    def array(self) -> np.ndarray:
        """All features in the order of the images, float32; a copy."""
        return self[:]

    @property
    def shape(self) -> tuple[int, ...]:
        """``(I, D)``, or ``(I, R, D)``."""
        return len(self), *self.stored.shape[1:]

    @property
    def width(self) -> int:
        """Width of a feature, D."""
        return self.stored.shape[-1]


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
        memory_map: folder for a copy of the whole dataset, in its stored type, which is mapped instead of read into memory. Any
            later call uses it, whatever the images and ``l2``, and processes share its memory.
        memory_share: share of the memory that the features may occupy without it.

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
        return _mapped(dataset, spec, image_ids, l2, memory_map)
    stored = np.dtype(spec.dtype)
    size = stored.itemsize * len(image_ids) * spec.width
    check_memory(size, len(image_ids), "name a folder on a fast disk with --memory-map", memory_share)
    array = np.empty((len(image_ids), *spec.shape), stored)
    fill_columns({"feature": array}, dataset, image_ids)
    norms = np.empty(array.shape[:-1], np.float32)
    rows = max(1, _BATCH_BYTES // (4 * spec.width))
    for start in range(0, len(array), rows):
        norms[start : start + rows] = _norms(array[start : start + rows])
    return ImageFeatures(array, norms, np.arange(len(image_ids)), spec, l2)


def _mapped(
    dataset: Dataset, spec: FeatureSpec, image_ids: Sequence[str], l2: bool, folder: str | os.PathLike[str]
) -> ImageFeatures:
    """Map the copy of a dataset, which is made if it is not there yet."""
    # Norms stand beside the values, so that a start does not read every page.
    record = np.dtype([("stored", spec.dtype, spec.shape), ("norms", np.float32, spec.shape[:-1])])

    def fill(copy: np.ndarray) -> None:
        row = 0
        for batch in dataset.batches(["feature"], batch_size=max(1, _BATCH_BYTES // (4 * spec.width))):
            values = batch["feature"].flatten().to_numpy().reshape(-1, *spec.shape)
            part = copy[row : row + len(values)]
            part["stored"], part["norms"] = values, _norms(values)
            row += len(values)

    # Features may grow without another fingerprint: the bytes of the shards count.
    identity = [dataset.fingerprint, [shard.sha256 for shard in dataset.manifest.shards]]
    copy = mapped_array(folder, identity, (len(dataset),), record, fill)
    rows = pc.index_in(pa.array(image_ids, pa.string()), pa.array(dataset.image_ids(), pa.string())).to_numpy().astype(np.int64)
    features = ImageFeatures(copy["stored"], copy["norms"], rows, spec, l2)
    # Only what is read counts. A sum of squares may also overflow.
    doubtful = np.unique(np.nonzero(~np.isfinite(features.norms[rows]))[0])
    check_finite(features.stored[rows[doubtful]], dataset, [image_ids[n] for n in doubtful.tolist()])
    return features


def check_memory(size: int, images: int, advice: str, memory_share: float = MEMORY_SHARE) -> None:
    """Check that features fit into memory: the machine's, or what a container or batch job may use of it.

    Args:
        size: their size in bytes.
        images: number of images.
        advice: what to do if they do not.
        memory_share: share of the memory that they may occupy.

    Raises:
        UsageError: they do not fit.
    """
    if size > memory_share * memory_limit():
        raise UsageError(
            f"the features of {images:,} images take {size / 1e9:.1f} GB, more than {memory_share:.0%} of the "
            f"{memory_limit() / 1e9:.1f} GB of memory that this process may use: {advice} for a copy that is mapped into memory"
        )


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
    return values.astype(np.float32) / _divisors(_norms(values))


def _norms(values: np.ndarray) -> np.ndarray:
    """Return the Euclidean norms ``[...]`` of vectors ``[..., D]``, in float32; infinite where the sum of squares is too large."""
    with np.errstate(over="ignore"):
        return np.linalg.norm(values.astype(np.float32), axis=-1)


def _divisors(norms: np.ndarray) -> np.ndarray:
    return np.where(norms > 0, norms, np.float32(1))[..., None]
