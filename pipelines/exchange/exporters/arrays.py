"""npy arrays of features: written row by row at their places, never held in memory. ``N`` rows, ``R`` regions, ``D`` values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from pipelines.exchange.exporters.staging import Staging
from pipelines.exchange.importers.base import local_file, read_ids
from pipelines.running.progress import Meter
from schemas.dataset import Dataset
from schemas.errors import DatasetError, UsageError

__all__ = ["export_arrays", "export_mulisera", "feature_column", "places_of", "write_array", "write_ids"]

_BATCH_BYTES = 8 << 20
MULISERA_FEATURE = "resnet50-avgpool"


def feature_column(dataset: Dataset) -> str:
    """Name of the column with the features.

    Raises:
        DatasetError: the dataset holds none.
    """
    if dataset.kind not in ("features", "regions"):
        raise DatasetError(f"{dataset.folder.location!r} holds {dataset.kind}, expected features or regions")
    return "feature" if dataset.kind == "features" else "features"


def _width_shape(dataset: Dataset, column: str) -> tuple[int, ...]:
    if column in ("feature", "features") and dataset.spec is not None:
        return dataset.spec.shape
    if column == "boxes":
        return (dataset.schema.field(column).type.list_size // 4, 4)
    return (2,)


def places_of(image_ids: Sequence[str]) -> dict[str, list[int]]:
    """The rows of an array that an image takes; more than one where a list names it more than once."""
    places: dict[str, list[int]] = {}
    for row, image_id in enumerate(image_ids):
        places.setdefault(image_id, []).append(row)
    return places


def check_there(dataset: Dataset, wanted: Mapping[str, object], *, what: str) -> None:
    """Checks that the dataset has a row of each image.

    Raises:
        DatasetError: it lacks some; how many and which are said.
    """
    missing = sorted(wanted.keys() - set(dataset.image_ids()))
    if missing:
        raise DatasetError(
            f"{len(missing):,} of {len(wanted):,} images of {what} have no row in {dataset.folder.location!r}, e.g. "
            f"{', '.join(map(repr, missing[:5]))}: make their features first, or choose other splits with --splits"
        )


def write_ids(path: Path, image_ids: Sequence[str]) -> None:
    """Writes image ids, one a line.

    Raises:
        DatasetError: an id holds a line break.
    """
    broken = next((each for each in image_ids if len(each.splitlines()) != 1), None)
    if broken is not None:
        raise DatasetError(f"image id {broken!r} cannot stand on a line of its own: this layout cannot hold it")
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(f"{image_id}\n" for image_id in image_ids)


def write_array(
    path: Path,
    dataset: Dataset,
    column: str,
    places: Mapping[str, Sequence[int]],
    *,
    dtype: str,
    l2: bool = False,
    meter: Meter = Meter(),
) -> None:
    """Writes vectors of images as an npy array, each at its places.

    Args:
        path: the file.
        dataset: features or regions.
        column: a column of vectors, or ``sizes``, which is width and height.
        places: rows of the array by image id; every row is somebody's.
        dtype: type in the file.
        l2: divide each vector by its Euclidean norm (over the last axis; a zero vector stays zero).
        meter: counts images.

    Raises:
        DatasetError: a value does not fit into the type.
    """
    shape, read = _width_shape(dataset, column), [column] if column != "sizes" else ["width", "height"]
    row_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    header = {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "fortran_order": False}
    with path.open("wb") as file:
        rows = sum(len(each) for each in places.values())
        np.lib.format.write_array_header_1_0(file, {**header, "shape": (rows, *shape)})
        start = file.tell()
        for batch in dataset.batches(["image_id", *read], batch_size=max(1, _BATCH_BYTES // row_bytes)):
            image_ids = batch.column("image_id").to_pylist()
            wanted = [number for number, image_id in enumerate(image_ids) if image_id in places]
            if wanted:
                taken = batch.take(wanted)
                arrays = [taken.column(name) for name in read]
                flat = [a.flatten() if column != "sizes" else a for a in arrays]
                values = np.stack([a.to_numpy(zero_copy_only=False) for a in flat], axis=-1).reshape(len(wanted), *shape)
                converted = _convert(values, dtype, l2=l2, image_ids=[image_ids[number] for number in wanted])
                for number, row in zip(wanted, converted, strict=True):
                    _put(file, row.tobytes(), start, row_bytes, places[image_ids[number]])
            meter.add(images=len(wanted))


def _put(file: BinaryIO, data: bytes, start: int, row_bytes: int, rows: Sequence[int]) -> None:
    for row in rows:
        file.seek(start + row * row_bytes)
        file.write(data)


def _convert(values: np.ndarray, dtype: str, *, l2: bool, image_ids: Sequence[str]) -> np.ndarray:
    if l2:
        values = values.astype(np.float32)
        norms = np.sqrt(np.einsum("...d,...d->...", values, values))[..., np.newaxis]
        values = values / np.where(norms > 0, norms, 1)
    with np.errstate(over="ignore"):
        converted = values.astype(dtype, copy=False)
    bad = ~np.isfinite(converted).reshape(len(converted), -1).all(axis=1)
    if bad.any():
        raise DatasetError(
            f"a value of image {image_ids[int(bad.argmax())]!r} is too large for {dtype}: export another layout, or with --l2"
        )
    return converted


def export_arrays(
    dataset: Dataset, staging: Staging, *, image_list: str = "", l2: bool = False, meter: Meter = Meter()
) -> list[Path]:
    """Writes ``features.npy`` as stored and ``ids.txt``; of regions also ``boxes.npy`` and ``sizes.npy`` (width, height).

    Args:
        dataset: features or regions.
        staging: the folder.
        image_list: text file with image ids or file names in the order that is wanted; the dataset's own when empty.
        l2: see ``write_array``.
        meter: counts images.
    """
    column = feature_column(dataset)
    image_ids = read_ids(local_file(image_list), "name") if image_list else dataset.image_ids()
    places = places_of(image_ids)
    if image_list:
        check_there(dataset, places, what=repr(image_list))
    dtype = dataset.spec.dtype if dataset.spec is not None else "float32"
    names = ["features.npy", "ids.txt", *(["boxes.npy", "sizes.npy"] if dataset.kind == "regions" else [])]
    with staging.files(names) as files:
        write_array(files[0], dataset, column, places, dtype=dtype, l2=l2, meter=meter)
        write_ids(files[1], image_ids)
        if dataset.kind == "regions":
            write_array(files[2], dataset, "boxes", places, dtype="float32")
            write_array(files[3], dataset, "sizes", places, dtype="int32")
    return staging.paths(names)


def export_mulisera(
    dataset: Dataset,
    staging: Staging,
    *,
    lists: Sequence[str],
    rename: Callable[[str], str],
    l2: bool = False,
    meter: Meter = Meter(),
) -> list[Path]:
    """Writes ``SPLIT-resnet50-avgpool.npy``, float16 ``[N, D]``, rows in the order of Multi30K's ``image_splits/SPLIT.txt``.

    That is Multi30K's own layout (``data/imgfeats``), which kadarakos/mulisera reads: by file name and line number.

    Args:
        dataset: features of one dimension.
        staging: the folder.
        lists: the lists; their names without extension are the splits.
        rename: a split to its name in the layout; mulisera calls ``test_2016_flickr`` ``test_2016``.
        l2: see ``write_array``.
        meter: counts images.
    """
    if dataset.kind != "features" or dataset.spec is None or len(dataset.spec.shape) != 1:
        raise DatasetError(f"{dataset.folder.location!r} does not hold features [D], the only ones that mulisera reads")
    if not lists:
        raise UsageError("mulisera reads features by line number: give the lists with --lists, e.g. image_splits/train.txt")
    orders = {rename(Path(each).stem): read_ids(local_file(each), "name") for each in lists}
    if len(orders) != len(lists):
        raise UsageError("two of the lists are for the same split: give each split one list")
    names = [f"{split}-{MULISERA_FEATURE}.npy" for split in orders]
    for split, image_ids in orders.items():
        check_there(dataset, places_of(image_ids), what=f"split {split!r}")
    with staging.files(names) as files:
        for path, image_ids in zip(files, orders.values(), strict=True):
            write_array(path, dataset, "feature", places_of(image_ids), dtype="float16", l2=l2, meter=meter)
    return staging.paths(names)
