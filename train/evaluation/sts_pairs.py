"""Sentence pairs with the similarity that people gave them, as the shared tasks on semantic textual similarity publish them.

Three layouts are read, all UTF-8 with tabs between the columns and no quoting:

* ``STS.input.X.txt`` with two sentences a line, and more columns or none, beside ``STS.gs.X.txt`` with the score of each line: the
  shared tasks since 2012 (Agirre et al.);
* a table with a header that names ``score``, ``sentence1`` and ``sentence2``, or without a header these three in this order;
* the STS benchmark (``sts-train.csv``): genre, file, year, number, score, two sentences, and more columns or none.

A pair without a score is left out, as the shared task of 2015 does: it published 1,500 pairs of images and scored 750.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from schemas.errors import DatasetError, InputError
from schemas.storage.folder import Folder
from schemas.storage.locations import absolute_location, check_location
from schemas.storage.storage_errors import storage_errors
from schemas.text import decode_text
from train.evaluation.correlations import Correlation, correlation

_INPUT = re.compile(r"STS\.(input|gs)\.(.+)\.txt")
_TABLES = (".tsv", ".csv")
_HEADER = ("score", "sentence1", "sentence2")
_BENCHMARK = (4, 5, 6)
_Row: TypeAlias = tuple[int, str, str, str]  # Line, score, sentences.
_LAYOUTS = (
    "expected STS.input.X.txt beside STS.gs.X.txt; a table with tabs between the columns score, sentence1 and sentence2; or a file "
    "of the STS benchmark"
)


@dataclass(frozen=True)
class StsPairs:
    """Sentence pairs with their scores.

    Attributes:
        name: name of the data set.
        location: the file of the sentences.
        scores: how alike people found the sentences, mostly 0 to 5.
        first: the first sentence of each pair, as written.
        second: the second one.
        lines: the line of each pair in the file, from 1.
        unscored: number of pairs without a score, which are left out.
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
        """The different sentences, in the order in which they first occur."""
        return tuple(dict.fromkeys(sentence for pair in zip(self.first, self.second, strict=True) for sentence in pair))

    def correlation(self, similarities: ArrayLike) -> Correlation:
        """Return the correlations, times 100, of the scores with similarities of the pairs ``[N]``.

        Raises:
            ValueError: there are more or fewer similarities than pairs.
        """
        return correlation(np.array(self.scores), similarities)


