from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from schemas.errors import UsageError
from train.config.models import VseConfig
from train.data.word_vectors import WordVectors
from train.models.catalogue import build_model
from train.models.dimensions import Dimensions
from train.models.word_tables import begin_with, freeze_words, word_tables

WORDS = WordVectors(
    "w",
    "f",
    2,
    ids={"en": np.array([4, 6]), "de": np.array([4, 5])},
    vectors={"en": np.float32([[1, 0], [7, 7]]), "de": np.float32([[0, 1], [5, 5]])},
)
COUNTS = [{}, {}, {}, {}, {"en": 3, "de": 1}, {"de": 2}, {"en": 1}, {"en": 1, "de": 1}]


def model(*, shared: bool, words: int = 2, ids=None):
    dimensions = Dimensions(("en", "de"), 8, (3,), ids or {})
    return build_model(VseConfig(embed_dim=4, word_dim=words, shared_encoder=shared), dimensions, 0)


def test_one_table_of_all_languages():
    built, drawn = model(shared=True), model(shared=True)
    said = begin_with(built, WORDS, COUNTS)
    table, before = built.sentences[0].words.weight, drawn.sentences[0].words.weight
    assert table[4:7].tolist() == [[0.75, 0.25], [5, 5], [7, 7]]
    assert torch.equal(table[[0, 1, 2, 3, 7]], before[[0, 1, 2, 3, 7]])  # As drawn: specials, and a word without a vector.
    assert table.requires_grad
    assert said == "began with the vectors of words in 'w': 3 of 8 in en, de; the others as drawn"
    others = {name: value for name, value in drawn.state_dict().items() if "words" not in name}
    assert all(torch.equal(built.state_dict()[name], value) for name, value in others.items())


def test_a_table_for_each_language_holds_its_ids_only():
    ids = {"en": (0, 1, 2, 3, 4, 7), "de": (0, 1, 2, 3, 4, 5, 7)}
    built = model(shared=False, ids=ids)
    said = begin_with(built, WORDS, COUNTS)
    english, german = (encoder.words for encoder in built.sentences)
    assert english(torch.tensor([4])).tolist() == [[1, 0]]
    assert german(torch.tensor([4, 5])).tolist() == [[0, 1], [5, 5]]
    assert torch.equal(english(torch.tensor([6])), english(torch.tensor([3])))  # Too rare here: read as <unk>.
    assert "1 of 6 in en; 2 of 7 in de" in said


def test_frozen_words_have_no_gradient():
    built = model(shared=False)
    freeze_words(built, 8)
    fixed = [name for name, parameter in built.named_parameters() if not parameter.requires_grad]
    assert fixed == ["sentences.0.words.weight", "sentences.1.words.weight"]


def test_tables_are_found_in_any_model():
    other = nn.ModuleDict({"a": nn.Embedding(8, 2), "b": nn.EmbeddingBag(8, 3), "c": nn.Embedding(5, 2)})
    assert {name: len(ids) for name, ids in word_tables(other, 8).items()} == {"a.weight": 8, "b.weight": 8}


def test_vectors_of_another_width_are_refused():
    with pytest.raises(UsageError, match=r"sentences\.0\.words\.weight has 3 numbers a word, but the vectors in 'w' have 2"):
        begin_with(model(shared=True, words=3), WORDS, COUNTS)


def test_a_model_without_words_is_refused():
    class Wordless(nn.Module):
        languages = ("en",)

    with pytest.raises(UsageError, match="has no table of words, so that it cannot begin with word vectors"):
        begin_with(Wordless(), WORDS, COUNTS)  # type: ignore[arg-type]
