import re
import tempfile
from collections import defaultdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from pipelines.running.places import from_ipc, read_place, staging, to_ipc
from pipelines.text import ordering, pieces
from pipelines.text.blocks import BLOCK
from pipelines.text.ordering import first_key, number_captions
from pipelines.text.pieces import make_pieces, on_disk, read_piece
from schemas.errors import DatasetError
from schemas.keys import shard_of
from schemas.storage.folder import Folder
from tests.pipelines.text.captions import block, caption, random_captions


@pytest.fixture
def blocks() -> list[pa.Table]:
    return [block(*random_captions(seed, 40), part=seed) for seed in range(6)]


def rows_by_shard(made) -> dict[int, list[dict]]:
    found = defaultdict(list)
    for number, piece in made:
        rows = read_piece(piece)
        assert piece[0] == first_key(rows)
        found[number] += rows.to_pylist()
    return {number: sorted(rows, key=lambda row: row["position"]) for number, rows in found.items()}


def test_a_table_survives_serialization():
    table = block(*random_captions(2))
    assert from_ipc(to_ipc(table)).equals(table)
    assert from_ipc(to_ipc(BLOCK.empty_table())).equals(BLOCK.empty_table())
    sliced = table.slice(5, 10)
    assert from_ipc(to_ipc(sliced)).equals(sliced)
    assert len(to_ipc(sliced)) < len(to_ipc(table))


@pytest.mark.parametrize("on_a_disk", [False, True])
@pytest.mark.parametrize(("gathered", "files"), [(1, 6), (1 << 20, 1)])
def test_pieces_hold_all_captions_of_their_shards(blocks, monkeypatch, tmp_path, on_a_disk, gathered, files):
    monkeypatch.setattr(pieces, "GATHERED_BYTES", gathered)
    monkeypatch.setattr(ordering, "PIECE_BYTES", 600)
    made = list(make_pieces(iter(blocks), 3, left_out=frozenset({1}), folder=str(tmp_path) if on_a_disk else None))
    expected = defaultdict(list)
    for table in blocks:
        for row in table.to_pylist():
            expected[shard_of(row["image_id"], 3)].append(row)
    del expected[1]
    assert rows_by_shard(made) == expected
    assert len(list(tmp_path.iterdir())) == (files if on_a_disk else 0)
    assert all(re.fullmatch(r"\.captions-[0-9a-f]+\.tmp-\d+", path.name) for path in tmp_path.iterdir())


def test_only_places_travel_where_the_pieces_are_on_a_disk(blocks, tmp_path):
    for _, (_, place) in make_pieces(blocks, 3, folder=str(tmp_path)):
        path, offset, length = place
        assert Path(path).parent == tmp_path
        assert 0 <= offset < offset + length <= Path(path).stat().st_size


def test_blocks_are_gathered_as_a_stream(monkeypatch, tmp_path):
    monkeypatch.setattr(pieces, "GATHERED_BYTES", 1000)

    def endless():
        while True:
            yield block(*random_captions(1, 20))

    for folder in (None, str(tmp_path)):
        assert read_piece(next(make_pieces(endless(), 2, folder=folder))[1]).num_rows > 0


def test_a_folder_that_cannot_be_written_is_an_error(blocks, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DatasetError, match=r"file/\.captions-.*a part of the path is a file"):
        list(make_pieces(blocks, 2, folder=str(tmp_path / "file")))


def test_bytes_are_put_on_disk_as_long_as_they_are_needed(blocks, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "p").mkdir()
    passed = [piece for _, piece in make_pieces(blocks[:3], 1)]
    placed = [piece for _, piece in make_pieces(blocks[3:], 1, folder=str(tmp_path / "p"))]
    with on_disk(iter([*passed, *placed])) as places:
        assert [first for first, _ in places] == [first for first, _ in (*passed, *placed)]
        assert [read_place(place) for _, place in places] == [read_piece(piece) for piece in (*passed, *placed)]
        assert [place for _, place in places[len(passed) :]] == [place for _, place in placed]
    assert [path.name for path in tmp_path.iterdir()] == ["p"]


# --- where pieces are put ----------------------------------------------------------------------------------------------


def test_pieces_of_a_local_dataset_lie_beside_its_shards(tmp_path):
    with staging(Folder(str(tmp_path))) as folder:
        assert Path(folder) == tmp_path
    assert list(tmp_path.iterdir()) == []


def test_pieces_of_a_dataset_in_a_store_lie_in_a_temporary_folder(blocks, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with staging(Folder("s3://bucket/a")) as folder, staging(Folder("s3://bucket/b")) as other:
        assert Path(folder).parent == Path(other).parent == tmp_path
        assert folder != other
        list(make_pieces(blocks, 2, folder=folder))
        with (
            pytest.raises(DatasetError, match="is in use: another run is writing it"),
            staging(Folder("s3://bucket/a")),
        ):
            pass
        assert len(list(Path(folder).glob(".captions-*"))) == 1
    assert list(tmp_path.iterdir()) == []


def test_pieces_that_a_killed_run_left_are_deleted_by_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with staging(Folder("s3://bucket/a")) as folder:
        name = folder
    Path(name).mkdir()
    (Path(name) / ".captions-0a.tmp-1").write_bytes(b"left")
    with staging(Folder("s3://bucket/a")) as folder:
        assert folder == name
        assert list(Path(folder).glob(".captions-*")) == []
    assert list(tmp_path.iterdir()) == []


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def arrow_peak():
    """Returns the most bytes that Arrow has held at once since the test began."""
    old, pool = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
    pa.set_memory_pool(pool)
    yield pool.max_memory
    pa.set_memory_pool(old)


@pytest.mark.slow
@pytest.mark.parametrize("passed_on", [True, False], ids=["bytes", "places"])
def test_a_shard_that_is_larger_than_memory_is_sorted_on_disk(tmp_path, monkeypatch, arrow_peak, passed_on):
    """48 MiB of captions in random order become one shard, and memory holds a quarter of them at most."""
    monkeypatch.setattr(pieces, "GATHERED_BYTES", 2 << 20)
    monkeypatch.setattr(ordering, "MERGED_BYTES", 1 << 20)
    generator = np.random.default_rng(3)
    blocks, size, rows = 96, 0, 500

    def unsorted():
        nonlocal size
        for number in range(blocks):
            ids = [f"image{n:07d}" for n in generator.integers(0, 10**7, rows)]
            captions = [caption(image_id=image_id, text="word " * 220) for image_id in ids]
            table = block(*captions, part=number)
            size += table.nbytes
            yield table

    made = (piece for _, piece in make_pieces(unsorted(), 1, folder=None if passed_on else str(tmp_path)))
    last, count = "", 0
    with on_disk(made) as places:
        for table in number_captions(ordering.merge(places, read_place)):
            ids = table["image_id"].to_pylist()
            assert ids == sorted(ids)
            assert last <= ids[0]
            last, count = ids[-1], count + len(ids)
    assert count == blocks * rows
    assert size > 48 << 20
    assert arrow_peak() < size / 4
