from __future__ import annotations

import random
import re
import tempfile
from collections import Counter, defaultdict

import numpy as np
import pyarrow as pa
import pytest

from pipelines.text import merge_sort
from pipelines.text.caption_shards import BLOCK_SCHEMA
from pipelines.text.merge_sort import (
    make_sorted_runs,
    merge_runs,
    number_captions,
    partition_captions,
    read_run,
    row_key,
    spill_to_disk,
)
from schemas.errors import InputError
from schemas.keys import shard_of
from tests.pipelines.text.captions import block, caption, random_captions, sort_captions


def key(row: dict) -> tuple:
    return tuple(row[name] for name in ("image_id", "language", "portion", "index", "position"))


# --- partitions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3, 50])
@pytest.mark.parametrize("size", [1, 1000, 1 << 20])
def test_partition_captions_equals_a_plain_loop(monkeypatch, shards, size):
    monkeypatch.setattr(merge_sort, "RUN_BYTES", size)
    table = block(*random_captions(3))
    expected: dict[int, list[dict]] = defaultdict(list)
    for row in sorted(table.to_pylist(), key=key):
        expected[shard_of(row["image_id"], shards)].append(row)
    found: dict[int, list[dict]] = defaultdict(list)
    numbers = []
    for number, rows in partition_captions(table, shards):
        assert rows.num_rows == 1 or rows.nbytes <= 1.5 * size
        assert row_key(rows) == key(rows.to_pylist()[0])
        found[number] += rows.to_pylist()
        numbers.append(number)
    assert found == expected
    assert numbers == sorted(numbers)
    assert len(numbers) == {1: 300, 1 << 20: len(expected)}.get(size, len(numbers))


# --- order and numbers -----------------------------------------------------------------------------------------------


def brute_sort(blocks: list[pa.Table]) -> list[dict]:
    """Numbers captions in the order of their positions, then sorts them by key."""
    rows = sorted((row for table in blocks for row in table.to_pylist()), key=lambda row: row["position"])
    seen: Counter = Counter()
    for row in rows:
        group = row["image_id"], row["language"], row["portion"]
        if row["index"] < 0:
            row["index"] = seen[group]
            seen[group] += 1
    return sorted(rows, key=lambda row: (row["image_id"], row["language"], row["portion"], row["index"]))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("size", [1, 2000, 1 << 20])
