"""Leakage check: images with captions in several splits."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from schemas.dataset import Dataset

_NAMED = 3


@dataclass(frozen=True)
class Overlap:
    """Counts of images by splits, e.g. ``{("test", "train"): 3}``, and three ids."""

    counts: Mapping[tuple[str, ...], int]
    first: tuple[str, ...]

    @property
    def remark(self) -> str:
        """The overlap in one sentence."""
        images = sum(self.counts.values())
        by_splits = "; ".join(f"{count:,} in {', '.join(splits)}" for splits, count in sorted(self.counts.items()))
        names = ", ".join(self.first) + (", ..." if images > len(self.first) else "")
        return (
            f"{images:,} images have captions in several splits ({by_splits}): {names}. A model is then chosen or measured by "
            "images that it was trained on: put all captions of an image into one split"
        )


def _is_leak(splits: frozenset[str]) -> bool:
    return not all(split.startswith("test") for split in splits)


def find_overlap(dataset: Dataset, counts: Callable[[frozenset[str]], bool] = _is_leak) -> Overlap | None:
    """Find images with captions in several splits.

    Args:
        dataset: a dataset of kind ``captions`` or ``encoded``. All captions of an image are in one shard.
        counts: predicate of the splits of an image. By default images of test splits only do not count: Multi30K has its test
            images of 2016 under two names.
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
    return Overlap(images, tuple(first)) if images else None
