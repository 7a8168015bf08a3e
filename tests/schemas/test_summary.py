import json

import pytest

from schemas.manifest import Manifest, ShardEntry
from schemas.storage.folder import Folder
from schemas.writing.summary import SUMMARY_NAME, is_summarised, write_summary

LISTINGS, STATES = ("a" * 64, "b" * 64), ("c" * 64, "")


def manifest(size: int = 10) -> Manifest:
    shards = tuple(ShardEntry(f"part-0000{number}-of-00002.parquet", size, "d" * 64, 1) for number in range(2))
    return Manifest("features", "e" * 64, {}, (), {}, shards)


@pytest.fixture
def folder(tmp_path):
    folder = Folder(str(tmp_path))
    write_summary(folder, manifest(), LISTINGS, STATES, {})
    return folder


@pytest.mark.parametrize(
    ("size", "listings", "states", "expected"),
    [
        (10, LISTINGS, STATES, True),
        (10, list(LISTINGS), list(STATES), True),
        (10, None, None, True),
        (11, LISTINGS, STATES, False),
        (10, LISTINGS[::-1], STATES, False),
        (10, LISTINGS[:1], STATES, False),
        (10, LISTINGS, STATES[::-1], False),
    ],
)
def test_it_says_what_a_manifest_was_made_from(folder, size, listings, states, expected):
    assert is_summarised(folder, manifest(size), listings, states, {}) is expected


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"{}", b"\xff", b"1"])
def test_a_damaged_one_says_nothing(folder, data):
    folder.write(SUMMARY_NAME, data)
    assert not is_summarised(folder, manifest(), LISTINGS, STATES, {})


def test_none_says_nothing(tmp_path):
    assert not is_summarised(Folder(str(tmp_path)), manifest(), LISTINGS, STATES, {})


def test_it_does_not_grow_with_the_dataset(folder):
    write_summary(folder, manifest(), LISTINGS * 1000, STATES * 1000, {})
    assert json.loads(folder.read(SUMMARY_NAME)).keys() == {"manifest", "listings", "states", "tags"}
    assert folder.size(SUMMARY_NAME) < 500
