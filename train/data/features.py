"""Image features as one array, in memory or mapped from a file.

Letters in shapes: ``I`` images, ``D`` feature width.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.dataset import Dataset
from schemas.errors import DatasetError, UsageError
from schemas.features import FeatureSpec
from schemas.fingerprints import canonical_json, sha256_of_bytes
from schemas.parameters import FeaturesParameters
from schemas.storage import local_path

__all__ = ["MEMORY_SHARE", "ImageFeatures", "extractor_fingerprint", "feature_spec", "missing_images", "read_features"]

MEMORY_SHARE = 0.5
"""Share of the machine's memory that features may occupy; larger ones are mapped from a file."""

_BATCH_BYTES = 32 << 20


@dataclass(frozen=True)
class ImageFeatures:
    """Features of images.

    Attributes:
        array: float32 ``[I, D]``, rows in the order of the requested images. May be mapped from a file, read-only.
        spec: the feature that the dataset holds.
    """

    array: np.ndarray
    spec: FeatureSpec

    def __len__(self) -> int:
        return len(self.array)

    @property
    def width(self) -> int:
        """Width of a feature, D."""
        return self.array.shape[1]


def extractor_fingerprint(dataset: Dataset) -> str:
    """Return the fingerprint of the extractor that made the features; a model is used with features of one extractor only.

    It does not depend on the images. The manifest states it; for imported features, about which nothing else is known, it is the
    SHA-256 of their name, shape, type and source.

    Raises:
        DatasetError: the dataset is not of kind ``features``.
    """
    spec = feature_spec(dataset)
    stated = FeaturesParameters.from_json(dataset.manifest.parameters).extractor_fingerprint
    return stated or sha256_of_bytes(canonical_json(spec.to_json()).encode())


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
    shape = len(image_ids), spec.width
    size = 4 * len(image_ids) * spec.width
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size <= memory_share * memory:
        array = np.empty(shape, np.float32)
        _fill(array, dataset, image_ids, l2=l2)
        return ImageFeatures(array, spec)
    if memory_map is None:
        raise UsageError(
            f"the features of {len(image_ids):,} images take {size / 1e9:.1f} GB, more than {memory_share:.0%} of this machine's "
            "memory: name a folder on a fast disk with --memory-map for a copy that is mapped into memory"
        )
    return ImageFeatures(_mapped(local_path(memory_map), shape, dataset, image_ids, l2=l2), spec)


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


def _fill(array: np.ndarray, dataset: Dataset, image_ids: Sequence[str], *, l2: bool) -> None:
    """Put each feature into the row of its image, a few at a time so that nothing is held twice."""
    requested = pa.array(image_ids, pa.string())
    rows = max(1, _BATCH_BYTES // (4 * array.shape[1]))
    for batch in dataset.batches(["image_id", "feature"], batch_size=rows):
        positions = pc.fill_null(pc.index_in(batch["image_id"], requested), -1).to_numpy()
        values = batch["feature"].flatten().to_numpy().reshape(len(positions), -1)[positions >= 0]
        array[positions[positions >= 0]] = _unit(values) if l2 else values


def _unit(values: np.ndarray) -> np.ndarray:
    values = values.astype(np.float32)
    norms = np.linalg.norm(values, axis=1, keepdims=True)
    return values / np.where(norms > 0, norms, 1)


def _mapped(folder: Path, shape: tuple[int, int], dataset: Dataset, image_ids: Sequence[str], *, l2: bool) -> np.ndarray:
    """Map the features from a file, which is named after its content and appears only when complete."""
    shards = [shard.sha256 for shard in dataset.manifest.shards]
    path = folder / f"{sha256_of_bytes(canonical_json([shards, list(image_ids), l2]).encode())[:32]}.npy"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            array = np.lib.format.open_memmap(Path(temporary) / path.name, mode="w+", dtype=np.float32, shape=shape)
            _fill(array, dataset, image_ids, l2=l2)
            array.flush()
            (Path(temporary) / path.name).replace(path)
    return np.load(path, mmap_mode="r")
