"""A listing on disk is the listing, and is gone with its last use."""

import pickle
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipelines.inputs.images import ImageRef, KeptRefs, Listing, SharedRefs, kept_refs
from schemas.storage.folder import Folder

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


@pytest.fixture
def shared(tmp_path) -> SharedRefs:
    """A listing in a folder of other files, when the machine that made it is gone."""
    kept = KeptRefs()
    list(kept.passing(REFS))
    return pickle.loads(pickle.dumps(kept.share(Folder(str(tmp_path)))))


SOURCE = SimpleNamespace(refs=lambda: iter(REFS[:1]))
"""Has changed since."""


@pytest.mark.slow
def test_another_machine_takes_the_listing(shared, tmp_path):
    assert list(shared.refs(SOURCE)) == REFS
    (path,) = tmp_path.iterdir()
    assert re.fullmatch(r"\.listing-[0-9a-f]{16}\.tmp-0", path.name)
    assert shared == SharedRefs(Folder(str(tmp_path)), path.name, shared.sha256)


@pytest.mark.parametrize("damage", [lambda data: None, lambda data: data[:-1], lambda data: b"x" + data[1:], lambda data: b""])
def test_a_listing_that_is_gone_or_another_one_is_made_again(shared, tmp_path, damage):
    (path,) = tmp_path.iterdir()
    data = damage(path.read_bytes())
    path.unlink()
    if data is not None:
        path.write_bytes(data)
    assert list(shared.refs(SOURCE)) == REFS[:1]
