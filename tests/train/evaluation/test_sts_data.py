import gzip
import io
import os
import zipfile
from math import sqrt
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from schemas.errors import InputError, UsageError
from train.evaluation.sts_data import (
    WORD,
    Correlation,
    Coverage,
    StsPairs,
    cosines,
    coverage_of,
    mean_vectors,
    read_sentence_vectors,
    read_sts,
    read_word_vectors,
)

INPUT = 'A dog runs.\tA dog sleeps.\nTwo cats.\tSome cats\tMSRvid\textra\n"A" bird\tA bird\'s "nest\n'


@pytest.fixture
def task(tmp_path) -> Path:
    (tmp_path / "STS.input.images.txt").write_text(INPUT)
    (tmp_path / "STS.gs.images.txt").write_text("2.400\n\n0\n")
    return tmp_path


def test_read_sts_of_two_files_skips_blank_scores(task):
    expected = StsPairs(
        name="images",
        location=str(task / "STS.input.images.txt"),
        scores=(2.4, 0.0),
        first=("A dog runs.", '"A" bird'),
        second=("A dog sleeps.", "A bird's \"nest"),
        lines=(1, 3),
        unscored=1,
    )
    for places in (task, task / "STS.input.images.txt", [task / "STS.gs.images.txt"], sorted(task.iterdir())):
        assert read_sts(places) == [expected]
    assert len(expected) == 2
    assert expected.sentences == ("A dog runs.", "A dog sleeps.", '"A" bird', "A bird's \"nest")


@pytest.mark.parametrize(
    ("name", "text", "lines", "unscored"),
    [
        ("a.tsv", "score\tsentence1\tsentence2\n1.5\tone\ttwo\n\tthree\tfour\n4\tfive\tsix\n", (2, 4), 1),
        ("a.tsv", "index\tSentence2\tSentence1\tnote\tSCORE\r\n7\ttwo\tone\t\t1.5\r\n8\tsix\tfive\tx\t4\r\n", (2, 3), 0),
        ("a.tsv", "1.5\tone\ttwo\n\tthree\tfour\n4\tfive\tsix", (1, 3), 1),
        (
            "a.csv",
            "main-captions\tMSRvid\t2012test\t0024\t1.5\tone\ttwo\nm\tf\ty\t01\t4\tfive\tsix\tsource\tsource\n",
            (1, 2),
            0,
        ),
    ],
)
def test_tables_with_and_without_a_header(tmp_path, name, text, lines, unscored):
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.encode())
    (pairs,) = read_sts(tmp_path)
    assert (pairs.scores, pairs.first, pairs.second) == ((1.5, 4.0), ("one", "five"), ("two", "six"))
    assert (pairs.name, pairs.lines, pairs.unscored) == ("a", lines, unscored)


def test_folder_holds_several_and_equal_names_are_told_apart(task, tmp_path):
    (task / "b.tsv").write_text("1\tone\ttwo\n")
    (task / "README.md").write_text("not pairs")
    (task / "STS.gs.ALL.txt").write_text("1\n")
    for year in ("2014", "2015"):
        (tmp_path / year / "test").mkdir(parents=True)
        for kind in ("input", "gs"):
            source = task / f"STS.{kind}.images.txt"
            (tmp_path / year / "test" / source.name).write_bytes(source.read_bytes())
    assert [pairs.name for pairs in read_sts(task)] == ["images", "b"]
    years = [tmp_path / year / "test" for year in ("2014", "2015")]
    assert [pairs.name for pairs in read_sts([*years, task / "b.tsv"])] == ["2014/test/images", "2015/test/images", "b"]
    (task / "b.csv").write_text("1\tone\ttwo\n")
    assert [pairs.name for pairs in read_sts([task / "b.tsv", task / "b.csv"])] == [str(task / "b.tsv"), str(task / "b.csv")]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"STS.input.x.txt": "one\ttwo\n"}, r"STS\.gs\.x\.txt' does not exist: expected STS\.input\.X\.txt beside STS\.gs"),
        ({"STS.input.x.txt": "one\ttwo\n", "STS.gs.x.txt": "1\n2\n"}, r"x\.txt' has 1 lines and '.*STS\.gs\.x\.txt' has 2: "),
        ({"STS.input.x.txt": "a\tb\none two\n", "STS.gs.x.txt": "1\n2\n"}, r"x\.txt', line 2: expected two .*found 'one two'"),
        (
            {"STS.input.x.txt": "a\tb\n", "STS.gs.x.txt": "high\n"},
            r"STS\.gs\.x\.txt', line 1: expected a number .*found 'high'",
        ),
        ({"STS.input.x.txt": "a\tb\n", "STS.gs.x.txt": "nan\n"}, r"line 1: expected a number .*found 'nan'"),
        ({"STS.input.x.txt": "a\tb\n", "STS.gs.x.txt": "\n"}, r"x\.txt' holds no pair with a score: expected STS\.input"),
        ({"x.tsv": "score\tsentence1\tsentence2\n1\ta\tb\n2\ta\n"}, r"x\.tsv', line 3: expected 3 columns .*found 2: '2\\ta'"),
        ({"x.tsv": "1\ta\t \n"}, r"x\.tsv', line 1: expected two sentences, found an empty one"),
        ({"x.tsv": "1,one,two\n"}, r"x\.tsv', line 1: expected .* score, sentence1 and sentence2.*found '1,one,two'"),
        ({"x.tsv": ""}, r"x\.tsv', line 1: expected .*found ''"),
        ({"x.tsv": "gut\tein\tzwei\n"}, r"line 1: expected .*found 'gut\\tein\\tzwei'"),
        ({"x.txt": "1\ta\tb\n"}, r"holds no sentence pairs: expected STS\.input\.X\.txt"),
    ],
)
def test_read_sts_error_names_file_and_line(tmp_path, files, message):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=message):
        read_sts(tmp_path)


