from __future__ import annotations

import gzip
import hashlib
from pathlib import Path

import numpy as np
import pytest

from pipelines.datasets.comparison import compare_datasets
from pipelines.jobs import DiffJob, WordVectorsJob
from pipelines.text.word_vectors import import_word_vectors
from schemas.dataset import Dataset, open_dataset
from schemas.errors import DatasetError, InputError, UsageError
from schemas.vocabulary import Vocabulary
from schemas.writing.validation import validate
from tests.builders import write_rows

COUNTS = {
    "en": {"a": 9, "dog": 5, "&apos;s": 4, "Bank": 3, "&amp;": 2, "zzz": 2, "yyy": 2},
    "de": {"ein": 8, "Hund": 6, "bank": 1, "Bank": 2},
}
ENGLISH = {"a": [1, 2, 3], "'s": [4, 5, 6], "bank": [7, 8, 9], "&": [0.1, 0.2, 0.3], "dog": [-1, 0, 1], "ein": [9, 9, 9]}
GERMAN = {"Hund": [1, 0, 0], "hund": [0, 1, 0], "Bank": [0, 0, 1], "bank": [1, 1, 1], "der": [5, 5, 5]}


def vec(vectors: dict[str, list[float]], header: bool = True) -> bytes:
    head = f"{len(vectors)} 3\n" if header else ""
    return (head + "".join(f"{word} {' '.join(map(str, row))} \n" for word, row in vectors.items())).encode()


@pytest.fixture
def vocabulary(tmp_path: Path) -> Dataset:
    table = Vocabulary.from_counts(COUNTS, min_count=1).table
    write_rows(tmp_path / "vocabulary", "vocabulary", table.to_pylist())
    return open_dataset(tmp_path / "vocabulary")


@pytest.fixture
def job(tmp_path: Path, vocabulary: Dataset) -> WordVectorsJob:
    (tmp_path / "wiki.en.vec").write_bytes(vec(ENGLISH))
    (tmp_path / "cc.de.vec.gz").write_bytes(gzip.compress(vec(GERMAN)))
    files = tuple(str(tmp_path / name) for name in ("wiki.en.vec", "cc.de.vec.gz"))
    return WordVectorsJob(str(tmp_path / "vocabulary"), files, str(tmp_path / "out"), ("en", "de"))


def by_word(dataset: Dataset) -> dict[tuple[str, str], list[float]]:
    return {(row["language"], row["token"]): np.round(row["vector"], 6).tolist() for row in dataset.table().to_pylist()}


def test_rows_for_words_in_each_file(job, vocabulary, tmp_path):
    manifest = import_word_vectors(job)
    dataset = open_dataset(job.output, kind="word-vectors")
    assert by_word(dataset) == {
        ("de", "Hund"): [1, 0, 0],  # As it is, where that is there.
        ("de", "Bank"): [0, 0, 1],
        ("de", "bank"): [1, 1, 1],
        ("en", "a"): [1, 2, 3],
        ("en", "dog"): [-1, 0, 1],
        ("en", "&apos;s"): [4, 5, 6],  # Without the escapes of Moses.
        ("en", "&amp;"): [0.1, 0.2, 0.3],
        ("en", "Bank"): [7, 8, 9],  # In lower case.
    }
    ids = vocabulary.vocabulary().ids
    rows = dataset.table().to_pylist()
    assert [row["id"] for row in rows] == [ids[row["token"]] for row in rows]
    assert [(row["language"], row["id"]) for row in rows] == sorted((row["language"], row["id"]) for row in rows)
    assert dataset.numpy("vector").shape == (8, 3)
    assert validate(job.output) == []
    assert manifest.inputs == (
        {"name": "vocabulary", "fingerprint": vocabulary.fingerprint},
        *(
            {"name": path.name, "language": language, "bytes": path.stat().st_size, "sha256": digest(path)}
            for language, path in (("de", tmp_path / "cc.de.vec.gz"), ("en", tmp_path / "wiki.en.vec"))
        ),
    )
    assert manifest.parameters == {
        "feature": {"name": "word-vectors", "shape": [3], "dtype": "float32", "source": ""},
        "languages": ["de", "en"],
        "lookup": "without Moses escapes; then in lower case",
    }


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_coverage_counts_types_and_occurrences(job):
    assert dict(import_word_vectors(job).statistics) == {
        "en": {
            "file_words": 6,
            "types": 7,
            "types_found": 5,
            "types_in_lower_case": 1,
            "occurrences": 27,
            "occurrences_found": 23,
            "most_frequent_missing": {"yyy": 2, "zzz": 2},
        },
        "de": {
            "file_words": 5,
            "types": 4,
            "types_found": 3,
            "types_in_lower_case": 0,
            "occurrences": 17,
            "occurrences_found": 9,
            "most_frequent_missing": {"ein": 8},
        },
    }


