import random
from collections import Counter, defaultdict

import pyarrow as pa
import pytest

from pipelines.text import ordering
from pipelines.text.blocks import BLOCK
from pipelines.text.ordering import cut, first_key, merge, number_captions
from schemas.errors import InputError
from schemas.keys import shard_of
from tests.pipelines.text.captions import block, caption, random_captions, sort_captions


def key(row: dict) -> tuple:
    return tuple(row[name] for name in ("image_id", "language", "portion", "index", "position"))


# --- cutting ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3, 50])
@pytest.mark.parametrize("size", [1, 1000, 1 << 20])
def test_rows_are_cut_by_the_shard_of_the_image_and_sorted(monkeypatch, shards, size):
    monkeypatch.setattr(ordering, "PIECE_BYTES", size)
    table = block(*random_captions(3))
    expected: dict[int, list[dict]] = defaultdict(list)
    for row in sorted(table.to_pylist(), key=key):
        expected[shard_of(row["image_id"], shards)].append(row)
    found: dict[int, list[dict]] = defaultdict(list)
    numbers = []
    for number, rows in cut(table, shards):
        assert rows.num_rows == 1 or rows.nbytes <= 1.5 * size
        assert first_key(rows) == key(rows.to_pylist()[0])
        found[number] += rows.to_pylist()
        numbers.append(number)
    assert found == expected
    assert numbers == sorted(numbers)
    assert len(numbers) == {1: 300, 1 << 20: len(expected)}.get(size, len(numbers))


def test_the_number_of_pieces_hardly_grows_with_that_of_shards(monkeypatch):
    monkeypatch.setattr(ordering, "PIECE_BYTES", 1000)
    table = block(*(caption(image_id=f"img{n}", text="a dog runs " * 3) for n in range(3000)))
    few, many = (len(list(cut(table, shards))) for shards in (1, 50))
    assert few > 100
    assert many <= few + 50


def test_shards_that_are_left_out_have_no_pieces():
    table = block(*random_captions(4))
    numbers = {number for number, _ in cut(table, 5)}
    assert {number for number, _ in cut(table, 5, frozenset({0, 3}))} == numbers - {0, 3}
    assert list(cut(table, 5, frozenset(range(5)))) == []
    assert list(cut(BLOCK.empty_table(), 5)) == []


# --- merging ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("size", [1, 2000, 1 << 20])
def test_pieces_in_any_order_are_merged(monkeypatch, seed, size):
    monkeypatch.setattr(ordering, "PIECE_BYTES", 700)
    monkeypatch.setattr(ordering, "MERGED_BYTES", size)
    blocks = [block(*random_captions(10 * seed + part, 60), part=part) for part in range(6)]
    pieces = [(first_key(rows), rows) for table in blocks for _, rows in cut(table, 1)]
    random.Random(seed).shuffle(pieces)
    tables = list(merge(pieces, lambda rows: rows))
    expected = sorted((row for table in blocks for row in table.to_pylist()), key=key)
    assert pa.concat_tables(tables).to_pylist() == expected
    assert all(table.num_rows for table in tables)
    assert (len(tables) > 20) == (size == 1)


def test_only_pieces_that_overlap_are_in_memory(monkeypatch):
    """Ten runs of forty pieces: whatever the merge has read and not yet yielded is about one piece of each run."""
    monkeypatch.setattr(ordering, "PIECE_BYTES", 1000)
    monkeypatch.setattr(ordering, "MERGED_BYTES", 1000)
    generator = random.Random(5)
    ids = [f"img{n:05d}" for n in range(4000)]
    generator.shuffle(ids)
    runs = [block(*(caption(image_id=name) for name in ids[start::10]), part=start) for start in range(10)]
    pieces = [(first_key(rows), rows) for table in runs for _, rows in cut(table, 1)]
    assert len(pieces) >= 200
    read = yielded = most = 0

    def reading(rows: pa.Table) -> pa.Table:
        nonlocal read, most
        read += rows.num_rows
        most = max(most, read - yielded)
        return rows

    for table in merge(pieces, reading):
        yielded += table.num_rows
    largest = max(rows.num_rows for _, rows in pieces)
    assert yielded == 4000
    assert most <= 12 * largest < 4000 / 8 * 2


