"""Copies of images that lie in row groups: every row group is read once, and every image has its own bytes."""

from __future__ import annotations

import shutil
from collections import Counter
from contextlib import suppress
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.inputs.images import staged_images
from pipelines.inputs.images.opening import open_images
from pipelines.inputs.images.staged_images import StagedImages, StagingArea
from schemas.storage.folder import Folder

ROWS = 35
VALUES = {
    f"{name}{row:02d}": None if row == 7 else f"{name}{row}".encode() * (50 + row) for name in "ab" for row in range(ROWS)
}


@pytest.fixture
def source(tmp_path):
    """Two files of four row groups each."""
    for name in "ab":
        chosen = {key: value for key, value in VALUES.items() if key.startswith(name)}
        columns = {"image_id": list(chosen), "image": pa.array(list(chosen.values()), pa.binary())}
        (tmp_path / "in").mkdir(exist_ok=True)
        pq.write_table(pa.table(columns), tmp_path / "in" / f"{name}.parquet", row_group_size=10)
    return open_images(tmp_path / "in")


def copied(source, place) -> StagedImages:
    staged = {copy.uri: copy for copy in place.write(source, source.refs())}
    return StagedImages(source.folder, source.pattern, source.ids, staging=place.folder, staged=staged)


def values_of(images) -> dict[str, bytes | None]:
    """Read the images; those that cannot be read are None."""
    found = {}
    for ref in reversed(list(images.refs())):
        found[ref.image_id] = None
        with suppress(OSError):
            found[ref.image_id] = images.read(ref)
    return found


@pytest.mark.parametrize("size", [1, 4000, 1 << 20])
def test_staging_reads_each_row_group_once(source, read, tmp_path, monkeypatch, size):
    monkeypatch.setattr(staged_images, "_FILE_BYTES", size)
    place = StagingArea.of_run(Folder(str(tmp_path / "out")))
    images = copied(source, place)
    assert values_of(images) == values_of(source) == VALUES
    refs = list(source.refs())
    assert images.in_reading_order(refs) is refs
    with pytest.raises(OSError, match="the row holds no image"):
        images.read(refs[7])
    before = Counter({(f"{name}.parquet", group): 1 for name in "ab" for group in range(4)})
    assert read == before + before  # Once for the copies, and once for the truth.
    files = sorted((tmp_path / "out").iterdir())
    assert len(files) == {1: 8, 4000: 3, 1 << 20: 1}[size]
    assert sum(file.stat().st_size for file in files) == sum(len(value or b"") for value in VALUES.values())
    StagingArea.of_run(place.folder).delete()
    assert sorted((tmp_path / "out").iterdir()) == files
    place.delete()
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("damage", ["gone", "short"])
def test_read_without_intact_staged_file_reads_the_source(source, tmp_path, damage):
    place = StagingArea.of_run(Folder(str(tmp_path / "out")))
    images = copied(source, place)
    for file in (tmp_path / "out").iterdir():
        if damage == "gone":
            file.unlink()
        else:
            file.write_bytes(file.read_bytes()[:1000])
    assert values_of(images) == VALUES


def test_staging_skips_unreadable_images(source, tmp_path):
    refs = list(source.refs())
    source.refs()  # Drops what is known of the files.
    path = tmp_path / "in" / "a.parquet"
    path.write_bytes(path.read_bytes()[:-20] + bytes(20))
    place = StagingArea.of_run(Folder(str(tmp_path / "out")))
    places = {copy.uri: copy for copy in place.write(source, refs)}
    assert {uri[:9] for uri in places} == {"b.parquet"}
    images = StagedImages(source.folder, source.pattern, source.ids, staging=place.folder, staged=places)
    assert images.read(refs[-1]) == VALUES["b34"]
    assert [ref.uri for ref in images.in_reading_order(refs[::-1])] == [ref.uri for ref in refs]
    with pytest.raises(OSError, match="the Parquet file is broken, or was changed"):
        images.read(refs[0])


def test_staging_leaves_half_of_free_space(source, tmp_path, monkeypatch):
    size = sum(len(value or b"") for value in VALUES.values())
    monkeypatch.setattr(staged_images, "_FILE_BYTES", 1)

    def room(path):
        return SimpleNamespace(free=size - sum(file.stat().st_size for file in (tmp_path / "out").glob(".images-*.tmp-0")))

    monkeypatch.setattr(shutil, "disk_usage", room)
    place = StagingArea.of_run(Folder(str(tmp_path / "out")))
    images = copied(source, place)
    written = [file.stat().st_size for file in (tmp_path / "out").iterdir()]
    assert size * 0.3 < sum(written) <= size / 2
    assert values_of(images) == VALUES
