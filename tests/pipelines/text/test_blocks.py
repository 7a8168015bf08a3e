import random
from collections import Counter, defaultdict

import pyarrow as pa
import pytest

from pipelines.inputs.captions import RawCaption
from pipelines.text import blocks as caption_blocks
from pipelines.text.blocks import (
    BLOCK,
    block_forms,
    blocks_of,
    caption_rows,
    caption_statistics,
    from_ipc,
    sort_captions,
    split_by_shard,
    to_ipc,
    tokenize_captions,
)
from pipelines.text.moses import RECIPES, prepare
from pipelines.text.truecasing import TruecaseModel, count_forms, truecase
from schemas.errors import InputError
from schemas.keys import shard_of
from schemas.kinds import CAPTIONS

RAW, LC, TRUECASE = RECIPES["raw"], RECIPES["multi30k-lc"], RECIPES["moses-truecase"]


def caption(image_id="a", language="en", portion="translation", index=-1, split="train", text="x") -> RawCaption:
    return RawCaption(image_id, language, portion, index, split, text)


def block(*captions: RawCaption, part: int = 0) -> pa.Table:
    (table,) = blocks_of(captions, part)
    return table


def random_captions(seed: int, count: int = 300) -> list[RawCaption]:
    generator = random.Random(seed)
    return [
        caption(
            image_id=f"img{generator.randrange(20)}",
            language=generator.choice(["en", "de"]),
            portion=generator.choice(["comparable", "translation"]),
            split=generator.choice(["train", "val"]),
            text=" ".join(generator.choices(["The", "the", "Dog", "dog", "runs", "."], k=generator.randrange(1, 8))),
        )
        for _ in range(count)
    ]


