"""Images in several splits, found by a plain loop over rows."""

import pytest

from schemas.dataset import open_dataset
from schemas.overlaps import leakage_remark
from tests.builders import write_rows


def rows_of(splits: dict[str, str]) -> list[dict]:
    return [
        {"image_id": image, "language": "en", "portion": "p", "index": n, "split": split, "text": "a b", "tokens": ["a", "b"]}
        for image, names in splits.items()
        for n, split in enumerate(names.split())
    ]


@pytest.mark.parametrize("shards", [1, 3])
def test_leakage_remark_counts_images_and_names_the_first(tmp_path, shards):
    splits = {f"i{n}": "train" for n in range(9)} | {"i3": "train val test", "i1": "val train train", "i8": "val test"}
    splits |= {"i7": "test_2016 test_2016_flickr", "i2": "train test", "i5": "train test"}
    write_rows(tmp_path / "c", "captions", rows_of(splits), parameters={}, shards=shards)
    dataset = open_dataset(tmp_path / "c")
    assert leakage_remark(dataset).startswith(
        "5 images have captions in several splits (2 in test, train; 1 in test, train, val; 1 in test, val; 1 in train, val): "
        "i1, i2, i3, ...."
    )
    assert leakage_remark(dataset, lambda names: "other" in names) == ""
    assert leakage_remark(dataset, lambda names: {"test", "train"} <= names).startswith(
        "3 images have captions in several splits (2 in test, train; 1 in test, train, val): i2, i3, i5. "
    )
