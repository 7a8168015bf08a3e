"""Importer of npy arrays with lists of image ids, e.g. of VSE++ and SCAN.

The arrays are memory-mapped, never loaded, and never unpickled.

Shapes: ``N`` rows, ``R`` regions, ``D`` values.
"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.exchange.exporters.base import apply_sidecars
from pipelines.exchange.exporters.webdataset import LABELS
from pipelines.exchange.image_lists import expand_ids, local_file
from pipelines.exchange.importers.base import FeatureFiles, describe_file
from pipelines.exchange.importers.image_ids import ImageIds
from pipelines.exchange.jobs import ImportJob
from schemas.dataset import Dataset, open_dataset
from schemas.errors import InputError, UsageError
from schemas.keys import CaptionKey
from schemas.kinds import KEY_COLUMNS, REGIONS
from schemas.vector_files import NPY_ERRORS


def guess_ids(array: Path) -> Path:
    """Return the list beside an array, e.g. ``S_ids.txt`` for ``S_ims.npy``.

    Raises:
        UsageError: no list exists.
    """
    stem = array.stem
    names = [f"{stem}.ids", f"{stem}.txt"]
    if stem.endswith("_ims"):
        names.append(f"{stem.removesuffix('_ims')}_ids.txt")
    if stem == "features":
        names.append("ids.txt")
    for name in names:
        if array.with_name(name).is_file():
            return array.with_name(name)
    raise UsageError(f"no list of image ids beside {array.name!r} (looked for {', '.join(names)}): give one with --ids")


def open_arrays(job: ImportJob) -> FeatureFiles:
    """Map arrays into memory, check their shapes and read the lists of image ids.

    Raises:
        ImagepivotError: a file is missing, or they do not belong together.
    """
    paths = [local_file(location) for location in job.sources]
    values = _Rows(paths)
    job = apply_sidecars(job, paths)
    lists = [local_file(location) for location in job.ids] or [guess_ids(path) for path in paths]
    boxes, sizes = (_Rows([local_file(location) for location in locations]) for locations in (job.boxes, job.sizes))
    _check_values(values)
    shape, regions = values.arrays[0].shape[1:], job.max_regions or REGIONS
    if job.boxes:
        _check_region_arrays(values, boxes, sizes, regions)
        shape = (regions, *shape[1:])
    ids = ImageIds("exact" if job.captions else job.id_rule or "name", job.karpathy, job.karpathy_key)
    image_ids: list[str] = []
    for path, list_path, array in zip(paths, lists, values.arrays, strict=True):
        listed = ids.read_list(list_path)
        image_ids += expand_ids(listed, len(array), job.repeats, list_name=list_path.name, array_name=path.name)
    groups = zip(paths, lists, *(rows.paths for rows in (boxes, sizes) if rows.paths), strict=True)
    files = [file for group in groups for file in group]
    captions = open_dataset(job.captions, kind="captions") if job.captions else None
    made_from = [] if captions is None else [{"name": "captions", "fingerprint": captions.fingerprint}]

    def columns(rows: Sequence[int]) -> dict[str, np.ndarray]:
        if not job.boxes:
            return {"embedding" if job.captions else "feature": values.take(rows)}
        sizes_wh = sizes.take(rows) if job.sizes else np.zeros((len(rows), 2))
        return _region_columns(values.take(rows), boxes.take(rows), sizes_wh, regions)

    return FeatureFiles(
        "embeddings" if job.captions else "regions" if job.boxes else "features",
        shape,
        values.arrays[0].dtype,
        image_ids,
        lambda: [*map(describe_file, files), *ids.inputs, *made_from],
        ids.parameters,
        values.place,
        columns,
        _look_up_captions(captions, image_ids) if captions is not None else None,
    )


def _look_up_captions(captions: Dataset, caption_ids: Sequence[str]) -> pa.Table:
    """Return key and split of captions by their ids.

    Raises:
        InputError: the dataset lacks a caption.
    """
    keys = captions.table([*KEY_COLUMNS["captions"], "split"])
    known = [str(CaptionKey(*key)) for *key, _ in map(dict.values, keys.to_pylist())]
    rows = pc.index_in(pa.array(caption_ids, pa.string()), pa.array(known, pa.string()))
    if rows.null_count:
        place, unknown = captions.folder.location, caption_ids[rows.is_null().index(True).as_py()]
        raise InputError(
            f"{place!r} has no caption {unknown!r}: list ids as image/language/portion/index, e.g. cat/en/comparable/0"
        )
    return keys.take(rows)


class _Rows:
    """The concatenated rows of memory-mapped arrays."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths
        self.arrays: list[np.ndarray] = []
        for path in paths:
            try:
                self.arrays.append(np.lib.format.open_memmap(path, mode="r"))
            except NPY_ERRORS as error:
                raise InputError(f"{str(path)!r} cannot be read as an npy array of numbers: {_flaw(path, error)}") from error

    @cached_property
    def _starts(self) -> np.ndarray:
        """The first row of each array, and the number of rows."""
        return np.cumsum([0, *map(len, self.arrays)])

    def place(self, row: int) -> str:
        """Return file and row, counted from 0."""
        index = int(np.searchsorted(self._starts, row, side="right")) - 1
        return f"{self.paths[index].name}, row {row - self._starts[index]}"

    def take(self, rows: Sequence[int]) -> np.ndarray:
        """Return the values of rows."""
        wanted = np.asarray(rows)
        indices = np.searchsorted(self._starts, wanted, side="right") - 1
        values = np.empty((len(wanted), *self.arrays[0].shape[1:]), dtype=self.arrays[0].dtype)
        for index in np.unique(indices):
            in_array = indices == index
            values[in_array] = self.arrays[index][wanted[in_array] - self._starts[index]]
        return values