def test_no_pieces_give_no_rows():
    assert list(merge([], lambda rows: rows)) == []
    assert list(number_captions([])) == []


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
def test_captions_are_numbered_in_the_order_of_the_source_whatever_the_order_of_the_blocks(monkeypatch, seed, size):
    monkeypatch.setattr(ordering, "MERGED_BYTES", size)
    generator = random.Random(seed)
    captions = random_captions(seed)
    blocks = [block(*captions[start : start + 50], part=start // 50) for start in range(0, 300, 50)]
    expected = brute_sort(blocks)
    generator.shuffle(blocks)
    assert sort_captions(blocks).to_pylist() == expected


@pytest.mark.parametrize("step", [1, 2, 7, 299])
def test_numbers_go_on_from_table_to_table(step):
    table = block(*random_captions(8))
    rows = pa.Table.from_pylist(sorted(table.to_pylist(), key=key), schema=BLOCK)
    numbered = number_captions(rows.slice(start, step) for start in range(0, 300, step))
    assert pa.concat_tables(numbered).to_pylist() == brute_sort([table])


def test_given_indices_are_kept():
    captions = [caption(index=index, text=str(index)) for index in (7, 0, 32767)]
    table = sort_captions([block(*captions)])
    assert list(zip(table["index"].to_pylist(), table["text"].to_pylist(), strict=True)) == [
        (0, "0"),
        (7, "7"),
        (32767, "32767"),
    ]


def test_keys_are_ordered_by_code_point(monkeypatch):
    monkeypatch.setattr(ordering, "MERGED_BYTES", 1)
    names = ["é", "z", "Z", "a", "ab", "a-b", "\U0001f600", "\uffff", "10", "9"]
    table = sort_captions([block(*(caption(image_id=name) for name in names[part::3]), part=part) for part in range(3)])
    assert table["image_id"].to_pylist() == sorted(names)


@pytest.mark.parametrize("size", [1, 1 << 20])
@pytest.mark.parametrize("apart", [False, True])
def test_a_key_that_occurs_twice_is_named_with_both_captions(monkeypatch, apart, size):
    monkeypatch.setattr(ordering, "MERGED_BYTES", size)
    first, second = caption(index=4, text="one"), caption(index=4, text="two", split="val")
    blocks = [block(first, part=0), block(second, part=1)] if apart else [block(first, second)]
    message = (
        r"caption key 'a/en/translation/4' \(image_id/language/portion/index\) occurs twice: 'one' in split 'train' and 'two' "
        r"in split 'val'. Remove one of them, or leave out the index so that"
    )
    with pytest.raises(InputError, match=message):
        sort_captions([block(caption(image_id="b", index=0), part=2), *blocks])


def test_the_same_index_in_another_language_portion_or_image_is_no_duplicate():
    captions = [
        caption(index=0),
        caption(index=0, language="de"),
        caption(index=0, portion="comparable"),
        caption(index=0, image_id="b"),
        caption(index=1),
    ]
    assert sort_captions([block(*captions)]).num_rows == 5


@pytest.mark.parametrize("size", [1, 1 << 20])
def test_numbers_and_given_indices_do_not_mix(monkeypatch, size):
    monkeypatch.setattr(ordering, "MERGED_BYTES", size)
    with pytest.raises(
        InputError, match="some captions have an index and some have none: give every caption an index, or none"
    ):
        sort_captions([block(caption(), caption()), block(caption(image_id="b", index=0), part=1)])


@pytest.mark.parametrize("step", [1000, 40_000])
def test_too_many_captions_of_one_image_are_refused(step):
    many = 32_769
    columns = [["a"] * many, ["en"] * many, ["p"] * many, [-1] * many, ["s"] * many, ["t"] * many, range(many)]
    table = pa.table(dict(zip(BLOCK.names, columns, strict=True)), schema=BLOCK)
    tables = [table.slice(start, step) for start in range(0, many, step)]
    message = r"^image 'a' has more than 32,768 captions of portion 'p' in language 'en': .*16-bit.* Remove some of them$"
    with pytest.raises(InputError, match=message):
        list(number_captions(tables))
    tables[-1] = tables[-1].slice(0, tables[-1].num_rows - 1)
    *_, last = number_captions(filter(len, tables))
    assert last["index"].to_pylist()[-1] == 32767