def read_sts(locations: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> list[StsPairs]:
    """Read sentence pairs; the module says in which layouts.

    Args:
        locations: files, and folders: of these all files in the first layout, and those whose names end in ``.tsv`` or ``.csv``.
            In the first layout either file stands for both.

    Returns:
        The data sets in the order of ``locations``, each once, those of a folder sorted by name. One is called after its file,
        ``images`` for ``STS.input.images.txt`` and ``images-2014`` for ``images-2014.tsv``; where several would have the same
        name, after its folder, too.

    Raises:
        InputError: there is no such file or folder, or it does not hold such pairs; the message names file and line.
    """
    given = [locations] if isinstance(locations, (str, os.PathLike)) else locations
    files = list(dict.fromkeys(file for location in given for file in _files_at(os.fspath(location))))
    return [_read(file, label) for file, label in zip(files, _labels(files), strict=True)]


def _files_at(location: str) -> Iterator[str]:
    """Yield the files of pairs at a location; in the first layout those of the sentences."""
    check_location(location)
    location = absolute_location(location)
    with _input_errors(location):
        folder = Folder(location)
        kind = folder.kind()
        if kind == "nothing":
            raise InputError(f"there is no file or folder {location!r}: give sentence pairs of a shared task, or runs")
        if kind == "file":
            above, _, name = location.rpartition("/")
            yield above + "/" + _INPUT.sub(r"STS.input.\2.txt", name)
            return
        names = [name for name in folder.children() if name.startswith("STS.input.") or name.endswith(_TABLES)]
    if not names:
        raise InputError(f"{location!r} holds no sentence pairs: {_LAYOUTS}")
    yield from map(folder.path_of, names)


def _labels(files: Sequence[str]) -> list[str]:
    """Return a name for each file: its own, with those of as many folders above it as tell all apart."""
    parts = [file.split("/") for file in files]
    names = [_INPUT.sub(r"\2", path[-1]) for path in parts]
    names = [os.path.splitext(name)[0] if name.endswith((*_TABLES, ".txt")) else name for name in names]  # noqa: PTH122
    labels, above = list(names), 1
    while len(set(labels)) < len(labels) and above < max(map(len, parts)):
        again = {label for label in labels if labels.count(label) > 1}
        labels = [
            "/".join([*path[-1 - above : -1], name]) if label in again else label
            for path, name, label in zip(parts, names, labels, strict=True)
        ]
        above += 1
    return labels


def _read(location: str, label: str) -> StsPairs:
    name = location.rpartition("/")[2]
    rows = list(_from_inputs(location) if _INPUT.fullmatch(name) else _from_table(location))
    scored = [(float(score), first, second, line) for line, score, first, second in rows if score]
    if not scored:
        raise InputError(f"{location!r} holds no pair with a score: {_LAYOUTS}")
    scores, first, second, lines = zip(*scored, strict=True)
    return StsPairs(label, location, scores, first, second, lines, unscored=len(rows) - len(scored))


def _from_inputs(location: str) -> Iterator[_Row]:
    gold = location.replace("STS.input.", "STS.gs.")
    sentences, scores = _lines(location), _lines(gold)
    if len(sentences) != len(scores):
        raise InputError(
            f"{location!r} has {len(sentences):,} lines and {gold!r} has {len(scores):,}: expected one score, or an empty line, "
            "for each pair of sentences; fetch both files again"
        )
    for number, (pair, score) in enumerate(zip(sentences, scores, strict=True), start=1):
        cells = pair.split("\t")
        if len(cells) < 2:
            raise InputError(f"{location!r}, line {number}: expected two sentences with a tab between them, found {pair!r}")
        yield _row(number, score.split("\t")[0], *cells[:2], places=(gold, location))


def _from_table(location: str) -> Iterator[_Row]:
    lines = _lines(location)
    columns, begin = _columns(lines[0] if lines else "", location)
    for number, line in enumerate(lines[begin:], start=begin + 1):
        cells = line.split("\t")
        if len(cells) <= max(columns):
            raise InputError(
                f"{location!r}, line {number}: expected {max(columns) + 1} columns with tabs between them, found {len(cells)}: "
                f"{line!r}"
            )
        yield _row(number, *(cells[column] for column in columns), places=(location, location))


def _columns(line: str, location: str) -> tuple[tuple[int, ...], int]:
    """Return the columns of the score and the two sentences, and the number of lines before the first pair."""
    cells = [cell.strip() for cell in line.split("\t")]
    header = [cell.lower() for cell in cells]
    if set(_HEADER) <= set(header):
        return tuple(header.index(name) for name in _HEADER), 1
    if len(cells) > max(_BENCHMARK) and _is_score(cells[_BENCHMARK[0]]):
        return _BENCHMARK, 0
    if len(cells) == len(_HEADER) and _is_score(cells[0]):
        return (0, 1, 2), 0
    raise InputError(f"{location!r}, line 1: {_LAYOUTS}; found {line!r}")


def _row(line: int, score: str, first: str, second: str, *, places: tuple[str, str]) -> _Row:
    """Check a pair; ``places`` are the files of the score and of the sentences."""
    score = score.strip()
    if not _is_score(score):
        raise InputError(f"{places[0]!r}, line {line}: expected a number as the score, or nothing, found {score!r}")
    for sentence in (first, second):
        if not sentence.strip():
            raise InputError(f"{places[1]!r}, line {line}: expected two sentences, found an empty one")
    return line, score, first.strip(), second.strip()


def _is_score(text: str) -> bool:
    try:
        return not text or isfinite(float(text))
    except ValueError:
        return False


def _lines(location: str) -> list[str]:
    folder, _, name = location.rpartition("/")
    with _input_errors(location):
        lines = decode_text(Folder(folder or "/").read(name), location).split("\n")
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
