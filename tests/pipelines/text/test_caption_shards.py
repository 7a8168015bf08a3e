from __future__ import annotations

import pytest

from pipelines.inputs.captions import base
from pipelines.text.caption_shards import block_forms, blocks_of, caption_rows, tokenize_captions
from pipelines.text.moses import RECIPES
from pipelines.text.truecasing import TruecaseModel
from schemas.errors import InputError
from schemas.kinds import CAPTIONS
from tests.pipelines.text.captions import block, caption, random_captions, sort_captions

RAW, LC, TRUECASE = RECIPES["raw"], RECIPES["multi30k-lc"], RECIPES["moses-truecase"]


def test_blocks_stream():
    def endless():
        while True:
            yield caption()

    assert next(blocks_of(base.tables_of(endless()), 0)).num_rows == base.TABLE_ROWS


def test_missing_captions_have_no_forms():
    captions = [caption(text=None), caption(text="a Dog"), caption(split="val", text="a Cat")]
    assert block_forms(block(*captions), TRUECASE, frozenset({"train"})) == {"en": {"Dog": 10}}


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
