"""Features in an HDF5 file: one array for all images, or one array per image. Needs h5py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from pipelines.exchange.image_lists import IdRule, expand_ids, local_file, make_image_id, read_ids
from pipelines.exchange.importers.base import check_options, describe_file
from pipelines.exchange.karpathy_numbers import KarpathyKey, KarpathyNumbers, check_karpathy
from schemas.errors import InputError, UsageError

__all__ = ["Hdf5File", "Hdf5Import"]


@dataclass(frozen=True)
class Hdf5Import:
    """Import of an HDF5 file.

    Attributes:
        sources: the file, exactly one.
        ids: text file with the image ids of ``array``, at most one.
        array: path of the array ``[N, ...]`` within the file; or of a group that holds one array per image, named by its id (the
            root group when empty).
        id_array: path of an array with the image ids of ``array``, in place of ``ids``.
        id_rule: the part of an id that is the image id.
        repeats: how many times in a row each image occurs; identical copies become one row.
        karpathy: a ``dataset_*.json`` of Karpathy's splits, where the ids are its numbers; they become the names of its images.
        karpathy_key: what the numbers count, see `pipelines.exchange.karpathy_numbers`.
    """

    format: ClassVar[str] = "hdf5"

    sources: tuple[str, ...]
    ids: tuple[str, ...] = ()
    array: str = ""
    id_array: str = ""
    id_rule: IdRule = "name"
    repeats: int = 1
    karpathy: str = ""
    karpathy_key: KarpathyKey = "imgid"

    def __post_init__(self) -> None:
        check_options(self.sources, self.id_rule, repeats=self.repeats)
        check_karpathy(self.karpathy, self.karpathy_key)
        if len(self.sources) != 1 or len(self.ids) > 1:
            raise UsageError("import one HDF5 file at a time, with at most one list of ids")

    def open(self) -> Hdf5File:
        """Open the file and check its arrays."""
        return Hdf5File.open(self)


@dataclass(frozen=True)
class Hdf5File:
    """An open HDF5 file with features.

    Attributes:
        layout: the options.
        contents: the open file.
        list_path: the list of image ids, if there is one.
        names: paths of the arrays if there is one per image; empty for one array of all images.
        image_ids: image id of each row, or of each array by name.
        shape: shape of the feature of one image.
        dtype: type of the array or arrays.
        numbers: what the ids in the file or the list stand for.
    """

    layout: Hdf5Import
    contents: _Contents
    list_path: Path | None
    names: Sequence[str]
    image_ids: Sequence[str]
    shape: tuple[int, ...]
    dtype: np.dtype
    numbers: KarpathyNumbers

    @classmethod
    def open(cls, layout: Hdf5Import) -> Hdf5File:
        """Open the file, find its arrays, check their shapes and read the image ids.

        Raises:
            ImagepivotError: a file or array is missing, or they do not belong together.
        """
        h5py = _h5py()
        contents = _Contents.open(h5py, layout.sources[0])
        list_path = local_file(layout.ids[0]) if layout.ids else None
        numbers = KarpathyNumbers.open(layout.karpathy, layout.karpathy_key)
        node = contents.node(layout.array or "/")
        if not isinstance(node, h5py.Dataset):
            if layout.id_array or list_path is not None:
                raise UsageError(
                    f"--ids and --id-array name the ids of one array: name the array with --array. {contents.summary()}"
                )
            names = [name for name, item in node.items() if isinstance(item, h5py.Dataset)]
            shape, dtype = _check_arrays(contents, layout.array, node, names)
            place = contents.path.name
            ids = [make_image_id(name, layout.id_rule, place=place) for name in names]
            image_ids = [numbers.image_id(text, place=place) for text in ids]
            return cls(layout, contents, list_path, names, image_ids, shape, dtype, numbers)
        array_name = contents.place(layout.array)
        if len(node.shape) < 2 or not all(node.shape):
            raise InputError(
                f"{array_name} has shape {node.shape}, expected an array [N, D] with one row per image and no zero dimension"
            )
        list_name = list_path.name if list_path is not None else contents.place(layout.id_array)
        entries = enumerate(_ids(contents, layout, list_path))
        ids = [numbers.image_id(entry, place=f"{list_name}, entry {number}") for number, entry in entries]
        image_ids = expand_ids(ids, len(node), layout.repeats, list_name=list_name, array_name=array_name)
        return cls(layout, contents, list_path, (), image_ids, tuple(node.shape[1:]), node.dtype, numbers)

    @property
    def kind(self) -> str:
        """Always ``features``."""
        return "features"

    @property
    def inputs(self) -> list[dict[str, Any]]:
        """The file, the list if there is one, and what their ids stand for."""
        paths = [self.contents.path] if self.list_path is None else [self.contents.path, self.list_path]
        return [describe_file(path) for path in paths] + self.numbers.inputs

    @property
    def parameters(self) -> dict[str, Any]:
        """The arrays of the file, and the rules for image ids."""
        arrays = {"array": self.layout.array or "/", "id_array": self.layout.id_array}
        return {**arrays, "id_rule": self.layout.id_rule, **self.numbers.parameters}

    def place(self, row: int) -> str:
        """Return file, array and row, counted from 0."""
        if self.names:
            return self.contents.place(self.names[row])
        return f"{self.contents.place(self.layout.array)}, row {row}"

    def columns(self, rows: Sequence[int]) -> dict[str, np.ndarray]:
        """Read rows."""
        values = np.empty((len(rows), *self.shape), dtype=self.dtype)
        node = self.contents.node(self.layout.array or "/")
        if self.names:
            for target, row in enumerate(rows):
                values[target] = node[self.names[row]][()]
            return {"feature": values}
        # h5py accepts only increasing row numbers without duplicates.
        unique, inverse = np.unique(np.asarray(rows), return_inverse=True)
        values[:] = node[unique][inverse]
        return {"feature": values}


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


def _ids(contents: _Contents, layout: Hdf5Import, list_path: Path | None) -> list[str]:
    if list_path is not None:
        return read_ids(list_path, layout.id_rule)
    if not layout.id_array:
        raise UsageError(
            f"the ids of {contents.place(layout.array)} are not known: give --id-array or --ids. {contents.summary()}"
        )
    node, place = contents.node(layout.id_array), contents.place(layout.id_array)
    if not hasattr(node, "shape") or node.ndim != 1 or node.dtype.kind not in "iuSO":
        raise InputError(f"{place} is not a list of image ids, expected strings or whole numbers [N]")
    texts = [value.decode() if isinstance(value, bytes) else str(value) for value in node[()].tolist()]
    return [make_image_id(text, layout.id_rule, place=f"{place}, row {row}") for row, text in enumerate(texts)]


def _check_arrays(contents: _Contents, path: str, group: Any, names: Sequence[str]) -> tuple[tuple[int, ...], np.dtype]:
    """Check that the arrays of a group have one shape and type, and return both."""
    if not names:
        raise InputError(f"{contents.place(path)} holds no datasets, expected one per image. {contents.summary()}")
    first = group[names[0]]
    for name in names:
        array = group[name]
        if array.shape != first.shape or array.dtype != first.dtype or not array.shape or not all(array.shape):
            raise InputError(
                f"{contents.place(name)} is {array.dtype} {array.shape}, {contents.place(names[0])} is {first.dtype} "
                f"{first.shape}: expected arrays of one shape, one per image; an array for all images is named with --array"
            )
    return tuple(first.shape), first.dtype
