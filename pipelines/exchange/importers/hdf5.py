"""Features in an HDF5 file: one array for all images, or one for each. Needs h5py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from pipelines.exchange.importers.arrays import expand_ids
from pipelines.exchange.importers.base import IdRule, ImportedFile, local_file, make_image_id, read_ids
from schemas.errors import InputError, UsageError

__all__ = ["Hdf5File"]


def _h5py() -> Any:
    try:
        return import_module("h5py")
    except ImportError:
        raise UsageError("reading HDF5 needs h5py, which is not installed: pip install 'imagepivot[hdf5]'") from None


@dataclass
class Hdf5File:
    """An HDF5 file with features.

    Attributes:
        file: the file.
        array: path of the dataset ``[N, ...]`` within it; or of a group that holds one dataset an image, named by its id (the
            root group when empty).
        id_array: path of the dataset with the image ids of ``array``.
        id_list: or a text file with them.
        id_rule: what of a file name is the image id.
        repeats: how often each image stands in a row.
    """

    file: str
    array: str = ""
    id_array: str = ""
    id_list: str = ""
    id_rule: IdRule = "name"
    repeats: int = 1

    def __post_init__(self) -> None:
        h5py = _h5py()
        self._path = local_file(self.file)
        self._list = local_file(self.id_list) if self.id_list else None
        try:
            self._open = h5py.File(self._path, "r")
        except OSError as error:
            raise InputError(f"{self.file!r} cannot be read as HDF5: {error}") from error
        node = self._node(self.array or "/")
        self._whole = isinstance(node, h5py.Dataset)
        if self._whole:
            self._names: list[str] = []
            self._shape, self._dtype = node.shape[1:], node.dtype
            if len(node.shape) < 2 or not all(node.shape):
                raise InputError(f"{self._at(self.array)} has shape {node.shape}, expected a row an image: [N, D], none 0")
            list_name = self._list.name if self._list is not None else self._at(self.id_array)
            ids = self._ids()
            self._image_ids = expand_ids(ids, len(node), self.repeats, list_name=list_name, array_name=self._at(self.array))
        else:
            if self.id_array or self._list is not None:
                raise UsageError(
                    f"--ids and --id-array name the ids of one array: name the array with --array. {self._holds()}"
                )
            self._names = [name for name, each in node.items() if isinstance(each, h5py.Dataset)]
            self._shape, self._dtype = self._check_each(node)
            self._image_ids = [make_image_id(name, self.id_rule, place=self._path.name) for name in self._names]

    def _at(self, name: str) -> str:
        return f"{self._path.name}:{name or '/'}"

    def _holds(self) -> str:
        names = sorted(self._open)
        return f"{self._path.name} holds {', '.join(map(repr, names[:5]))}{', ...' if len(names) > 5 else ''}"

    def _node(self, name: str) -> Any:
        try:
            return self._open[name]
        except KeyError:
            raise UsageError(f"{self._path.name} holds no {name!r}. {self._holds()}") from None

    def _ids(self) -> list[str]:
        if self._list is not None:
            return read_ids(self._list, self.id_rule)
        if not self.id_array:
            raise UsageError(f"the ids of {self._at(self.array)} are not known: give --id-array or --ids. {self._holds()}")
        node = self._node(self.id_array)
        if not hasattr(node, "shape") or node.ndim != 1 or node.dtype.kind not in "iuSO":
            raise InputError(f"{self._at(self.id_array)} is no list of image ids, expected strings or whole numbers [N]")
        values = node[()].tolist()
        texts = [each.decode() if isinstance(each, bytes) else str(each) for each in values]
        return [make_image_id(text, self.id_rule, place=f"{self._at(self.id_array)}, row {n}") for n, text in enumerate(texts)]

    def _check_each(self, group: Any) -> tuple[tuple[int, ...], np.dtype]:
        if not self._names:
            raise InputError(f"{self._at(self.array)} holds no datasets, expected one an image. {self._holds()}")
        first = group[self._names[0]]
        for name in self._names:
            each = group[name]
            if each.shape != first.shape or each.dtype != first.dtype or not each.shape or not all(each.shape):
                raise InputError(
                    f"{self._at(name)} is {each.dtype} {each.shape}, {self._at(self._names[0])} is {first.dtype} "
                    f"{first.shape}: expected arrays of one shape, one an image; an array for all images is named with --array"
                )
        return first.shape, first.dtype

    @property
    def kind(self) -> str:
        """Always ``features``."""
        return "features"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the feature of one image."""
        return tuple(self._shape)

    @property
    def dtype(self) -> np.dtype:
        """Type of the array or arrays."""
        return self._dtype

    @property
    def image_ids(self) -> Sequence[str]:
        """The image id of each row, or of each array by name."""
        return self._image_ids

    @property
    def inputs(self) -> list[dict[str, Any]]:
        """The file, and the list where there is one."""
        paths = [self._path] if self._list is None else [self._path, self._list]
        return [ImportedFile(path).describe() for path in paths]

    @property
    def parameters(self) -> dict[str, Any]:
        """Which arrays of the file, and what image ids are made of."""
        return {"array": self.array or "/", "id_array": self.id_array, "id_rule": self.id_rule}

    def place(self, row: int) -> str:
        """File, array and row, from 0."""
        return f"{self._at(self.array)}, row {row}" if self._whole else self._at(self._names[row])

    def columns(self, rows: Sequence[int]) -> dict[str, np.ndarray]:
        """Reads these rows, in the order in which they lie in the file."""
        values = np.empty((len(rows), *self.shape), dtype=self.dtype)
        node = self._node(self.array or "/")
        if not self._whole:
            for target, row in enumerate(rows):
                values[target] = node[self._names[row]][()]
            return {"feature": values}
        # h5py wants increasing numbers, each of them once.
        unique, inverse = np.unique(np.asarray(rows), return_inverse=True)
        values[:] = node[unique][inverse]
        return {"feature": values}
