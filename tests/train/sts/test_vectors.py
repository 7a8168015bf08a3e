import numpy as np

from train.sts.vectors import WORD, Coverage, coverage_of, mean_vectors, read_word_vectors

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


def test_words_are_looked_up_as_written_then_in_lower_case(tmp_path):
    (tmp_path / "a.vec").write_text("8 3\n" + "\n".join(LINES) + "\n")
    found = read_word_vectors(str(tmp_path / "a.vec"), {"The", "the", "dog", "Dog", "DOG", "at", "caf\xe9", "nothing"})
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
