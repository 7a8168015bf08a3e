from __future__ import annotations

from collections import Counter, defaultdict

import pytest

from pipelines.inputs.captions import base
from pipelines.text.caption_shards import BLOCK_SCHEMA, block_forms, blocks_of, caption_rows, tokenize_captions
from pipelines.text.moses import RECIPES, prepare
from pipelines.text.truecasing import TruecaseModel, count_forms, truecase
from schemas.errors import InputError
from schemas.kinds import CAPTIONS
from tests.pipelines.text.captions import block, caption, random_captions, sort_captions

RAW, LC, TRUECASE = RECIPES["raw"], RECIPES["multi30k-lc"], RECIPES["moses-truecase"]


@pytest.mark.parametrize("count", [0, 1, 6, 7, 8, 20])
def test_blocks_hold_all_captions_in_order(monkeypatch, count):
    monkeypatch.setattr(base, "TABLE_ROWS", 7)
    captions = random_captions(1, count)
    blocks = list(blocks_of(base.tables_of(iter(captions)), 3))
    assert [table.num_rows for table in blocks] == [7] * (count // 7) + [count % 7] * (count % 7 > 0)
    assert all(table.schema.equals(BLOCK_SCHEMA) for table in blocks)
    rows = [row for table in blocks for row in table.to_pylist()]
    assert [tuple(row[name] for name in BLOCK_SCHEMA.names[:-1]) for row in rows] == captions
    positions = [row["position"] for row in rows]
    assert positions == sorted(set(positions))


def test_positions_of_a_part_come_before_those_of_the_next():
    first, second = (block(*random_captions(1, 5), part=part)["position"].to_pylist() for part in (0, 1))
    assert max(first) < min(second)


def test_forms_are_counted_by_language_in_the_training_splits():
    captions = [*random_captions(5), caption(text=None)]
    expected: dict[str, Counter] = defaultdict(Counter)
    for raw in captions:
        if raw.text and raw.split == "train":
            for form, weight in count_forms(prepare(raw.text, raw.language, TRUECASE)):
                expected[raw.language][form] += weight
    assert block_forms(block(*captions), TRUECASE, frozenset({"train"})) == expected
    assert set(expected) == {"en", "de"}
    assert block_forms(block(*captions), TRUECASE, frozenset({"test"})) == {}


@pytest.mark.parametrize("recipe", [RAW, LC, TRUECASE], ids=["raw", "lc", "truecase"])
@pytest.mark.parametrize(
    ("text", "named"), [("", "caption ''"), ("\t \u00a0", r"caption '\t \xa0'"), (None, "missing caption (null)")]
)
def test_caption_without_a_token_is_a_failure(recipe, text, named):
    captions = [caption(text="one"), caption(index=3, split="val", text=text), caption(text="two")]
    table, failures = tokenize_captions(block(*captions), recipe, {"en": TruecaseModel({}, {})})
    assert table["text"].to_pylist() == ["one", "two"]
    assert failures == [
        {
            "key": "a/en/translation/3",
            "uri": "",
            "stage": "prepare",
            "reason": "empty_caption",
            "message": f"the {named} of split 'val' holds no token",
        }
    ]


def test_each_language_has_its_own_truecaser():
    models = {"en": TruecaseModel.from_counts({"dog": 30, "the": 20}), "de": TruecaseModel.from_counts({"Dog": 30, "The": 20})}
    captions = random_captions(7, 60)
    table, _ = tokenize_captions(block(*captions), TRUECASE, models)
    expected = [truecase(prepare(c.text, c.language, TRUECASE), models[c.language]) for c in captions]
    assert table["tokens"].to_pylist() == expected
    assert any(tokens[0] == "the" for tokens in expected)


@pytest.mark.parametrize(("models", "languages"), [({}, "no language"), ({"fr": TruecaseModel({}, {})}, "fr")])
def test_language_without_a_truecaser_is_an_error(models, languages):
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
