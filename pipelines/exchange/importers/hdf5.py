"""Features in an HDF5 file: one array for all images, or one per image."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.exchange.image_lists import expand_ids, local_file
from pipelines.exchange.importers.base import FeatureFiles, describe_file
from pipelines.exchange.importers.image_ids import ImageIds
from pipelines.exchange.jobs import ImportJob
from schemas.errors import InputError, UsageError

_MAX_LINKS = 16  # Links to links that are followed.
# Errors of h5py for damaged files; counts in them may be false.
_ERRORS = (OSError, RuntimeError, LookupError, ValueError, TypeError, ArithmeticError, MemoryError)


def open_hdf5(job: ImportJob) -> FeatureFiles:
    """Open a file, find its arrays, check their shapes and read the image ids.

    Raises:
        ImagepivotError: a file or array is missing, or they do not belong together.
    """
    try:
        h5py = import_module("h5py")
    except ImportError:
        raise UsageError("reading HDF5 needs h5py, which is not installed: pip install 'imagepivot[hdf5]'") from None
    path = local_file(job.sources[0])
    list_path = local_file(job.ids[0]) if job.ids else None
    try:
        return _open_features(job, _Contents(h5py, path, h5py.File(path, "r")), list_path)
    except _ERRORS as error:
        raise InputError(f"{job.sources[0]!r} cannot be read as HDF5: {error}: copy the file again if it is damaged") from error


def _open_features(job: ImportJob, contents: _Contents, list_path: Path | None) -> FeatureFiles:
    """Find the arrays of an open file, check their shapes and read the image ids."""
    h5py, path = contents.h5py, contents.path
    node = contents.node(job.array or "/")
    is_array = isinstance(node, h5py.Dataset)
    if "pos_boxes" in (node.parent if is_array else node):  # First and last row of each image, in bottom-up-attention.
        raise InputError(
            f"{path.name} holds 'pos_boxes': its arrays have one row per region, not per image, which "
            "import does not support yet; import the tsv files that it was made of"
        )
    place = contents.place(job.array)
    names: list[str] = []
    if is_array:
        shape, dtype = (node.shape or ())[1:], node.dtype
        contents.check_written(place, node)
        if not shape or not all(node.shape):
            raise InputError(
                f"{place} has shape {node.shape}, expected an array [N, D] with one row per image and no zero dimension"
            )
        ids = ImageIds(job.id_rule or "name", job.karpathy, job.karpathy_key)
        listed = ids.read_list(list_path) if list_path is not None else _ids(contents, job, ids)
        list_name = list_path.name if list_path is not None else contents.place(job.id_array)
        image_ids = expand_ids(listed, len(node), job.repeats, list_name=list_name, array_name=place)
    else:
        if job.id_array or list_path is not None:
            raise UsageError(
                f"--ids and --id-array name the ids of one array: name the array with --array. {contents.summary()}"
            )
        names, shape, dtype = _arrays(contents, job.array, node)
        rule = job.id_rule or ("path" if any("/" in name for name in names) else "name")
        ids = ImageIds(rule, job.karpathy, job.karpathy_key)
        image_ids = [ids.read(name, place=contents.place(name)) for name in names]

    def columns(rows: Sequence[int]) -> dict[str, np.ndarray]:
        if names:
            arrays = []
            for row in rows:
                with contents.errors(contents.place(names[row])):
                    arrays.append(node[names[row]][()])
            return {"feature": np.stack(arrays)}
        # h5py accepts only increasing row numbers without duplicates.
        unique, inverse = np.unique(np.asarray(rows), return_inverse=True)
        with contents.errors(place):
            return {"feature": node[unique][inverse]}

    return FeatureFiles(
        "features",
        tuple(shape),
        dtype,
        image_ids,
        lambda: [describe_file(file) for file in (path, list_path) if file is not None] + ids.inputs,
        {"array": job.array or "/", "id_array": job.id_array, **ids.parameters},
        lambda row: contents.place(names[row]) if names else f"{place}, row {row}",
        columns,
    )


@dataclass(frozen=True)
class _Contents:
    """An open HDF5 file, with the module h5py."""

    h5py: Any
    path: Path
    file: Any

    def place(self, name: str) -> str:
        """Return file and path of an array, for messages."""
        return f"{self.path.name}:{name or '/'}"

    def summary(self) -> str:
        """Name the first arrays and groups of the file, for messages."""
        names = sorted(self.file)
        return f"{self.path.name} holds {', '.join(map(repr, names[:5]))}{', ...' if len(names) > 5 else ''}"

    @contextmanager
    def errors(self, place: str) -> Iterator[None]:
        """Convert errors of HDF5 to an `InputError` with advice."""
        try:
            yield
        except _ERRORS as error:
            raise InputError(
                f"{place} cannot be read by HDF5 ({error}): copy the file again if it is damaged, or "
                "install the filter that it was compressed with (pip install hdf5plugin)"
            ) from error

    def check_written(self, place: str, array: Any) -> None:
        """Check that this file stores all values of an array.

        HDF5 fills in values that were never written. Other files may be any of the user, whoever wrote this one.

        Raises:
            InputError: a chunk was never written, or values are in other files.
        """
        if array.is_virtual or array.external:
            raise self._outside(place, "its values are in other files")
        if array.shape is None or not array.size:
            return
        stored, expected = array.id.get_storage_size(), 1
        if array.chunks:
            stored = array.id.get_num_chunks()
            expected = prod(-(-n // chunk) for n, chunk in zip(array.shape, array.chunks, strict=True))
        if stored < expected:
            raise InputError(
                f"{place} has {stored:,} of {expected:,} chunks, and HDF5 would fill in the others: write the file again"
            )

    def node(self, path: str, group: Any = None, depth: int = 0) -> Any:
        """Return an array or group by its path, from a group if it is relative."""
        node = self.file if group is None or path.startswith("/") else group
        for part in filter(None, path.split("/")):
            node = self.child(node, part, depth)
        return node

    def child(self, group: Any, name: str, depth: int = 0) -> Any:
        """Return a member of a group.

        Raises:
            UsageError: the group has no such member.
            InputError: it is a link to another file, to nothing, or to too many links.
        """
        place = self.place(f"{getattr(group, 'name', '')}/{name}".strip("/"))
        try:
            link = group.get(name, getlink=True) if isinstance(group, self.h5py.Group) else None
        except TypeError:
            raise self._outside(place, "it is a link of an unknown kind") from None
        if link is None:
            raise UsageError(f"{self.path.name} holds no {place.partition(':')[2]!r}. {self.summary()}")
        if isinstance(link, self.h5py.ExternalLink):
            raise self._outside(place, "it is a link to another file")
        if not isinstance(link, self.h5py.SoftLink):
            with self.errors(place):
                return group[name]
        with suppress(UsageError):
            if depth < _MAX_LINKS:
                return self.node(link.path, group, depth + 1)
        raise InputError(f"{place} is a link to something that does not exist: delete the link")

    def _outside(self, place: str, reason: str) -> InputError:
        return InputError(
            f"{place} is refused: {reason}, which could be any file of yours. If you trust it, copy the "
            "values into one file, e.g. by h5repack or h5py"
        )


def _ids(contents: _Contents, job: ImportJob, ids: ImageIds) -> list[str]:
    """Read the array of image ids."""
    if not job.id_array:
        raise UsageError(
            f"the ids of {contents.place(job.array)} are not known: give --id-array or --ids. {contents.summary()}"
        )
    node, place = contents.node(job.id_array), contents.place(job.id_array)
    if not hasattr(node, "shape") or node.shape is None or node.ndim != 1 or node.dtype.kind not in "iuSO":
        raise InputError(f"{place} is not a list of image ids, expected strings or whole numbers [N]")
    contents.check_written(place, node)
    with contents.errors(place):
        values = node[()].tolist()
    listed = []
    for row, value in enumerate(values):
        row_place = f"{place}, row {row}"
        try:
            text = value.decode() if isinstance(value, bytes) else str(value)
        except UnicodeDecodeError as error:
            raise InputError(
                f"{row_place}: {value!r} is not UTF-8: write the ids as UTF-8, or give a list with --ids"
            ) from error
        listed.append(ids.read(text, place=row_place))
    return listed


def _arrays(contents: _Contents, path: str, group: Any) -> tuple[list[str], tuple[int, ...], np.dtype]:
    """Return the paths of all arrays below a group, and their shape and dtype."""
    names: list[str] = []
    first: Any = None
    for name, array in _walk_arrays(contents, group, (group,)):  # Only the first array stays open.
        contents.check_written(contents.place(name), array)
        names.append(name)
        first = array if first is None else first
        if array.shape != first.shape or array.dtype != first.dtype or not array.shape or not all(array.shape):
            raise InputError(
                f"{contents.place(name)} is {array.dtype} {array.shape}, {contents.place(names[0])} is "
                f"{first.dtype} {first.shape}: expected arrays of one shape, one per image; an array for "
                "all images is named with --array, and so is the group with the arrays"
            )
    if first is None:
        raise InputError(f"{contents.place(path)} holds no datasets, expected one per image. {contents.summary()}")
    return names, tuple(first.shape), first.dtype


def _walk_arrays(contents: _Contents, group: Any, parents: tuple[Any, ...], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield path and array of every link to an array."""
    for name in group:
        place, item = contents.place(path + name), contents.child(group, name)
        if isinstance(item, contents.h5py.Dataset):
            yield path + name, item
        elif isinstance(item, contents.h5py.Group):
            if item in parents:
                raise InputError(f"{place} is a link to a group around it: delete the link")
            yield from _walk_arrays(contents, item, (*parents, item), f"{path}{name}/")
