import numpy as np
import pytest

from schemas.dataset import open_dataset
from schemas.errors import DatasetError, UsageError
from train.data.word_vectors import WordVectors, open_word_vectors


def test_open_word_vectors_equals_rows(toy, toy_words):
    vocabulary = open_dataset(toy.vocabulary)
    words = open_word_vectors(
        toy_words.word_vectors, vocabulary_fingerprint=vocabulary.fingerprint, languages=("de", "en"), width=4
    )
    assert words.fingerprint == open_dataset(toy_words.word_vectors).fingerprint
    rows = open_dataset(toy_words.word_vectors).table().to_pylist()
    for language in ("de", "en"):
        expected = {row["id"]: row["vector"] for row in rows if row["language"] == language}
        assert words.ids[language].tolist() == sorted(expected)
        np.testing.assert_array_equal(words.vectors[language], np.float32([expected[n] for n in sorted(expected)]))


WORDS = WordVectors(
    "w",
    "f",
    2,
    ids={"en": np.array([4, 6]), "de": np.array([4, 5]), "fr": np.array([4])},
    vectors={"en": np.float32([[1, 0], [7, 7]]), "de": np.float32([[0, 1], [5, 5]]), "fr": np.float32([[9, 9]])},
)


@pytest.mark.parametrize(
    ("languages", "ids", "expected"), [(("en",), range(9), 2), (("en", "de"), range(9), 3), (("de", "fr"), (0, 4, 6, 7), 1)]
)
def test_count_tokens_with_a_vector(languages, ids, expected):
    assert WORDS.count(languages, ids) == expected


def test_of_languages_averages_by_counts():
    counts = [{}, {}, {}, {}, {"en": 3, "de": 1, "fr": 100}, {"de": 2}, {"en": 1, "de": 50}]
    ids, vectors = WORDS.of_languages(("en", "de"), counts)
    assert ids.tolist() == [4, 5, 6]
    assert vectors.tolist() == [[0.75, 0.25], [5, 5], [7, 7]]  # No vector of German for 6, however often it occurs there.
    ids, vectors = WORDS.of_languages(("de",), counts)
    assert (ids.tolist(), vectors.tolist()) == ([4, 5], [[0, 1], [5, 5]])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"vocabulary_fingerprint": "0" * 64}, DatasetError, "belongs to another vocabulary"),
        ({"languages": ("en", "fr")}, UsageError, "has no vectors of 'fr', only of de, en"),
    ],
)
def test_incompatible_word_vectors_are_refused(toy, toy_words, change, error, message):
    fields = {"vocabulary_fingerprint": open_dataset(toy.vocabulary).fingerprint, "languages": ("en",), "width": 4, **change}
    with pytest.raises(error, match=message):
        open_word_vectors(toy_words.word_vectors, **fields)
