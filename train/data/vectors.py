"""The features of images as columns of a dataset: one vector for each image (kind ``features``), or regions, of which some may be
padding (kind ``regions``).

Letters in shapes: ``N`` rows, ``D`` feature width, ``R`` features of an image.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.dataset import Dataset
from schemas.errors import DatasetError
from schemas.features import FeatureSpec

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
    """Return rows without those of images in which no region was found: they have no features.

    Args:
        dataset: the dataset of features or regions.
        rows: some of its rows; those of regions with the column ``num_regions``.
    """
    return rows.filter(pc.greater(rows["num_regions"], 0)) if dataset.kind == "regions" else rows


def vectors_of(dataset: Dataset, rows: pa.RecordBatch | pa.Table) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the features of rows that were read.

    Args:
        dataset: the dataset of features or regions.
        rows: some of its rows, with the columns that `vector_columns` names.

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

    Args:
        values: ``[N, ...]``.
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


def norms_of(values: np.ndarray) -> np.ndarray:
    """Return the Euclidean norms ``[...]`` of vectors ``[..., D]``, in float32; infinite where the sum of squares is too large."""
    with np.errstate(over="ignore"):
        return np.linalg.norm(values.astype(np.float32), axis=-1)


def unit_vectors(values: np.ndarray, norms: np.ndarray | None = None) -> np.ndarray:
    """Return vectors ``[..., D]`` divided by their Euclidean norms, in float32; a vector of zeros stays zero.

    Args:
        values: the vectors.
        norms: their norms ``[...]``, if they are known.
    """
    norms = norms_of(values) if norms is None else norms
    return values.astype(np.float32, copy=False) / np.where(norms > 0, norms, np.float32(1))[..., np.newaxis]


def _array(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