# --- blocks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 6, 7, 8, 20])
def test_blocks_hold_all_captions_in_order(monkeypatch, count):
    monkeypatch.setattr(caption_blocks, "BLOCK_ROWS", 7)
    captions = random_captions(1, count)
    blocks = list(blocks_of(iter(captions), 3))
    assert [table.num_rows for table in blocks] == [7] * (count // 7) + [count % 7] * (count % 7 > 0)
    assert all(table.schema.equals(BLOCK) for table in blocks)
    rows = [row for table in blocks for row in table.to_pylist()]
    assert [tuple(row[name] for name in BLOCK.names[:-1]) for row in rows] == captions
    positions = [row["position"] for row in rows]
    assert positions == sorted(set(positions))


def test_positions_of_a_part_come_before_those_of_the_next():
    first, second = (block(*random_captions(1, 5), part=part)["position"].to_pylist() for part in (0, 1))
    assert max(first) < min(second)


def test_blocks_stream():
    def endless():
        while True:
            yield caption()

    assert next(blocks_of(endless(), 0)).num_rows == caption_blocks.BLOCK_ROWS


def test_a_table_survives_serialization():
    table = block(*random_captions(2))
    assert from_ipc(to_ipc(table)).equals(table)
    assert from_ipc(to_ipc(BLOCK.empty_table())).equals(BLOCK.empty_table())
    sliced = table.slice(5, 10)
    assert from_ipc(to_ipc(sliced)).equals(sliced)


@pytest.mark.parametrize("shards", [1, 3, 50])
def test_a_block_is_cut_by_the_shard_of_the_image(shards):
    table = block(*random_captions(3))
    expected: dict[int, list[dict]] = defaultdict(list)
    for row in table.to_pylist():
        expected[shard_of(row["image_id"], shards)].append(row)
    pieces = list(split_by_shard(table, shards, frozenset()))
    assert {number: rows.to_pylist() for number, rows in pieces} == expected
    assert len(pieces) == len(expected)


def test_finished_shards_are_left_out():
    table = block(*random_captions(4))
    numbers = {number for number, _ in split_by_shard(table, 5, frozenset())}
    assert {number for number, _ in split_by_shard(table, 5, frozenset({0, 3}))} == numbers - {0, 3}


# --- forms -----------------------------------------------------------------------------------------------------------


def test_forms_are_counted_by_language_in_the_training_splits():
    captions = random_captions(5)
    expected: dict[str, Counter] = defaultdict(Counter)
    for raw in captions:
        if raw.split == "train":
            for form, weight in count_forms(prepare(raw.text, raw.language, TRUECASE)):
                expected[raw.language][form] += weight
    assert block_forms(block(*captions), TRUECASE, frozenset({"train"})) == expected
    assert set(expected) == {"en", "de"}


def test_without_a_training_split_no_forms_are_counted():
    assert block_forms(block(*random_captions(5)), TRUECASE, frozenset({"test"})) == {}


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
def test_captions_are_numbered_in_the_order_of_the_source_whatever_the_order_of_the_blocks(seed):
    generator = random.Random(seed)
    captions = random_captions(seed)
    blocks = [block(*captions[start : start + 50], part=start // 50) for start in range(0, 300, 50)]
    expected = brute_sort(blocks)
    generator.shuffle(blocks)
    assert sort_captions(blocks).to_pylist() == expected


def test_given_indices_are_kept():
    captions = [caption(index=index, text=str(index)) for index in (7, 0, 32767)]
    table = sort_captions([block(*captions)])
    assert list(zip(table["index"].to_pylist(), table["text"].to_pylist(), strict=True)) == [
        (0, "0"),
        (7, "7"),
        (32767, "32767"),
    ]


def test_keys_are_ordered_by_code_point():
    names = ["é", "z", "Z", "a", "ab", "a-b", "\U0001f600", "\uffff", "10", "9"]
    table = sort_captions([block(*(caption(image_id=name) for name in names))])
    assert table["image_id"].to_pylist() == sorted(names)


def test_no_captions_are_sorted_to_an_empty_table():
    assert sort_captions([]).equals(BLOCK.empty_table())
    assert sort_captions([BLOCK.empty_table()]).num_rows == 0


@pytest.mark.parametrize("apart", [False, True])
def test_a_key_that_occurs_twice_is_named_with_both_captions(apart):
    first, second = caption(index=4, text="one"), caption(index=4, text="two", split="val")
    blocks = [block(first, part=0), block(second, part=1)] if apart else [block(first, second)]
    message = (
        r"caption key 'a/en/translation/4' \(image_id/language/portion/index\) occurs twice: 'one' in split 'train' and 'two' "
        r"in split 'val'. Remove one of them, or leave out the index so that"
    )
    with pytest.raises(InputError, match=message):
        sort_captions([block(caption(image_id="b", index=0)), *blocks])


def test_the_same_index_in_another_language_portion_or_image_is_no_duplicate():
    captions = [
        caption(index=0),
        caption(index=0, language="de"),
        caption(index=0, portion="comparable"),
        caption(index=0, image_id="b"),
        caption(index=1),
    ]
    assert sort_captions([block(*captions)]).num_rows == 5


def test_numbers_and_given_indices_do_not_mix():
    with pytest.raises(
        InputError, match="some captions have an index and some have none: give every caption an index, or none"
    ):
        sort_captions([block(caption(), caption(), caption(index=0))])


def test_too_many_captions_of_one_image_are_refused():
    many = 32_769
    columns = [["a"] * many, ["en"] * many, ["p"] * many, [-1] * many, ["s"] * many, ["t"] * many, range(many)]
    table = pa.table(dict(zip(BLOCK.names, columns, strict=True)), schema=BLOCK)
    message = r"^image 'a' has more than 32,768 captions of portion 'p' in language 'en': .*16-bit.* Remove some of them$"
    with pytest.raises(InputError, match=message):
        sort_captions([table])
    assert sort_captions([table.slice(0, many - 1)])["index"].to_pylist()[-1] == 32767


# --- tokens ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [RAW, LC], ids=["raw", "lc"])
def test_tokens_are_those_of_the_recipe(recipe):
    captions = random_captions(6, 50)
    table, failures = tokenize_captions(block(*captions), recipe)
    assert table["tokens"].to_pylist() == [prepare(raw.text, raw.language, recipe) for raw in captions]
    assert table["text"].to_pylist() == [raw.text for raw in captions]
    assert failures == []


@pytest.mark.parametrize("text", ["", " ", "\t \u00a0"])
def test_a_caption_without_a_token_is_a_failure(text):
    captions = [caption(text="one"), caption(index=3, split="val", text=text), caption(text="two")]
    table, failures = tokenize_captions(block(*captions), LC)
    assert table["text"].to_pylist() == ["one", "two"]
    assert failures == [
        {
            "key": "a/en/translation/3",
            "uri": "",
            "stage": "prepare",
            "reason": "empty_caption",
            "message": f"the caption {text!r} of split 'val' holds no token",
        }
    ]


def test_each_language_has_its_own_truecaser():
    models = {
        "en": TruecaseModel.from_counts({"dog": 30, "the": 20}),
        "de": TruecaseModel.from_counts({"Dog": 30, "The": 20}),
    }
    captions = random_captions(7, 60)
    table, _ = tokenize_captions(block(*captions), TRUECASE, models)
    expected = [truecase(prepare(c.text, c.language, TRUECASE), models[c.language]) for c in captions]
    assert table["tokens"].to_pylist() == expected
    assert any(tokens[0] == "the" for tokens in expected)


@pytest.mark.parametrize(("models", "languages"), [({}, "no language"), ({"fr": TruecaseModel({}, {})}, "fr")])
def test_a_language_without_a_truecaser_is_an_error(models, languages):
    message = rf"no truecaser for language 'de': there are models for {languages}\. .*--truecaser, .*--train-splits"
    with pytest.raises(InputError, match=message):
        tokenize_captions(block(caption(language="en"), caption(language="de")), TRUECASE, models)


def test_rows_have_the_schema_and_one_dictionary(monkeypatch):
    captions = random_captions(8, 90)
    table = sort_captions([block(*captions)])
    parts = [tokenize_captions(table.slice(start, 40), RAW)[0] for start in range(0, 90, 40)]
    rows = caption_rows(parts)
    assert rows.schema.equals(CAPTIONS, check_metadata=True)
    assert rows["image_id"].to_pylist() == table["image_id"].to_pylist()
    assert rows["tokens"].to_pylist() == [text.split() for text in table["text"].to_pylist()]
    assert all(column.num_chunks == 1 for column in rows.columns)
    assert caption_rows([]).equals(CAPTIONS.empty_table())


def test_statistics_are_those_of_a_plain_loop():
    table = sort_captions([block(*random_captions(9))])
    rows = caption_rows([tokenize_captions(table, RAW)[0]])
    counted: dict[str, dict[str, int]] = defaultdict(lambda: {"captions": 0, "tokens": 0})
    images = defaultdict(set)
    for row in rows.to_pylist():
        kind = counted[f"{row['portion']}/{row['split']}/{row['language']}"]
        kind["captions"] += 1
        kind["tokens"] += len(row["tokens"])
        images[row["split"]].add(row["image_id"])
    assert caption_statistics(rows) == {"captions": counted, "images": {split: len(ids) for split, ids in images.items()}}
    assert caption_statistics(CAPTIONS.empty_table()) == {}
