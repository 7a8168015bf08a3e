"""The ``*_precomp`` layout of VSE++ (fartashf/vsepp) and SCAN (kuanghuei/SCAN), and of the many code bases built on them.

Their loaders read ``SPLIT_caps.txt``, one caption a line, and ``SPLIT_ims.npy``, and take caption ``i`` to be about row
``i // 5``, or about row ``i`` where there are as many captions as rows. Some read ``SPLIT_ids.txt`` as well: the id of
each row, which most convert to a number. Of ``dev`` they always take the first 5,000 captions.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from pipelines.exchange.exporters.arrays import check_there, feature_column, places_of, write_array, write_ids
from pipelines.exchange.exporters.captions import EVERYTHING, Choice, read_captions
from pipelines.exchange.exporters.staging import Staging
from pipelines.running.progress import Meter
from schemas.dataset import Dataset
from schemas.errors import DatasetError, UsageError

__all__ = ["export_scan"]

_PER_IMAGE = (1, 5)
_DEV_CAPTIONS = 5000


def _lines(captions: pa.Table, text: str) -> pa.ChunkedArray:
    if text == "tokens":
        return pc.binary_join(captions["tokens"].cast(pa.list_(pa.string())), " ")
    return pc.replace_substring_regex(captions["text"], r"\s*[\r\n]+\s*", " ")


def _even(captions: pa.Table, split: str, per_image: int) -> tuple[list[str], pa.Table]:
    """The images in the order of their ids, and the same number of captions of each.

    Raises:
        DatasetError: images have different numbers of captions.
        UsageError: the loaders cannot take that number.
    """
    counts = {image_id: len(list(group)) for image_id, group in groupby(captions["image_id"].to_pylist())}
    least, most = min(counts.values()), max(counts.values())
    if per_image > least or (not per_image and least != most):
        few = next(image_id for image_id, count in counts.items() if count == least)
        raise DatasetError(
            f"the images of split {split!r} have {least} to {most} captions, image {few!r} has {least}: this layout needs "
            f"{f'{per_image} of each' if per_image else 'the same number'}; give --captions-per-image {least} to take the "
            "first of each"
        )
    if per_image and most > per_image:
        starts = [0]
        for count in counts.values():
            starts.append(starts[-1] + count)
        captions = captions.take([start + n for start in starts[:-1] for n in range(per_image)])
    found = per_image or most
    if found not in _PER_IMAGE:
        raise UsageError(
            f"the images of split {split!r} have {found} captions each, but the loaders of this layout take 5, or 1: give "
            f"--captions-per-image {5 if found > 5 else 1}"
        )
    return list(counts), captions


def export_scan(
    dataset: Dataset,
    captions: Dataset,
    staging: Staging,
    *,
    choice: Choice = EVERYTHING,
    text: str = "text",
    per_image: int = 0,
    rename: Callable[[str], str] = str,
    l2: bool = False,
    note: Callable[[str], None] = lambda text: None,
    meter: Meter = Meter(),
) -> list[Path]:
    """Writes ``SPLIT_ims.npy`` (float32), ``SPLIT_caps.txt`` and ``SPLIT_ids.txt`` of each split, images sorted by id.

    Args:
        dataset: features ``[D]``, or regions, of which ``[R, D]`` is written.
        captions: captions of one language and portion.
        staging: the folder.
        choice: which captions.
        text: ``text``: captions as read; ``tokens``: their tokens joined by a space.
        per_image: captions that are taken of each image, from the first; 0 takes all.
        rename: a split to its name in the layout, where ``val`` is called ``dev``.
        l2: divide each vector by its norm.
        note: takes a sentence about what the loaders will not like.
        meter: counts images.
    """
    column = feature_column(dataset)
    table = read_captions(captions, choice, text, one=("language", "portion"))
    parts: dict[str, tuple[list[str], pa.Table]] = {}
    for split in sorted(pc.unique(table["split"]).to_pylist()):
        name = rename(split)
        if name in parts:
            raise UsageError(f"two splits would both be called {name!r}: give them different --split-names")
        parts[name] = _even(table.filter(pc.equal(table["split"], split)), split, per_image)
        check_there(dataset, places_of(parts[name][0]), what=f"split {split!r}")
        if name == "dev" and parts[name][1].num_rows < _DEV_CAPTIONS:
            note(
                f"split 'dev' has {parts[name][1].num_rows:,} captions: the loaders of VSE++ and SCAN set its length to "
                f"{_DEV_CAPTIONS:,} and fail behind the last one, change that line of their data.py"
            )
    names = [f"{name}_{end}" for name in parts for end in ("ims.npy", "caps.txt", "ids.txt")]
    with staging.files(names) as files:
        for number, (image_ids, chosen) in enumerate(parts.values()):
            images, lines, ids = files[3 * number : 3 * number + 3]
            write_array(images, dataset, column, places_of(image_ids), dtype="float32", l2=l2, meter=meter)
            with lines.open("w", encoding="utf-8", newline="\n") as file:
                for chunk in _lines(chosen, text).chunks:
                    file.writelines(f"{line}\n" for line in chunk.to_pylist())
            write_ids(ids, image_ids)
    return staging.paths(names)
