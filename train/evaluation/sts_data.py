"""Sentence pairs with human scores, sentence vectors, and correlations.

Sentence pairs are UTF-8 with tabs between the columns and no quoting, in one of the layouts of the shared tasks:

* ``STS.input.X.txt`` with two sentences a line, further columns allowed, and ``STS.gs.X.txt`` with the score of each line: the
  shared tasks since 2012 (Agirre et al.);
* a table with a header that names ``score``, ``sentence1`` and ``sentence2``, or with these three columns and no header;
* the STS benchmark (``sts-train.csv``): genre, file, year, number, score, two sentences, further columns allowed.

Pairs without a score are left out, as in the shared task of 2015, which published 1,500 pairs of images and scored 750.

Word vectors are text, see `schemas.vector_files`. The vector of a sentence is the mean over its words. A word is a run of letters
and digits, looked up as written, then in lower case. Unknown words are skipped, and a sentence without known words has a zero
vector. Vectors of sentences are ``.npz`` with a row of ``vectors`` for each text of ``sentences``, written by
``numpy.savez("vectors.npz", sentences=sentences, vectors=vectors)``.

Letters: ``S`` sentences, ``N`` values, ``E`` width of vectors.
"""

from __future__ import annotations

import io
import os
import re
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from math import isfinite
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from schemas.errors import DatasetError, InputError
from schemas.footers import check_expansion
from schemas.storage.folder import Folder, file_at
from schemas.storage.locations import absolute_location, check_location
from schemas.storage.storage_errors import storage_errors
from schemas.text import decode_text
from schemas.vector_files import NPY_ERRORS, open_user_file, read_vector_file

_INPUT = re.compile(r"STS\.(input|gs)\.(.+)\.txt")
_TABLES = (".tsv", ".csv")
_HEADER = ("score", "sentence1", "sentence2")
_BENCHMARK = (4, 5, 6)
_PairTexts: TypeAlias = tuple[int, str, str, str]  # Line, score, sentences.
_LAYOUTS = (
    "expected STS.input.X.txt beside STS.gs.X.txt; a table with tabs between the columns score, sentence1 and sentence2; or a file "
    "of the STS benchmark"
)


@dataclass(frozen=True)
class StsPairs:
    """Sentence pairs with their scores.

    Attributes:
        location: file of the sentences.
        scores: human scores of similarity, mostly 0 to 5.
        lines: line of each pair in the file, from 1.
        unscored: number of pairs that were left out for lack of a score.
    """

    name: str
    location: str
    scores: tuple[float, ...]
    first: tuple[str, ...]
    second: tuple[str, ...]
    lines: tuple[int, ...]
    unscored: int = 0

    def __len__(self) -> int:
        return len(self.scores)

    @cached_property
    def sentences(self) -> tuple[str, ...]:
        """The distinct sentences, in order of first occurrence."""
        return tuple(dict.fromkeys(sentence for pair in zip(self.first, self.second, strict=True) for sentence in pair))

    def correlation(self, similarities: ArrayLike) -> Correlation:
        """Return the correlations, times 100, of scores and similarities ``[N]``.

        Raises:
            ValueError: the numbers of similarities and pairs differ.
        """
        from scipy.stats import pearsonr, rankdata  # Loaded to compute: the import takes a second.

        x, y = np.asarray(self.scores, np.float64), np.asarray(similarities, np.float64)
        if x.shape != y.shape:
            raise ValueError(f"similarities have the shape {y.shape}, expected {x.shape}, one per pair")
        if _constant(x) or _constant(y):
            return Correlation(None, None)
        pairs = (x, y), (rankdata(x), rankdata(y))
        return Correlation(*(100 * float(pearsonr(*pair).statistic) for pair in pairs))