def _region_columns(values: np.ndarray, boxes: np.ndarray, sizes: np.ndarray, regions: int) -> dict[str, np.ndarray]:
    """Return the columns of regions; trailing regions of zeros are padding."""
    boxes = boxes.astype(np.float32)
    used: np.ndarray = np.any(values, axis=2) | np.any(boxes, axis=2)
    num_regions = np.where(np.any(used, axis=1), used.shape[1] - used[:, ::-1].argmax(axis=1), 0)
    padding = ((0, 0), (0, regions - values.shape[1]), (0, 0))
    return {
        "width": sizes[:, 0],
        "height": sizes[:, 1],
        "num_regions": num_regions,
        "boxes": np.pad(boxes, padding),
        "features": np.pad(values, padding),
        **dict.fromkeys(LABELS, np.zeros((len(values), regions))),
    }


def _flaw(path: Path, error: Exception) -> str:
    """Describe the flaw of a file; numpy's message on pickles advises to allow them."""
    if isinstance(error, OSError):
        return str(error.strerror)
    with path.open("rb") as file:
        head = file.read(len(np.lib.format.MAGIC_PREFIX))
    if head.startswith(b"PK"):
        return "it is an npz archive, which import does not support yet; save its array with numpy.save"
    if head != np.lib.format.MAGIC_PREFIX:
        return "the file is empty" if not head else "it is a file of another kind"
    if "Python objects" in str(error):
        return "it holds Python objects, which could run code when read; save it again as numbers"
    return "it is cut off" if "mmap length" in str(error) else "its header is damaged"


def _check_values(values: _Rows) -> None:
    first = values.arrays[0]
    for path, array in zip(values.paths, values.arrays, strict=True):
        if array.ndim < 2 or not all(array.shape):
            raise InputError(
                f"{path.name} has shape {array.shape}, expected an array [N, D] or [N, R, D] with one row "
                "per image and no zero dimension"
            )
        if array.shape[1:] != first.shape[1:] or array.dtype != first.dtype:
            raise InputError(
                f"{path.name} has rows {array.dtype} {array.shape[1:]}, {values.paths[0].name} has {first.dtype} "
                f"{first.shape[1:]}: import arrays of one kind together, others into another dataset"
            )


def _check_region_arrays(values: _Rows, boxes: _Rows, sizes: _Rows, max_regions: int) -> None:
    first, name = values.arrays[0], values.paths[0].name
    if first.ndim != 3:
        raise InputError(f"{name} has shape {first.shape}, expected [N, R, D] as --boxes is given")
    if first.shape[1] > max_regions:
        raise InputError(
            f"{name} has {first.shape[1]} regions per image, at most {max_regions} are stored: give --max-regions {first.shape[1]}"
        )
    for option, rows, tail in (("boxes", boxes, (first.shape[1], 4)), ("sizes", sizes, (2,))):
        for path, extra, array in zip(rows.paths, rows.arrays, values.arrays, strict=bool(rows.paths)):
            if extra.shape != (len(array), *tail) or extra.dtype.kind not in "fiu":
                raise InputError(
                    f"{path.name} holds {extra.dtype} {extra.shape}, expected numbers "
                    f"{(len(array), *tail)}: one row of {option} for each row of the array"
                )
            if option == "sizes" and not ((extra >= 0) & (extra < 2**31)).all():
                raise InputError(f"{path.name} holds {extra.min()} to {extra.max()}, expected widths and heights in pixels")
