import gzip
import io
import zipfile

import numpy as np
import pytest

from schemas.errors import InputError
from train.sts.vectors import WORD, Coverage, coverage_of, mean_vectors, read_sentence_vectors, read_word_vectors

LINES = [
    "the 1 0 0",
    "dog 0 2 0 ",
    "Dog 0 0 3",
    "at name@example.org 9 9 9",
    "at 4 4 4",
    "caf\xe9 1 1 1",
    "the 7 7 7",
    "x\xa0y 1 2 3",
]


@pytest.mark.parametrize(("name", "header"), [("a.txt", ""), ("a.vec", "8 3\n"), ("a.vec.gz", "8 3\n")])
def test_word_vectors_of_all_kinds(tmp_path, name, header):
    data = (header + "\n".join(LINES) + "\n").encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    found = read_word_vectors(str(tmp_path / name), {"The", "the", "dog", "Dog", "DOG", "at", "caf\xe9", "nothing"})
    expected = {
        "The": [1, 0, 0],  # In lower case, and the first of two.
        "the": [1, 0, 0],
        "dog": [0, 2, 0],
        "Dog": [0, 0, 3],  # As written where that is there.
        "DOG": [0, 2, 0],
        "at": [4, 4, 4],  # Not the word with a space.
        "caf\xe9": [1, 1, 1],
    }
    assert {word: vector.tolist() for word, vector in found.items()} == expected


def test_vector_of_a_sentence_is_the_mean_of_those_of_its_words():
    vectors = {"a": np.array([1.0, 0.0]), "b": np.array([0.0, 3.0])}
    means = mean_vectors([["a", "b", "b"], ["a", "c"], ["c"], []], vectors)
    np.testing.assert_allclose(means, [[1 / 3, 2], [1, 0], [0, 0], [0, 0]])
    assert WORD.findall("Two dogs' snow-white café, at 5pm_x.") == ["Two", "dogs", "snow", "white", "café", "at", "5pm_x"]


def test_coverage_counts_words_and_blind_sentences():
    assert coverage_of([["a", "x", "x"], ["y"], ["a", "z"], []], {"a"}) == Coverage(6, 2, 2, {"x": 2, "y": 1, "z": 1})


def test_files_without_word_vectors_are_refused(tmp_path):
    (tmp_path / "a.vec").write_text("one sentence\n")
    with pytest.raises(InputError, match=r"line 1: expected a word and its numbers with spaces .*\.npz"):
        read_word_vectors(str(tmp_path / "a.vec"), {"dog"})
    with pytest.raises(InputError, match=r"there is no file '.*nothing\.vec': --vectors takes word vectors"):
        read_word_vectors(str(tmp_path / "nothing.vec"), {"dog"})
    with pytest.raises(InputError, match=str(tmp_path)):
        read_word_vectors(str(tmp_path), {"dog"})


def test_vectors_of_sentences_come_by_their_texts(tmp_path):
    path = str(tmp_path / "a.npz")
    vectors = np.arange(6, dtype=np.float32).reshape(3, 2)
    np.savez(path, sentences=["two", "one", "three"], vectors=vectors)
    found = read_sentence_vectors(path, ["one", "two"])
    assert found.dtype == np.float64
    assert found.tolist() == [[2, 3], [0, 1]]
    with pytest.raises(InputError, match=r"lacks 2 of 3 sentences, such as 'four'"):
        read_sentence_vectors(path, ["one", "four", "five"])


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"vectors": np.ones((1, 2))}, "does not hold vectors of sentences .*expected the arrays 'sentences'"),
        ({"sentences": np.array(["a", None], object), "vectors": np.ones((2, 2))}, "does not hold vectors of sentences"),
        ({"sentences": ["a"], "vectors": np.ones((2, 2))}, r"found arrays of <U1 \(1,\) and float64 \(2, 2\)"),
        ({"sentences": ["a"], "vectors": np.ones(1)}, r"and float64 \(1,\)"),
        ({"sentences": [1], "vectors": np.ones((1, 2))}, r"found arrays of int64 \(1,\)"),
        ({"sentences": ["a"], "vectors": np.array([[1, np.nan]])}, "expected finite numbers in 'vectors'"),
        ({"sentences": ["a"], "vectors": np.array([["x", "y"]])}, "expected finite numbers in 'vectors', found <U1"),
    ],
)
def test_other_arrays_are_refused(tmp_path, arrays, message):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(InputError, match=message):
        read_sentence_vectors(str(tmp_path / "a.npz"), ["a"])


def test_npz_with_other_files_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        for name in ("sentences.npy", "vectors.npy"):
            archive.writestr(name, "text")
    with pytest.raises(InputError, match=r"found arrays of \|S4 \(\) and"):
        read_sentence_vectors(str(tmp_path / "a.npz"), ["a"])


def test_damaged_npz_is_refused(tmp_path):
    array = io.BytesIO()
    np.save(array, np.ones((2, 2)))
    for data in (b"PK\x03\x04 no archive", array.getvalue()):
        (tmp_path / "a.npz").write_bytes(data)
        with pytest.raises(InputError, match="does not hold vectors of sentences"):
            read_sentence_vectors(str(tmp_path / "a.npz"), ["a"])
