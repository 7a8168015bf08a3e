from __future__ import annotations

import pickle

import pytest

from pipelines.features.ref_chunks import chunk_refs, from_chunks
from pipelines.inputs.images.base import ImageRef
from schemas.keys import shard_of

SHARDS = 7


def reference(number: int) -> ImageRef:
    name = f"année/{number:06d}-猫"
    return ImageRef(name, f"{name}.jpg", 10_000 + number, number % 3 - 1, f"{1_700_000_000 + number}.5" if number % 2 else "")


@pytest.fixture(params=[True, False], ids=["file", "bytes"])
def folder(request, tmp_path) -> str | None:
    return str(tmp_path) if request.param else None


@pytest.mark.cluster
@pytest.mark.parametrize("count", [0, 1, 100, 140_000])
def test_each_shard_gets_its_references_in_their_order(folder, count):
    refs = [reference(number) for number in range(count)]
    by_shard: dict[int, list] = {}
    for shard, piece in chunk_refs(iter(refs), SHARDS, folder=folder):
        by_shard.setdefault(shard, []).append(pickle.loads(pickle.dumps(piece)))  # Workers are other processes.
    found = {shard: from_chunks(pieces)[0] for shard, pieces in by_shard.items()}
    expected: dict[int, list[ImageRef]] = {}
    for ref in refs:
        expected.setdefault(shard_of(ref.image_id, SHARDS), []).append(ref)
    assert found == expected
    assert from_chunks([]) == ([], [])


def test_finished_shards_are_left_out(folder):
    refs = [reference(number) for number in range(200)]
    found = {shard for shard, _ in chunk_refs(refs, SHARDS, skip_shards=frozenset({0, 5}), folder=folder)}
    assert found == {1, 2, 3, 4, 6}
