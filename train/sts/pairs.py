"""Sentence pairs with human scores, as text files of the shared tasks.

Sentence pairs are UTF-8 with tabs between the columns and no quoting, in one of the layouts of the shared tasks:

* ``STS.input.X.txt`` with two sentences a line, further columns allowed, and ``STS.gs.X.txt`` with the score of each line: the
  shared tasks since 2012 (Agirre et al.);
* a table with a header that names ``score``, ``sentence1`` and ``sentence2``, or with these three columns and no header;
* the STS benchmark (``sts-train.csv``): genre, file, year, number, score, two sentences, further columns allowed.

Pairs without a score are left out, as in the shared task of 2015, which published 1,500 pairs of images and scored 750.

Letters: ``N`` values.
"""

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
from schemas.escapes import short_names
from schemas.storage.folder import Folder, file_at
from schemas.storage.locations import absolute_location, check_location
from schemas.text import decode_text
from train.sts.correlation import Correlation, is_constant

_INPUT = re.compile(r"STS\.(input|gs)\.(.+)\.txt")
_AFFIXES = re.compile(r"(?:STS\.input\.)?([^/]+?)(?:\.txt|\.tsv|\.csv)?$")
_TABLES = (".tsv", ".csv")
_HEADER = ("score", "sentence1", "sentence2")
_BENCHMARK = (4, 5, 6)
_PairTexts: TypeAlias = tuple[int, str, str, str]  # Line, score, sentences.
_LAYOUTS = (
    "expected STS.input.X.txt beside STS.gs.X.txt; a table with tabs between the columns score, sentence1 "
    "and sentence2; or a file of the STS benchmark"
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
        if is_constant(x) or is_constant(y):
            return Correlation(None, None)
        pairs = (x, y), (rankdata(x), rankdata(y))
        return Correlation(*(100 * float(pearsonr(*pair).statistic) for pair in pairs))


def read_sts(locations: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> list[StsPairs]:
    """Read sentence pairs.

    Args:
        locations: files and folders. A folder contributes its files in the first layout, ``.tsv`` and
            ``.csv``. In the first layout the path of either file will do.

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
    paths = [_AFFIXES.sub(r"\1", file) for file in files]
    stems = [path.rpartition("/")[2] for path in paths]
    repeated = [path for path, stem in zip(paths, stems, strict=True) if stems.count(stem) > 1]
    tails = dict(zip(repeated, short_names(repeated), strict=True)) if repeated else {}
    labels = [tails.get(path, stem) for path, stem in zip(paths, stems, strict=True)]
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
            f"{location!r} has {len(sentences):,} lines and {gold!r} has {len(scores):,}: expected one "
            "score, or an empty line, for each pair of sentences; fetch both files again"
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
                f"{location!r}, line {line_number}: expected {max(columns) + 1} columns with tabs between "
                f"them, found {len(cells)}: {line!r}"
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
        yield
    except FileNotFoundError as error:
        raise InputError(f"{location!r} does not exist: {_LAYOUTS}") from error
    except DatasetError as error:
        raise InputError(str(error)) from error