def test_fingerprint_is_independent_of_file_order_and_place(job, tmp_path):
    first = import_word_vectors(job)
    assert import_word_vectors(job) == first
    (tmp_path / "moved").mkdir()
    moved = [Path(path).rename(tmp_path / "moved" / Path(path).name) for path in job.files]
    again = WordVectorsJob(job.vocabulary, tuple(map(str, moved[::-1])), job.output, job.languages[::-1])
    assert import_word_vectors(again).fingerprint == first.fingerprint
    moved[0].write_bytes(vec({**ENGLISH, "dog": [1, 0, 1]}))
    with pytest.raises(DatasetError, match="--overwrite"):
        import_word_vectors(again)
    other = WordVectorsJob(job.vocabulary, again.files, str(tmp_path / "other"), again.languages)
    assert import_word_vectors(other).fingerprint != first.fingerprint
    dog = open_dataset(job.vocabulary).vocabulary().ids["dog"]
    comparison = compare_datasets(DiffJob(job.output, other.output))
    assert (comparison.differs, comparison.common, comparison.differing.first) == (True, 8, (f"en/{dog}",))
    assert comparison.vectors[0].min_cosine == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"languages": ("en",)}, "--languages is 'en', expected one language per FILE, in order: it names 1 for 2 files"),
        ({"languages": ("en", "en")}, "--languages names 'en' twice: give one file for each"),
    ],
)
def test_language_for_each_file(job, change, message):
    with pytest.raises(UsageError, match=message):
        WordVectorsJob(**{**vars(job), **change})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (vec({"Hund": [1, 2]}, header=False), r"wiki\.en\.vec' has 3 numbers a word, .*cc\.de\.vec\.gz' has 2: the vectors"),
        (vec({"x": [1, 2, 3]}), r"has none of the 4 words of 'de' among its 1: check that it is the file of that language"),
        (vec(GERMAN)[:-9], r"line 6: expected a word and its 3 numbers .*FILE takes word vectors as text"),
    ],
)
def test_unsuitable_files_leave_no_output(job, data, message):
    Path(job.files[1]).write_bytes(gzip.compress(data))
    with pytest.raises(InputError, match=message):
        import_word_vectors(job)
    assert not Path(job.output).exists()


def test_command_prints_the_coverage(job, call):
    code, printed, _ = call("word-vectors", job.vocabulary, *job.files, job.output, "--languages", "en,de")
    assert code == 0
    assert "5 (71.43%)" in printed  # Types.
    assert "23 (85.19%)" in printed  # Occurrences.


# --- models ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model_file(tmp_path_factory) -> Path:
    """A model of three words, in fastText's own format, with the sub-words of three letters."""
    gensim = pytest.importorskip("gensim.models.fasttext")
    sentences = [["dog", "a", "dogs"]] * 5
    model = gensim.FastText(sentences, vector_size=3, min_count=1, min_n=3, max_n=3, bucket=64, epochs=1, seed=1, workers=1)
    path = tmp_path_factory.mktemp("model") / "tiny.en.bin"
    gensim.save_facebook_model(model, str(path))
    return path


@pytest.fixture
def read(vocabulary, tmp_path):
    """Function that makes English word vectors of a file."""
    return lambda file: import_word_vectors(
        WordVectorsJob(str(tmp_path / "vocabulary"), (str(file),), str(tmp_path / "out"), ("en",))
    )


def test_model_makes_other_words_of_their_sub_words(read, model_file, tmp_path):
    from gensim.models.fasttext import load_facebook_vectors

    manifest = read(model_file)
    model = load_facebook_vectors(str(model_file))
    found = {row["token"]: row["vector"] for row in open_dataset(tmp_path / "out").table().to_pylist()}
    assert {"a", "dog", "zzz", "Bank"} <= set(found)
    for token, word in (("a", "a"), ("dog", "dog"), ("zzz", "zzz"), ("Bank", "Bank"), ("&apos;s", "'s")):
        np.testing.assert_array_equal(np.float32(found[token]), model.get_vector(word))
    assert manifest.parameters["lookup"].endswith("; then, of a .bin, by sub-words")
    assert manifest.inputs[1]["sha256"] == digest(model_file)
    assert manifest.statistics["en"]["file_words"] == 3
    assert "gensim" in manifest.libraries


@pytest.mark.parametrize("size", [0, 3, 40, -100])
def test_broken_models_are_refused(read, model_file, tmp_path, size):
    (tmp_path / "cut.bin").write_bytes(model_file.read_bytes()[:size])
    with pytest.raises(InputError, match=r"cut\.bin' is not a model of fastText, or is cut off .*fetch it again"):
        read(tmp_path / "cut.bin")


def test_binary_format_of_word2vec_is_named(read, tmp_path):
    pytest.importorskip("gensim")
    (tmp_path / "w.bin").write_bytes(b"1 2\ndog " + np.ones(2, "<f4").tobytes() + b"\n")
    with pytest.raises(
        InputError, match=r"w\.bin' is in word2vec's binary format: convert it to text with gensim: KeyedVectors"
    ):
        read(tmp_path / "w.bin")
