"""The digests of a listing, and the list on disk, which is the listing and is gone with its last use."""

from __future__ import annotations

import hashlib
import pickle
import random
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipelines.inputs.images import listing
from pipelines.inputs.images.base import ImageRef
from pipelines.inputs.images.listing import CachedListing, Listing, ListingPart, sum_digests
from schemas.errors import InputError
from schemas.storage.folder import Folder


def test_listing_digest_equals_a_plain_sum():
    generator = random.Random(5)
    refs = [
        ImageRef(f"id{n}", f"uri{generator.random()}", generator.randrange(-1, 1000), version=f"v{generator.random()}")
        for n in range(200)
    ]
    totals, states, counts = [0] * 5, [0] * 5, [0] * 5
    for ref in refs:
        data = ref.image_id.encode() + b"\0" + ref.uri.encode() + b"\0" + str(ref.bytes).encode()
        shard = int(hashlib.blake2b(ref.image_id.encode()).hexdigest(), 16) % 5
        totals[shard] += int(hashlib.sha256(data).hexdigest(), 16)
        states[shard] += int(hashlib.sha256(data + b"\0" + ref.version.encode()).hexdigest(), 16)
        counts[shard] += 1
    digests = [tuple(hex(total % 2**256)[2:].zfill(64) for total in sums) for sums in (totals, states)]
    expected = Listing(tuple(counts), *digests)
    assert Listing.of(iter(refs), 5) == expected
    generator.shuffle(refs)
    assert Listing.of(iter(refs), 5) == expected
    assert sum_digests(expected.shards) == Listing.of(iter(refs), 1).shards[0]


@pytest.mark.parametrize("shards", [1, 3, 12])
def test_folded_to_a_divisor_equals_a_new_listing(shards):
    refs = [ImageRef(f"id{n}", f"uri{n}", n, version=f"v{n}") for n in range(100)]
    assert Listing.of(refs, 12).folded(shards) == Listing.of(refs, shards)


REFS = [ImageRef(f"ü{number}", f"a b/{number}.jpg", number, number % 3 - 1, str(10**18 + number)) for number in range(20_000)]


def test_cached_listing_round_trip():
    kept = CachedListing()
    assert list(kept.tee(REFS)) == REFS
    (part,) = kept.parts()
    assert list(part.refs(SOURCE)) == REFS
    assert Path(kept.path).stat().st_size < 30 * len(REFS)


def test_cached_listing_deletes_its_file():
    kept = CachedListing()
    list(kept.tee([]))
    assert kept.parts() == ()
    listing = Listing((1,), ("2",), ("3",), kept).folded(1)
    path = Path(kept.path)
    del kept
    assert path.exists()
    del listing
    assert not path.exists()


@pytest.fixture
def shared(tmp_path) -> ListingPart:
    """A listing in a folder of other files, when the machine that made it is gone."""
    kept = CachedListing()
    list(kept.tee(REFS))
    (part,) = pickle.loads(pickle.dumps(kept.share(Folder(str(tmp_path)))))
    return part


SOURCE = SimpleNamespace(refs=lambda: iter(REFS[:1]))
"""Has changed since."""


@pytest.mark.slow
def test_shared_listing_round_trip(shared, tmp_path):
    assert list(shared.refs(SOURCE)) == REFS
    (path,) = tmp_path.iterdir()
    assert re.fullmatch(r"\.listing-[0-9a-f]{16}\.tmp-0", path.name)
    assert shared == ListingPart(Folder(str(tmp_path)), path.name, 0, path.stat().st_size, shared.sha256, is_whole=True)


@pytest.mark.parametrize("damage", [lambda data: None, lambda data: data[:-1], lambda data: b"x" + data[1:], lambda data: b""])
def test_shared_listing_missing_or_changed_lists_again(shared, tmp_path, damage):
    (path,) = tmp_path.iterdir()
    data = damage(path.read_bytes())
    path.unlink()
    if data is not None:
        path.write_bytes(data)
    assert list(shared.refs(SOURCE)) == REFS[:1]


def test_parts_of_a_listing_are_read_separately(tmp_path, monkeypatch):
    monkeypatch.setattr(listing, "_PART_REFS", 9000)
    kept = CachedListing()
    assert list(kept.tee(REFS)) == REFS
    parts = kept.share(Folder(str(tmp_path)))
    assert [list(part.refs(SOURCE)) for part in parts] == [REFS[:9000], REFS[9000:18_000], REFS[18_000:]]
    (path,) = tmp_path.iterdir()
    data = path.read_bytes()
    path.write_bytes(data[:-1] + b"x")
    assert list(parts[0].refs(SOURCE)) == REFS[:9000]
    for damage in (lambda: None, path.unlink):
        damage()
        with pytest.raises(InputError, match=r"the listing of this run, is missing or changed.*Run the same command again"):
            list(parts[2].refs(SOURCE))
