"""A listing on disk is the listing, and is gone with its last use."""

from pathlib import Path

from pipelines.inputs.images import ImageRef, KeptRefs, Listing, kept_refs

REFS = [ImageRef(f"ü{number}", f"a b/{number}.jpg", number, number % 3 - 1, str(10**18 + number)) for number in range(20_000)]


def test_references_come_back_as_they_were():
    kept = KeptRefs()
    assert list(kept.passing(REFS)) == REFS
    assert list(kept_refs(kept.path)) == REFS
    assert Path(kept.path).stat().st_size < 30 * len(REFS)


def test_the_file_is_deleted_with_its_last_use():
    kept = KeptRefs()
    list(kept.passing([]))
    assert list(kept_refs(kept.path)) == []
    listing = Listing(("1",), ("2",), ("3",), kept).folded(1)
    path = Path(kept.path)
    del kept
    assert path.exists()
    del listing
    assert not path.exists()
