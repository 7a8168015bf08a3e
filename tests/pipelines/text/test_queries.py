from __future__ import annotations

from dataclasses import replace

import pytest

from pipelines.text.moses import RECIPES, load_recipe
from pipelines.text.queries import tokenize_query
from pipelines.text.truecasing import TruecaseModel
from schemas.errors import InputError, UsageError


def test_query_goes_through_the_recipe_of_the_captions():
    steps = load_recipe("multi30k-lc").parameters()
    assert tokenize_query("Two DOGS, isn't it?", "en", steps) == ["two", "dogs", ",", "isn", "&apos;t", "it", "?"]
    assert tokenize_query("Two  Dogs.", "en", load_recipe("raw").parameters()) == ["Two", "Dogs."]


def test_another_version_of_the_tokenizer_is_accepted():
    steps = replace(load_recipe("multi30k-lc").parameters(), sacremoses="0.1.0")
    assert tokenize_query("A dog.", "en", steps) == ["a", "dog", "."]


def test_tokenize_query_uses_truecasers_of_the_captions(tmp_path):
    model = TruecaseModel.from_counts({"Berlin": 5, "hund": 1, "Hund": 3, "ein": 4})
    (tmp_path / "de.model").write_text(model.to_text(), encoding="utf-8")
    steps = load_recipe("moses-truecase").parameters()
    assert tokenize_query("Ein Hund in Berlin.", "de", steps, str(tmp_path)) == ["ein", "Hund", "in", "Berlin", "."]
    with pytest.raises(UsageError, match=r"holds no en\.model: it has de"):
        tokenize_query("a dog", "en", steps, str(tmp_path))
    with pytest.raises(UsageError, match="give --truecaser with the folder of the captions"):
        tokenize_query("ein Hund", "de", steps)
    with pytest.raises(InputError, match=r"holds no LANGUAGE\.model"):
        tokenize_query("ein Hund", "de", steps, str(tmp_path / "nothing"))


def test_tokenize_query_refuses_an_unused_truecaser():
    with pytest.raises(UsageError, match="'raw' does not truecase: leave --truecaser out"):
        tokenize_query("a dog", "en", RECIPES["raw"].parameters(), "somewhere")


def test_captions_of_an_unknown_or_changed_recipe_are_refused():
    message = r"^the run does not state how its captions were tokenized: .*an earlier version.*--tokenized$"
    with pytest.raises(UsageError, match=message):
        tokenize_query("a dog", "en", None)
    with pytest.raises(UsageError, match=r"has changed since the captions of this run were tokenized \(lowercase differ\)"):
        tokenize_query("a dog", "en", replace(RECIPES["raw"].parameters(), lowercase=True))
