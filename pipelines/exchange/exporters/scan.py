"""Exporter to the ``*_precomp`` layout of VSE++ (fartashf/vsepp) and SCAN.

Their loaders read ``SPLIT_caps.txt``, one caption per line, and ``SPLIT_ims.npy``. Caption ``i`` describes
row ``i // 5``, or row ``i`` if both have the same length. Some also read ``SPLIT_ids.txt``, the id of each
row, which most convert to a number. They always take the first 5,000 captions of ``dev``.
"""

from itertools import accumulate, groupby

import pyarrow as pa
import pyarrow.compute as pc

from pipelines.exchange.exporters.arrays import check_images, feature_column, rows_of, write_array, write_ids, write_lines
from pipelines.exchange.exporters.base import Staging, options_for, read_selected_captions
from pipelines.exchange.jobs import ExportJob
from schemas.dataset import Dataset
from schemas.errors import DatasetError, UsageError

_DEV_CAPTIONS = 5000


def write_scan(job: ExportJob, dataset: Dataset, staging: Staging) -> None:
    """Write ``SPLIT_ims.npy`` (float32), ``SPLIT_caps.txt`` and ``SPLIT_ids.txt``.

    Images are sorted by id, features have the shape ``[D]`` or ``[R, D]``. The captions must be of one language and portion.
    """
    column = feature_column(dataset)
    parts = _captions_by_split(job, dataset, staging)
    names = [f"{name}_{ending}" for name in parts for ending in ("ims.npy", "caps.txt", "ids.txt")]
    listed = {image_id for image_ids, _ in parts.values() for image_id in image_ids}
    options = {f"{name}_ims.npy": options_for(listed, ids=f"{name}_ids.txt") for name in parts}
    with staging.files(names, options=options) as files:
        for index, (image_ids, texts) in enumerate(parts.values()):
            images, lines, ids = files[3 * index : 3 * index + 3]
            write_array(images, dataset, [column], rows_of(image_ids), dtype="float32", l2=job.l2, meter=staging.meter)
            write_lines(lines, (line for chunk in texts.chunks for line in chunk.to_pylist()))
            write_ids(ids, image_ids)


def _captions_by_split(job: ExportJob, dataset: Dataset, staging: Staging) -> dict[str, tuple[list[str], pa.ChunkedArray]]:
    """Return image ids and caption lines by the layout's name of each split."""
    table = read_selected_captions(job, job.text, unique=("language", "portion"))
    parts: dict[str, tuple[list[str], pa.ChunkedArray]] = {}
    for split in sorted(pc.unique(table["split"]).to_pylist()):
        name = job.split_names.get(split, split)
        if name in parts:
            raise UsageError(f"two splits would both be called {name!r}: give them different --split-names")
        if "/" in name or "\0" in name:
            raise UsageError(f"split {name!r} cannot be part of a file name: choose others with --splits")
        image_ids, captions = _even(table.filter(pc.equal(table["split"], split)), split, job.captions_per_image)
        check_images(dataset, image_ids, wanted_by=f"split {split!r}", advice="choose other splits with --splits")
        if name == "dev" and captions.num_rows < _DEV_CAPTIONS:
            staging.on_warning(
                f"split 'dev' has {captions.num_rows:,} captions: the loaders of VSE++ and SCAN set its length to "
                f"{_DEV_CAPTIONS:,} and fail behind the last one, change that line of their data.py"
            )
        texts = captions[job.text]
        if job.text == "tokens":
            texts = pc.binary_join(texts.cast(pa.list_(pa.string())), " ")
        elif broken := pc.sum(pc.match_substring_regex(texts, r"[\r\n]")).as_py():
            staging.on_warning(
                f"{broken:,} captions of split {split!r} hold line ends, which became spaces: this layout has one per line"
            )
            texts = pc.replace_substring_regex(texts, r"\s*[\r\n]+\s*", " ")
        parts[name] = image_ids, texts
    return parts


def _even(captions: pa.Table, split: str, per_image: int) -> tuple[list[str], pa.Table]:
    """Return the images, sorted by id, and the same number of captions of each.

    Raises:
        DatasetError: images have different numbers of captions.
        UsageError: the loaders do not support that number.
    """
    counts = {image_id: len(list(group)) for image_id, group in groupby(captions["image_id"].to_pylist())}
    min_count, max_count = min(counts.values()), max(counts.values())
    advice = f"give --captions-per-image {5 if min_count >= 5 else 1}"
    if per_image > min_count or (not per_image and min_count != max_count):
        image_id = min(counts, key=counts.__getitem__)
        needed = f"{per_image} of each" if per_image else "the same number"
        raise DatasetError(
            f"the images of split {split!r} have {min_count} to {max_count} captions, image {image_id!r} has {min_count}: this "
            f"layout needs {needed}; {advice} to take the first of each"
        )
    if per_image and max_count > per_image:
        starts = [0, *accumulate(counts.values())]
        captions = captions.take([start + n for start in starts[:-1] for n in range(per_image)])
    count = per_image or max_count
    if count not in (1, 5):
        raise UsageError(
            f"the images of split {split!r} have {count} captions each, but the loaders of this layout take 5, or 1: {advice}"
        )
    return list(counts), captions
