"""npy arrays with lists of image ids: Multi30K's own features, VSE++ and SCAN, or anything of that form.

``N`` rows, ``R`` regions, ``D`` values. The arrays are mapped into memory, never loaded; nothing is ever unpickled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.exchange.importers.base import IdRule, ImportedFile, local_file, pad_regions, read_ids
from schemas.errors import InputError, UsageError

__all__ = ["ArrayFiles", "expand_ids", "guess_ids"]


def guess_ids(array: Path) -> Path:
    """The list of image ids that lies beside an array: ``X.ids`` or ``X.txt``, ``S_ids.txt`` of ``S_ims.npy``, ``ids.txt``.

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


def expand_ids(ids: list[str], rows: int, repeats: int, *, list_name: str, array_name: str) -> list[str]:
    """The image id of each row.

    Args:
        ids: the ids of the list.
        rows: number of rows.
        repeats: how often each image stands in a row, in the array, the list, or both.
        list_name: for messages.
        array_name: for messages.

    Raises:
        InputError: list and array are of different lengths.
    """
    if len(ids) == rows:
        return ids
    if repeats > 1 and len(ids) * repeats == rows:
        return [image_id for image_id in ids for _ in range(repeats)]
    if repeats > 1 and rows * repeats == len(ids):
        first = ids[::repeats]
        for number, image_id in enumerate(ids):
            if image_id != first[number // repeats]:
                raise InputError(
                    f"{list_name}, line {number + 1}: image {image_id!r} among the {repeats} lines of image "
                    f"{first[number // repeats]!r}: the images do not stand there {repeats} times each"
                )
        return first
    small, large = sorted((len(ids), rows))
    hint = f"; if each image stands {large // small} times in a row, give --repeats {large // small}"
    raise InputError(
        f"{list_name} has {len(ids):,} ids but {array_name} has {rows:,} rows: they do not belong together"
        + (hint if repeats == 1 and small and large % small == 0 else "")
    )


def _open(path: Path) -> np.ndarray:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise InputError(f"{str(path)!r} cannot be read as an npy array of numbers: {error}") from error
    if not isinstance(array, np.ndarray):
        raise InputError(f"{str(path)!r} is an npz archive: take the npy array out of it")
    return array


@dataclass
class ArrayFiles:
    """Arrays ``[N, ...]`` with one list of image ids each, put one behind the other.

    Attributes:
        arrays: the npy files.
        lists: text files with the image ids of each array; looked for beside it when there are none.
        boxes: npy files ``[N, R, 4]``, which make arrays ``[N, R, D]`` regions.
        sizes: npy files ``[N, 2]`` of width and height of the images; 0 is stored when there are none.
        id_rule: what of a file name is the image id.
        repeats: how often each image stands in a row.
        regions: most regions of an image that are stored.
    """

    arrays: Sequence[str]
    lists: Sequence[str] = ()
    boxes: Sequence[str] = ()
    sizes: Sequence[str] = ()
    id_rule: IdRule = "name"
    repeats: int = 1
    regions: int = 36
    _rows: np.ndarray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for option, files in (("ids", self.lists), ("boxes", self.boxes), ("sizes", self.sizes)):
            if files and len(files) != len(self.arrays):
                raise UsageError(
                    f"{len(self.arrays)} arrays but {len(files)} files with --{option}: give one for each, in the same order"
                )
        if self.sizes and not self.boxes:
            raise UsageError("--sizes is for regions: give --boxes as well, or leave --sizes out")
        paths = [local_file(each) for each in self.arrays]
        lists = [local_file(each) for each in self.lists] or [guess_ids(path) for path in paths]
        beside = {name: [local_file(each) for each in getattr(self, name)] for name in ("boxes", "sizes")}
        self._paths = paths
        self._files = [file for group in zip(paths, lists, *(b for b in beside.values() if b), strict=True) for file in group]
        self._maps = {"values": [_open(path) for path in paths], **{n: [_open(p) for p in b] for n, b in beside.items()}}
        self._check_shapes(beside)
        self._image_ids: list[str] = []
        for path, list_, array in zip(paths, lists, self._maps["values"], strict=True):
            ids = read_ids(list_, self.id_rule)
            self._image_ids += expand_ids(ids, len(array), self.repeats, list_name=list_.name, array_name=path.name)
        self._rows = np.cumsum([0, *(len(array) for array in self._maps["values"])])

    def _check_shapes(self, beside: dict[str, list[Path]]) -> None:
        first = self._maps["values"][0]
        for path, array in zip(self._paths, self._maps["values"], strict=True):
            if array.ndim < 2 or not all(array.shape):
                raise InputError(f"{path.name} has shape {array.shape}, expected a row an image: [N, D] or [N, R, D], none 0")
            if array.shape[1:] != first.shape[1:] or array.dtype != first.dtype:
                raise InputError(
                    f"{path.name} has rows {array.dtype} {array.shape[1:]}, {self._paths[0].name} has {first.dtype} "
                    f"{first.shape[1:]}: import arrays of one kind together, others into another dataset"
                )
        if not self.boxes:
            return
        if first.ndim != 3:
            raise InputError(f"{self._paths[0].name} has shape {first.shape}, expected [N, R, D] as --boxes is given")
        if first.shape[1] > self.regions:
            raise InputError(
                f"{self._paths[0].name} has {first.shape[1]} regions an image, at most {self.regions} are stored: "
                f"give --max-regions {first.shape[1]}"
            )
        for name, tail in (("boxes", (first.shape[1], 4)), ("sizes", (2,))):
            for path, other, array in zip(beside[name], self._maps[name], self._maps["values"], strict=bool(beside[name])):
                if other.shape != (len(array), *tail) or other.dtype.kind not in "fiu":
                    raise InputError(
                        f"{path.name} holds {other.dtype} {other.shape}, expected numbers {(len(array), *tail)}: one row of "
                        f"{name} for each row of the array"
                    )

    @property
    def kind(self) -> str:
        """``regions`` when there are boxes."""
        return "regions" if self.boxes else "features"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one row; of regions always the most that are stored."""
        shape = self._maps["values"][0].shape[1:]
        return (self.regions, *shape[1:]) if self.boxes else shape

    @property
    def dtype(self) -> np.dtype:
        """Type of the arrays."""
        return self._maps["values"][0].dtype

    @property
    def image_ids(self) -> Sequence[str]:
        """The image id of each row."""
        return self._image_ids

    @property
    def inputs(self) -> list[dict[str, Any]]:
        """Array, list, boxes and sizes, array by array."""
        return [ImportedFile(path).describe() for path in self._files]

    @property
    def parameters(self) -> dict[str, Any]:
        """What image ids are made of."""
        return {"id_rule": self.id_rule}

    def place(self, row: int) -> str:
        """File and row, from 0."""
        number = int(np.searchsorted(self._rows, row, side="right")) - 1
        return f"{self._paths[number].name}, row {row - self._rows[number]}"

    def columns(self, rows: Sequence[int]) -> dict[str, np.ndarray]:
        """Gathers rows of the mapped arrays."""
        values = self._take("values", rows)
        if not self.boxes:
            return {"feature": values}
        boxes = self._take("boxes", rows).astype(np.float32)
        used: np.ndarray = np.any(values, axis=2) | np.any(boxes, axis=2)
        # Regions behind the last one that holds anything are padding.
        num_regions = np.where(np.any(used, axis=1), used.shape[1] - used[:, ::-1].argmax(axis=1), 0)
        sizes = self._take("sizes", rows) if self.sizes else np.zeros((len(rows), 2))
        zeros = np.zeros((len(rows), self.regions))
        return {
            "width": sizes[:, 0],
            "height": sizes[:, 1],
            "num_regions": num_regions,
            "boxes": pad_regions(boxes, self.regions),
            "features": pad_regions(values, self.regions),
            **dict.fromkeys(("class_ids", "class_scores", "attribute_ids", "attribute_scores"), zeros),
        }

    def _take(self, name: str, rows: Sequence[int]) -> np.ndarray:
        maps, wanted = self._maps[name], np.asarray(rows)
        numbers = np.searchsorted(self._rows, wanted, side="right") - 1
        taken = np.empty((len(wanted), *maps[0].shape[1:]), dtype=maps[0].dtype)
        for number in np.unique(numbers):
            here = numbers == number
            taken[here] = maps[number][wanted[here] - self._rows[number]]
        return taken