def test_places_without_pairs_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"there is no file or folder '.*nothing': give sentence pairs"):
        read_sts(tmp_path / "nothing")
    with pytest.raises(InputError, match="holds no sentence pairs"):
        read_sts(tmp_path)
    (tmp_path / "latin.tsv").write_bytes(b"1\tcaf\xe9\ttwo\n")
    with pytest.raises(InputError, match="is not UTF-8: line 1, column 6"):
        read_sts(tmp_path / "latin.tsv")
    os.mkfifo(tmp_path / "pipe.tsv")
    with pytest.raises(InputError, match=r"pipe\.tsv"):
        read_sts(tmp_path / "pipe.tsv")
    with pytest.raises(UsageError, match="cannot use the location ''"):
        read_sts("")


def test_real_files(sts_pairs):
    pairs = {one.name: one for one in read_sts(sts_pairs)}
    assert {(name, len(pairs[name]), pairs[name].unscored) for name in ("images-2014", "images-2015")} == {
        ("images-2014", 750, 0),
        ("images-2015", 750, 0),
    }
    assert pairs["images-2014"].first[0] == "A cat standing on tree branches."
    assert (pairs["images-2015"].scores[0], pairs["images-2015"].second[0]) == (4.4, "Two dogs play with purple football.")


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


def scored(scores):
    sentences = tuple(map(str, scores))
    return StsPairs("pairs", "pairs.tsv", tuple(scores), sentences, sentences, tuple(range(1, len(scores) + 1)))


@pytest.mark.parametrize("seed", range(5))
def test_correlations_equal_pandas(seed):
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 26, size=120) / 5  # Like human scores: with many ties.
    y = np.round(x + rng.normal(0, 2, size=120), 1)
    frame = pd.DataFrame({"x": x, "y": y})
    correlation = scored(x).correlation(y)
    assert correlation.pearson == pytest.approx(100 * frame.x.corr(frame.y), abs=1e-10)
    assert correlation.spearman == pytest.approx(100 * frame.x.rank().corr(frame.y.rank()), abs=1e-10)
    assert scored([1, 2]).correlation([0.5, 0.25]) == Correlation(-100, -100)


@pytest.mark.parametrize("constant", [[1, 1, 1], [0.9999999, 1.0, 0.99999995], [0, 0, 0]])
def test_correlation_with_a_constant_series_is_none(constant):
    none = Correlation(None, None)
    assert scored([1, 2, 3]).correlation(constant) == scored(constant).correlation([1, 2, 3]) == none
    assert scored([1]).correlation([2]) == none


def test_correlation_of_different_lengths_is_refused():
    with pytest.raises(ValueError, match=r"similarities have the shape \(2,\), expected \(3,\), one per pair"):
        scored([1, 2, 3]).correlation([1, 2])


def test_cosines_are_those_of_each_row():
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((7, 5)), rng.standard_normal((7, 5))
    a[3] = 0
    expected = [0 if n == 3 else sum(a[n] * b[n]) / sqrt(sum(a[n] ** 2) * sum(b[n] ** 2)) for n in range(7)]
    np.testing.assert_allclose(cosines(a, b), expected, atol=1e-12)
    assert cosines(a.astype(np.float32), a.astype(np.float32)).dtype == np.float64
    np.testing.assert_allclose(cosines(a, 1000 * a), [1, 1, 1, 0, 1, 1, 1])
    assert cosines(a, a).max() <= 1
