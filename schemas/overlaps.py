"""Leakage check: images with captions in several splits."""

from collections import Counter
from collections.abc import Callable

import pyarrow as pa
import pyarrow.compute as pc

from schemas.dataset import Dataset

_NAMED = 3


def _is_leak(splits: frozenset[str]) -> bool:
    return not all(split.startswith("test") for split in splits)


def leakage_remark(dataset: Dataset, counts: Callable[[frozenset[str]], bool] = _is_leak) -> str:
    """Return a sentence about images in several splits, or an empty string.

    Args:
        dataset: a dataset of kind ``captions`` or ``encoded``. All captions of an image are in one shard.
        counts: predicate of the splits of an image. By default images of test splits only do not count:
            Multi30K has its test images of 2016 under two names.
    """
    images: Counter[tuple[str, ...]] = Counter()
    first: list[str] = []
    for table in dataset.shards(["image_id", "split"]):
        plain = pa.table({name: table[name].cast(pa.string()) for name in ("image_id", "split")})
        by_image = plain.group_by("image_id", use_threads=False).aggregate([("split", "distinct")])
        several = by_image.filter(pc.greater(pc.list_value_length(by_image["split_distinct"]), 1))
        for image_id, splits in zip(several["image_id"].to_pylist(), several["split_distinct"].to_pylist(), strict=True):
            if counts(frozenset(splits)):
                images[tuple(sorted(splits))] += 1
                first = sorted([*first, image_id])[:_NAMED]
    if not images:
        return ""
    by_splits = "; ".join(f"{count:,} in {', '.join(splits)}" for splits, count in sorted(images.items()))
    names = ", ".join(first) + (", ..." if images.total() > len(first) else "")
    return (
        f"{images.total():,} images have captions in several splits ({by_splits}): {names}. A model is then "
        "chosen or measured by images that it was trained on: put all captions of an image into one split"
    )
