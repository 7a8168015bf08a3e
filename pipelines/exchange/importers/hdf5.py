"""Features in an HDF5 file: one array for all images, or one array per image. Needs h5py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.exchange.image_lists import ImageIds, expand_ids, local_file
from pipelines.exchange.importers.base import FeatureFiles, describe_file
from pipelines.exchange.jobs import ImportJob
from pipelines.exchange.karpathy_numbers import KarpathyNumbers
from schemas.errors import InputError, UsageError


def open_hdf5(job: ImportJob) -> FeatureFiles:
    """Open a file, find its arrays, check their shapes and read the image ids.

    Raises:
        ImagepivotError: a file or array is missing, or they do not belong together.
    """
    h5py = _h5py()
    contents = _Contents.open(h5py, job.sources[0])
    list_path = local_file(job.ids[0]) if job.ids else None
    numbers = KarpathyNumbers.open(job.karpathy, job.karpathy_key)
    node = contents.node(job.array or "/")
    contents.check_flat_rows(node.parent if isinstance(node, h5py.Dataset) else node)
    if not isinstance(node, h5py.Dataset):
        if job.id_array or list_path is not None:
            raise UsageError(
                f"--ids and --id-array name the ids of one array: name the array with --array. {contents.summary()}"
            )
        names, shape, dtype = _arrays(h5py, contents, job.array, node)
        places = [contents.place(name) for name in names]
        reader = ImageIds(job.id_rule or ("path" if any("/" in name for name in names) else "name"))
        ids = [reader.read(name, place=place) for name, place in zip(names, places, strict=True)]
        image_ids = [numbers.image_id(text, place=place) for text, place in zip(ids, places, strict=True)]
    else:
        names, shape, dtype, place = [], node.shape[1:], node.dtype, contents.place(job.array)
        if not shape or not all(node.shape):
            raise InputError(
                f"{place} has shape {node.shape}, expected an array [N, D] with one row per image and no zero dimension"
            )
        list_name = list_path.name if list_path is not None else contents.place(job.id_array)
        reader = ImageIds(job.id_rule or "name")
        entries = enumerate(_ids(contents, job, list_path, reader))
        ids = [numbers.image_id(entry, place=f"{list_name}, entry {number}") for number, entry in entries]
        image_ids = expand_ids(ids, len(node), job.repeats, list_name=list_name, array_name=place)

    def place_of(row: int) -> str:
        return contents.place(names[row]) if names else f"{contents.place(job.array)}, row {row}"

    def columns(rows: Sequence[int]) -> dict[str, np.ndarray]:
        if names:
            return {"feature": np.stack([node[names[row]][()] for row in rows])}
        # h5py accepts only increasing row numbers without duplicates.
        unique, inverse = np.unique(np.asarray(rows), return_inverse=True)
        return {"feature": node[unique][inverse]}

    return FeatureFiles(
        "features",
        tuple(shape),
        dtype,
        image_ids,
        lambda: [describe_file(path) for path in (contents.path, list_path) if path is not None] + numbers.inputs,
        {"array": job.array or "/", "id_array": job.id_array, "id_rule": reader.rule, **numbers.parameters},
        place_of,
        columns,
    )


@dataclass(frozen=True)
class _Contents:
    """An open HDF5 file that finds and names its arrays."""

    path: Path
    file: Any

    @classmethod
    def open(cls, h5py: Any, location: str) -> _Contents:
        path = local_file(location)
        try:
            return cls(path, h5py.File(path, "r"))
        except OSError as error:
            raise InputError(f"{location!r} cannot be read as HDF5: {error}") from error

    def place(self, name: str) -> str:
        """Return file and path of an array, for messages."""
        return f"{self.path.name}:{name or '/'}"

    def summary(self) -> str:
        """Name the first arrays and groups of the file, for messages."""
        names = sorted(self.file)
        return f"{self.path.name} holds {', '.join(map(repr, names[:5]))}{', ...' if len(names) > 5 else ''}"

    def check_flat_rows(self, group: Any) -> None:
        """Refuse the adaptive regions of bottom-up-attention: ``pos_boxes`` are the first and last row of each image."""
        if "pos_boxes" in group:
            raise InputError(
                f"{self.path.name} holds 'pos_boxes': its arrays have one row per region, not per image, which import does not "
                "support yet; import the tsv files that it was made of"
            )

    def node(self, name: str) -> Any:
        """Return an array or group by its path."""
        try:
            return self.file[name]
        except KeyError:
            raise UsageError(f"{self.path.name} holds no {name!r}. {self.summary()}") from None


def _h5py() -> Any:
    try:
        return import_module("h5py")
    except ImportError:
        raise UsageError("reading HDF5 needs h5py, which is not installed: pip install 'imagepivot[hdf5]'") from None


def _ids(contents: _Contents, job: ImportJob, list_path: Path | None, reader: ImageIds) -> list[str]:
    if list_path is not None:
        return reader.read_list(list_path)
    if not job.id_array:
        raise UsageError(
            f"the ids of {contents.place(job.array)} are not known: give --id-array or --ids. {contents.summary()}"
        )
    node, place = contents.node(job.id_array), contents.place(job.id_array)
    if not hasattr(node, "shape") or node.ndim != 1 or node.dtype.kind not in "iuSO":
        raise InputError(f"{place} is not a list of image ids, expected strings or whole numbers [N]")
    ids = []
    for row, value in enumerate(node[()].tolist()):
        row_place = f"{place}, row {row}"
        try:
            text = value.decode() if isinstance(value, bytes) else str(value)
        except UnicodeDecodeError as error:
            raise InputError(
                f"{row_place}: {value!r} is not UTF-8: write the ids as UTF-8, or give a list with --ids"
            ) from error
        ids.append(reader.read(text, place=row_place))
    return ids


def _arrays(h5py: Any, contents: _Contents, path: str, group: Any) -> tuple[list[str], tuple[int, ...], np.dtype]:
    """Return the paths of all arrays in a group and its groups, and their shape and type, which must be one."""
    names: list[str] = []
    first: Any = None
    for name, array in _walk(h5py, contents, group, (group,)):
        first = array if first is None else first
        if array.shape != first.shape or array.dtype != first.dtype or not array.shape or not all(array.shape):
            raise InputError(
                f"{contents.place(name)} is {array.dtype} {array.shape}, {contents.place((names or [name])[0])} is {first.dtype} "
                f"{first.shape}: expected arrays of one shape, one per image; an array for all images is named with --array, "
                "and so is the group with the arrays"
            )
        names.append(name)
    if first is None:
        raise InputError(f"{contents.place(path)} holds no datasets, expected one per image. {contents.summary()}")
    return names, tuple(first.shape), first.dtype


def _walk(h5py: Any, contents: _Contents, group: Any, parents: tuple[Any, ...], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield path and array of every link to an array, also where several lead to one array."""
    for name, item in group.items():
        if item is None:
            raise InputError(
                f"{contents.place(path + name)} is a link to something that does not exist: copy the file it leads to beside this "
                "one, or delete the link"
            )
        if isinstance(item, h5py.Dataset):
            yield path + name, item
        elif isinstance(item, h5py.Group):
            if item in parents:
                raise InputError(f"{contents.place(path + name)} is a link to a group around it: delete the link")
            yield from _walk(h5py, contents, item, (*parents, item), f"{path}{name}/")
