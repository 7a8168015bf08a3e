"""npy arrays with lists of image ids: Multi30K's own features, VSE++ and SCAN, or anything of that form.

``N`` rows, ``R`` regions, ``D`` values. The arrays are mapped into memory, never loaded; nothing is ever unpickled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np

from pipelines.exchange.exporters.base import apply_sidecars
from pipelines.exchange.image_lists import ImageIds, expand_ids, local_file
from pipelines.exchange.importers.base import describe_file, pad_regions
from pipelines.exchange.jobs import ImportJob
from pipelines.exchange.karpathy_numbers import KarpathyNumbers
from schemas.errors import InputError, UsageError
from schemas.kinds import REGIONS


def guess_ids(array: Path) -> Path:
    """Return the list of image ids beside an array: ``X.ids``, ``X.txt``, ``S_ids.txt`` for ``S_ims.npy``, or ``ids.txt``.

    Raises:
        UsageError: there is none.
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


@dataclass(frozen=True)
class ArrayFiles:
    """Open arrays, concatenated.

    Attributes:
        job: the files and their options.
        paths: the arrays.
        files: every file, array by array.
        maps: the mapped arrays: ``values``, and for regions ``boxes`` and ``sizes``.
        image_ids: image id of each row.
        numbers: what the ids in the lists stand for.
    """

    job: ImportJob
    paths: Sequence[Path]
    files: Sequence[Path]
    maps: Mapping[str, Sequence[np.ndarray]]
    image_ids: Sequence[str]
    numbers: KarpathyNumbers

    @classmethod
    def open(cls, job: ImportJob) -> ArrayFiles:
        """Map the arrays, check their shapes and read the lists of image ids.

        Raises:
            ImagepivotError: a file is missing, or they do not belong together.
        """
        paths = [local_file(location) for location in job.sources]
        values = [_map(path) for path in paths]
        job = apply_sidecars(job, paths)
        lists = [local_file(location) for location in job.ids] or [guess_ids(path) for path in paths]
        extras = {name: [local_file(location) for location in getattr(job, name)] for name in ("boxes", "sizes")}
        maps = {"values": values, **{name: [_map(path) for path in files] for name, files in extras.items()}}
        _check_values(paths, values)
        if job.boxes:
            _check_regions(paths, extras, maps, job.max_regions or REGIONS)
        numbers = KarpathyNumbers.open(job.karpathy, job.karpathy_key)
        image_ids: list[str] = []
        reader = ImageIds(job.id_rule or "name")
        for path, list_path, array in zip(paths, lists, values, strict=True):
            entries = enumerate(reader.read_list(list_path), start=1)
            ids = [numbers.image_id(entry, place=f"{list_path.name}, line {line}") for line, entry in entries]
            image_ids += expand_ids(ids, len(array), job.repeats, list_name=list_path.name, array_name=path.name)
        groups = zip(paths, lists, *(files for files in extras.values() if files), strict=True)
        return cls(job, paths, [file for group in groups for file in group], maps, image_ids, numbers)

    @property
    def kind(self) -> str:
        """``regions`` if there are boxes, else ``features``."""
        return "regions" if self.job.boxes else "features"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one row; for regions with the greatest number that is stored."""
        shape = self.maps["values"][0].shape[1:]
        return (self.job.max_regions or REGIONS, *shape[1:]) if self.job.boxes else shape

    @property
    def dtype(self) -> np.dtype:
        """Type of the arrays."""
        return self.maps["values"][0].dtype

    @property
    def inputs(self) -> list[dict[str, Any]]:
        """Array, list, boxes and sizes, array by array; and what their ids stand for."""
        return [describe_file(path) for path in self.files] + self.numbers.inputs

    @property
    def parameters(self) -> dict[str, Any]:
        """The rules for image ids."""
        return {"id_rule": self.job.id_rule or "name", **self.numbers.parameters}

    def place(self, row: int) -> str:
        """Return file and row, counted from 0."""
        number = int(np.searchsorted(self._starts, row, side="right")) - 1
        return f"{self.paths[number].name}, row {row - self._starts[number]}"

    def columns(self, rows: Sequence[int]) -> dict[str, np.ndarray]:
        """Gather rows of the mapped arrays."""
        values = self._take("values", rows)
        if not self.job.boxes:
            return {"feature": values}
        regions = self.shape[0]
        boxes = self._take("boxes", rows).astype(np.float32)
        used: np.ndarray = np.any(values, axis=2) | np.any(boxes, axis=2)
        # Regions after the last one that is not all zero are padding.
        num_regions = np.where(np.any(used, axis=1), used.shape[1] - used[:, ::-1].argmax(axis=1), 0)
        sizes = self._take("sizes", rows) if self.job.sizes else np.zeros((len(rows), 2))
        zeros = np.zeros((len(rows), regions))
        return {
            "width": sizes[:, 0],
            "height": sizes[:, 1],
            "num_regions": num_regions,
            "boxes": pad_regions(boxes, regions),
            "features": pad_regions(values, regions),
            **dict.fromkeys(("class_ids", "class_scores", "attribute_ids", "attribute_scores"), zeros),
        }

    @cached_property
    def _starts(self) -> np.ndarray:
        """The first row of each array, and the number of rows."""
        return np.cumsum([0, *(len(array) for array in self.maps["values"])])

    def _take(self, name: str, rows: Sequence[int]) -> np.ndarray:
        maps, wanted = self.maps[name], np.asarray(rows)
        numbers = np.searchsorted(self._starts, wanted, side="right") - 1
        taken = np.empty((len(wanted), *maps[0].shape[1:]), dtype=maps[0].dtype)
        for number in np.unique(numbers):
            in_array = numbers == number
            taken[in_array] = maps[number][wanted[in_array] - self._starts[number]]
        return taken


def _map(path: Path) -> np.ndarray:
    try:
        return np.lib.format.open_memmap(path, mode="r")
    except (OSError, ValueError, EOFError, TypeError, SyntaxError, TokenError) as error:
        raise InputError(f"{str(path)!r} cannot be read as an npy array of numbers: {_flaw(path, error)}") from error


def _flaw(path: Path, error: Exception) -> str:
    """Say what is wrong with a file; where numpy takes it for a pickle, its own advice is to load that without protection."""
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


def _check_values(paths: Sequence[Path], arrays: Sequence[np.ndarray]) -> None:
    first = arrays[0]
    for path, array in zip(paths, arrays, strict=True):
        if array.ndim < 2 or not all(array.shape):
            raise InputError(
                f"{path.name} has shape {array.shape}, expected an array [N, D] or [N, R, D] with one row per image and no zero "
                "dimension"
            )
        if array.shape[1:] != first.shape[1:] or array.dtype != first.dtype:
            raise InputError(
                f"{path.name} has rows {array.dtype} {array.shape[1:]}, {paths[0].name} has {first.dtype} "
                f"{first.shape[1:]}: import arrays of one kind together, others into another dataset"
            )


def _check_regions(
    paths: Sequence[Path],
    extras: Mapping[str, Sequence[Path]],
    maps: Mapping[str, Sequence[np.ndarray]],
    max_regions: int,
) -> None:
    first = maps["values"][0]
    if first.ndim != 3:
        raise InputError(f"{paths[0].name} has shape {first.shape}, expected [N, R, D] as --boxes is given")
    if first.shape[1] > max_regions:
        raise InputError(
            f"{paths[0].name} has {first.shape[1]} regions per image, at most {max_regions} are stored: "
            f"give --max-regions {first.shape[1]}"
        )
    for name, tail in (("boxes", (first.shape[1], 4)), ("sizes", (2,))):
        for path, extra, array in zip(extras[name], maps[name], maps["values"], strict=bool(extras[name])):
            if extra.shape != (len(array), *tail) or extra.dtype.kind not in "fiu":
                raise InputError(
                    f"{path.name} holds {extra.dtype} {extra.shape}, expected numbers {(len(array), *tail)}: one row of "
                    f"{name} for each row of the array"
                )