def test_number_captions_follows_source_order_for_any_block_order(monkeypatch, seed, size):
    monkeypatch.setattr(merge_sort, "RUN_BYTES", 700)
    monkeypatch.setattr(merge_sort, "MERGED_BYTES", size)
    generator = random.Random(seed)
    captions = random_captions(seed)
    blocks = [block(*captions[start : start + 50], part=start // 50) for start in range(0, 300, 50)]
    expected = brute_sort(blocks)
    generator.shuffle(blocks)
    assert sort_captions(blocks).to_pylist() == expected


def test_number_captions_keeps_indices_of_the_source():
    captions = [caption(index=index, text=str(index)) for index in (7, 0, 32767)]
    captions += [caption(index=0, language="de"), caption(index=0, portion="comparable"), caption(index=0, image_id="b")]
    rows = sort_captions([block(*captions)]).to_pylist()
    assert [tuple(row.values())[:-1] for row in rows] == sorted(captions)


def test_merge_runs_orders_keys_by_code_point(monkeypatch):
    monkeypatch.setattr(merge_sort, "MERGED_BYTES", 1)
    names = ["é", "z", "Z", "a", "ab", "a-b", "\U0001f600", "\uffff", "10", "9"]
    table = sort_captions([block(*(caption(image_id=name) for name in names[part::3]), part=part) for part in range(3)])
    assert table["image_id"].to_pylist() == sorted(names)


@pytest.mark.parametrize("size", [1, 1 << 20])
@pytest.mark.parametrize("apart", [False, True])
def test_number_captions_names_both_captions_of_a_duplicate_key(monkeypatch, apart, size):
    monkeypatch.setattr(merge_sort, "MERGED_BYTES", size)
    first, second = caption(index=4, text="one"), caption(index=4, text="two", split="val")
    blocks = [block(first, part=0), block(second, part=1)] if apart else [block(first, second)]
    message = (
        r"caption key 'a/en/translation/4' \(image_id/language/portion/index\) occurs twice: 'one' in split 'train' and 'two' "
        r"in split 'val'. Remove one of them, or leave out the index so that"
    )
    with pytest.raises(InputError, match=message):
        sort_captions([block(caption(image_id="b", index=0), part=2), *blocks])


@pytest.mark.parametrize("size", [1, 1 << 20])
def test_number_captions_refuses_partial_indices(monkeypatch, size):
    monkeypatch.setattr(merge_sort, "MERGED_BYTES", size)
    message = "some captions have an index and some have none: give every caption an index, or none"
    with pytest.raises(InputError, match=message):
        sort_captions([block(caption(), caption()), block(caption(image_id="b", index=0), part=1)])


@pytest.mark.parametrize("step", [1000, 40_000])
def test_number_captions_refuses_more_captions_than_int16(step):
    many = 32_769
    columns = [["a"] * many, ["en"] * many, ["p"] * many, [-1] * many, ["s"] * many, ["t"] * many, range(many)]
    table = pa.table(dict(zip(BLOCK_SCHEMA.names, columns, strict=True)), schema=BLOCK_SCHEMA)
    tables = [table.slice(start, step) for start in range(0, many, step)]
    message = r"^image 'a' has more than 32,768 captions of portion 'p' in language 'en': .*16-bit.* Remove some of them$"
    with pytest.raises(InputError, match=message):
        list(number_captions(tables))
    tables[-1] = tables[-1].slice(0, tables[-1].num_rows - 1)
    *_, last = number_captions(filter(len, tables))
    assert last["index"].to_pylist()[-1] == 32767


@pytest.fixture
def blocks() -> list[pa.Table]:
    return [block(*random_captions(seed, 40), part=seed) for seed in range(6)]


def rows_by_shard(made) -> dict[int, list[dict]]:
    found = defaultdict(list)
    for number, piece in made:
        rows = read_run(piece)
        assert piece[0] == row_key(rows)
        found[number] += rows.to_pylist()
    return {number: sorted(rows, key=lambda row: row["position"]) for number, rows in found.items()}


@pytest.mark.parametrize("on_a_disk", [False, True])
@pytest.mark.parametrize(("gathered", "files"), [(1, 6), (1 << 20, 1)])
def test_make_sorted_runs_equals_a_plain_loop(blocks, monkeypatch, tmp_path, on_a_disk, gathered, files):
    monkeypatch.setattr(merge_sort, "GATHERED_BYTES", gathered)
    monkeypatch.setattr(merge_sort, "RUN_BYTES", 600)
    made = list(make_sorted_runs(iter(blocks), 3, skip_shards=frozenset({1}), folder=str(tmp_path) if on_a_disk else None))
    expected = defaultdict(list)
    for table in blocks:
        for row in table.to_pylist():
            expected[shard_of(row["image_id"], 3)].append(row)
    del expected[1]
    assert rows_by_shard(made) == expected
    assert len(list(tmp_path.iterdir())) == (files if on_a_disk else 0)
    assert all(re.fullmatch(r"\.captions-[0-9a-f]+\.tmp-\d+", path.name) for path in tmp_path.iterdir())


def test_spill_to_disk_deletes_its_file(blocks, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "p").mkdir()
    in_memory = [run for _, run in make_sorted_runs(blocks[:3], 1)]
    in_files = [run for _, run in make_sorted_runs(blocks[3:], 1, folder=str(tmp_path / "p"))]
    with spill_to_disk(iter([*in_memory, *in_files])) as spilled:
        assert [first for first, _ in spilled] == [first for first, _ in (*in_memory, *in_files)]
        assert not any(isinstance(content, bytes) for _, content in spilled)
        assert list(map(read_run, spilled)) == [read_run(run) for run in (*in_memory, *in_files)]
        assert spilled[len(in_memory) :] == in_files
    assert [path.name for path in tmp_path.iterdir()] == ["p"]


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def arrow_peak():
    """Function for the peak of Arrow's memory since the test began, in bytes."""
    old, pool = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
    pa.set_memory_pool(pool)
    yield pool.max_memory
    pa.set_memory_pool(old)


@pytest.mark.slow
@pytest.mark.parametrize("in_memory", [True, False])
def test_merge_sort_of_a_large_shard_bounds_memory(tmp_path, monkeypatch, arrow_peak, in_memory):
    """48 MiB of captions in one shard: Arrow's peak is below a quarter."""
    monkeypatch.setattr(merge_sort, "GATHERED_BYTES", 2 << 20)
    monkeypatch.setattr(merge_sort, "MERGED_BYTES", 1 << 20)
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

    runs = (run for _, run in make_sorted_runs(unsorted(), 1, folder=None if in_memory else str(tmp_path)))
    with spill_to_disk(runs) as spilled:
        assert sum(table.num_rows for table in number_captions(merge_runs(spilled))) == blocks * rows
    assert size > 48 << 20
    assert arrow_peak() < size / 4