def read_sts(locations: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> list[StsPairs]:
    """Read sentence pairs.

    Args:
        locations: files and folders. A folder contributes its files in the first layout, ``.tsv`` and ``.csv``. In the first layout
            the path of either file will do.

    Returns:
        The distinct data sets in the order of ``locations``, those of a folder sorted by name. The name is that of the file, e.g.
        ``images`` for ``STS.input.images.txt`` and ``images-2014`` for ``images-2014.tsv``, with folders if names are equal.

    Raises:
        InputError: a file or folder is missing, or has another layout; the message names file and line.
    """
    paths = [locations] if isinstance(locations, (str, os.PathLike)) else locations
    files = list(dict.fromkeys(file for path in paths for file in _files_at(os.fspath(path))))
    return [_read_pairs(file, label) for file, label in zip(files, _unique_labels(files), strict=True)]


def _files_at(location: str) -> Iterator[str]:
    """Yield the files of sentences at a location."""
    check_location(location)
    location = absolute_location(location)
    with _input_errors(location):
        folder = Folder(location)
        kind = folder.kind()
        if kind == "nothing":
            raise InputError(f"there is no file or folder {location!r}: give sentence pairs of a shared task, or runs")
        if kind == "file":
            folder, name = file_at(location)
            yield folder.path_of(_INPUT.sub(r"STS.input.\2.txt", name))
            return
        files = [name for name in folder.children() if not name.endswith("/")]
        names = [name for name in files if name.startswith("STS.input.") or name.endswith(_TABLES)]
    if not names:
        raise InputError(f"{location!r} holds no sentence pairs: {_LAYOUTS}")
    yield from map(folder.path_of, names)


def _unique_labels(files: Sequence[str]) -> list[str]:
    """Return unique names of files: the stem, after parent folders if needed."""
    parts = [file.split("/") for file in files]
    names = [_INPUT.sub(r"\2", path[-1]) for path in parts]
    names = [os.path.splitext(name)[0] if name.endswith((*_TABLES, ".txt")) else name for name in names]  # noqa: PTH122
    labels = list(names)
    for num_parents in range(1, max(map(len, parts), default=0)):
        repeated = {label for label in labels if labels.count(label) > 1}
        labels = [
            "/".join([*path[-1 - num_parents : -1], name]) if label in repeated else label
            for path, name, label in zip(parts, names, labels, strict=True)
        ]
    # Files of one stem in one folder have no other distinct name.
    return [file if labels.count(label) > 1 else label for file, label in zip(files, labels, strict=True)]


def _read_pairs(location: str, label: str) -> StsPairs:
    name = location.rpartition("/")[2]
    rows = list(_from_inputs(location) if _INPUT.fullmatch(name) else _from_table(location))
    scored = [(float(score), first, second, line) for line, score, first, second in rows if score]
    if not scored:
        raise InputError(f"{location!r} holds no pair with a score: {_LAYOUTS}")
    scores, first, second, lines = zip(*scored, strict=True)
    return StsPairs(label, location, scores, first, second, lines, unscored=len(rows) - len(scored))


def _from_inputs(location: str) -> Iterator[_PairTexts]:
    gold = location.replace("STS.input.", "STS.gs.")
    sentences, scores = _read_text_lines(location), _read_text_lines(gold)
    if len(sentences) != len(scores):
        raise InputError(
            f"{location!r} has {len(sentences):,} lines and {gold!r} has {len(scores):,}: expected one score, or an empty line, "
            "for each pair of sentences; fetch both files again"
        )
    for line, (pair, score) in enumerate(zip(sentences, scores, strict=True), start=1):
        cells = pair.split("\t")
        if len(cells) < 2:
            raise InputError(f"{location!r}, line {line}: expected two sentences with a tab between them, found {pair!r}")
        yield _check_pair(line, score.split("\t")[0], *cells[:2], files=(gold, location))


def _from_table(location: str) -> Iterator[_PairTexts]:
    lines = _read_text_lines(location)
    columns, num_headers = _detect_columns(lines[0] if lines else "", location)
    for line_number, line in enumerate(lines[num_headers:], start=num_headers + 1):
        cells = line.split("\t")
        if len(cells) <= max(columns):
            raise InputError(
                f"{location!r}, line {line_number}: expected {max(columns) + 1} columns with tabs between them, found "
                f"{len(cells)}: {line!r}"
            )
        yield _check_pair(line_number, *(cells[column] for column in columns), files=(location, location))


def _detect_columns(line: str, location: str) -> tuple[tuple[int, ...], int]:
    """Return the columns of score and sentences, and the number of header lines."""
    cells = [cell.strip() for cell in line.split("\t")]
    header = [cell.lower() for cell in cells]
    if set(_HEADER) <= set(header):
        return tuple(header.index(name) for name in _HEADER), 1
    if len(cells) > max(_BENCHMARK) and _is_score(cells[_BENCHMARK[0]]):
        return _BENCHMARK, 0
    if len(cells) == len(_HEADER) and _is_score(cells[0]):
        return (0, 1, 2), 0
    raise InputError(f"{location!r}, line 1: {_LAYOUTS}; found {line!r}")


def _check_pair(line: int, score: str, first: str, second: str, *, files: tuple[str, str]) -> _PairTexts:
    """Check a pair; ``files`` are those of the score and of the sentences."""
    score, first, second = score.strip(), first.strip(), second.strip()
    if not _is_score(score):
        raise InputError(f"{files[0]!r}, line {line}: expected a number as the score, or nothing, found {score!r}")
    if not (first and second):
        raise InputError(f"{files[1]!r}, line {line}: expected two sentences, found an empty one")
    return line, score, first, second


def _is_score(text: str) -> bool:
    try:
        return not text or isfinite(float(text))
    except ValueError:
        return False


def _read_text_lines(location: str) -> list[str]:
    folder, name = file_at(location)
    with _input_errors(location):
        lines = decode_text(folder.read(name), location).split("\n")
    return lines[:-1] if not lines[-1] else lines


@contextmanager
def _input_errors(location: str) -> Iterator[None]:
    try:
        with storage_errors(location):
            yield
    except FileNotFoundError as error:
        raise InputError(f"{location!r} does not exist: {_LAYOUTS}") from error
    except DatasetError as error:
        raise InputError(str(error)) from error


WORD = re.compile(r"\w+")
_CHUNK = 16 << 20
_EXPECTED = "--vectors takes word vectors as text, or vectors of sentences as .npz"


@dataclass(frozen=True)
class Coverage:
    """Coverage of the words of the distinct sentences.

    Attributes:
        words: number of words, repeated ones included.
        known: number of known words.
        blind: number of sentences without a known word.
        unknown: count of each unknown word, the most frequent first.
    """

    words: int
    known: int
    blind: int
    unknown: Mapping[str, int] = field(default_factory=dict)


def coverage_of(sentences: Sequence[Sequence[str]], known: Collection[str]) -> Coverage:
    """Count the known and unknown words of sentences."""
    unknown = Counter(word for words in sentences for word in words if word not in known)
    total = sum(map(len, sentences))
    return Coverage(
        words=total,
        known=total - unknown.total(),
        blind=sum(not any(word in known for word in words) for words in sentences),
        unknown=dict(sorted(unknown.items(), key=lambda item: (-item[1], item[0]))),
    )


def mean_vectors(sentences: Sequence[Sequence[str]], vectors: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the mean vectors of known words, float64 ``[S, E]``; zeros without any."""
    width = len(next(iter(vectors.values()), ()))
    means = np.zeros((len(sentences), width))
    for row, words in zip(means, sentences, strict=True):
        if known := [vectors[word] for word in words if word in vectors]:
            row[:] = np.mean(known, axis=0)
    return means


def read_word_vectors(location: str, words: Collection[str]) -> dict[str, np.ndarray]:
    """Read the vectors of words, looked up as written, then in lower case.

    Returns:
        Float64 ``[E]`` by word, for words with a vector.

    Raises:
        InputError: the file cannot be read, or holds no word vectors.
    """
    forms = {word: (word, word.lower()) for word in words}
    vectors = read_vector_file(location, {form for pair in forms.values() for form in pair}, expected=_EXPECTED).vectors
    # The form as written comes last and replaces the other.
    return {word: vectors[form] for word, pair in forms.items() for form in pair[::-1] if form in vectors}


def read_sentence_vectors(location: str, sentences: Sequence[str]) -> np.ndarray:
    """Read the vectors of sentences from ``.npz``, float64 ``[S, E]``.

    Raises:
        InputError: the file cannot be read, lacks an array, or lacks one of the sentences.
    """
    with open_user_file(location, _EXPECTED) as (file, digest):
        data = bytearray()
        while chunk := file.read(_CHUNK):
            data += chunk
            check_expansion(len(data), digest.bytes, repr(location))
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
                check_expansion(sum(member.file_size for member in arrays.zip.infolist()), digest.bytes, repr(location))
                texts, vectors = (np.asarray(arrays[name]) for name in ("sentences", "vectors"))  # Bytes without npy's mark.
        except (*NPY_ERRORS, KeyError, RuntimeError, struct.error, zipfile.BadZipFile, zlib.error) as error:
            raise InputError(
                f"{location!r} does not hold vectors of sentences ({error}): expected the arrays 'sentences', of texts, and "
                "'vectors', as numpy.savez(FILE, sentences=..., vectors=...) writes them"
            ) from error
    if texts.ndim != 1 or texts.dtype.kind != "U" or vectors.ndim != 2 or len(texts) != len(vectors):
        raise InputError(
            f"{location!r}: expected 'sentences', one text each, and 'vectors', a row each, found arrays of {texts.dtype} "
            f"{texts.shape} and {vectors.dtype} {vectors.shape}"
        )
    if vectors.dtype.kind not in "fiu" or not np.isfinite(vectors).all():
        raise InputError(
            f"{location!r}: expected finite numbers in 'vectors', found {vectors.dtype} or some that are not finite"
        )
    rows = {text: index for index, text in enumerate(texts.tolist())}
    missing = [sentence for sentence in sentences if sentence not in rows]
    if missing:
        raise InputError(
            f"{location!r} lacks {len(missing):,} of {len(sentences):,} sentences, such as {missing[0]!r}: add them to "
            "'sentences', spelled as in the data"
        )
    return vectors[[rows[sentence] for sentence in sentences]].astype(np.float64)


# Differences below the resolution of float32 are noise, e.g. between the cosines of a collapsed model.
_RESOLUTION = 1e-6


@dataclass(frozen=True)
class Correlation:
    """Pearson's r and Spearman's rho, times 100; None if a series is constant."""

    pearson: float | None
    spearman: float | None


def cosines(first: ArrayLike, second: ArrayLike) -> np.ndarray:
    """Return row-wise cosines of ``[N, E]``, float64 ``[N]``; 0 for zero vectors."""
    x, y = np.asarray(first, np.float64), np.asarray(second, np.float64)
    lengths = np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1)
    products = np.einsum("ne,ne->n", x, y)
    return np.clip(np.divide(products, lengths, out=np.zeros_like(products), where=lengths > 0), -1.0, 1.0)


def _constant(values: np.ndarray) -> bool:
    return len(values) < 2 or bool(np.ptp(values) <= _RESOLUTION * np.abs(values).max())
