"""Truecasing of tokenized captions: the trainer and the truecaser of Moses, and their models on disk.

Both follow ``train-truecaser.perl`` and ``truecase.perl`` of Moses (the same at commit 3a0631a and today) token by token, and
the model files are interchangeable. One rule is our own: forms of equal count are ordered by code point, whereas the choice of
the Perl depends on its hash seed and differs from run to run.

Training is a sum of `count_forms` over captions, in tenths of a token as integers, so that neither the order nor the
partition of the captions matters. `TruecaseModel.from_counts` turns the sum into a model.

Tokens hold no white space. XML tags (``<`` up to the next ``>``, possibly over several tokens) and factors (``|`` and the
text after it) are handled as Moses does; tokens that the tokenizer escaped hold neither.

A captions dataset has one model per language, in Moses' own format, in its folder ``_truecaser``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pipelines.text.moses import LETTERS, lower
from schemas.errors import InputError
from schemas.fingerprints import sha256_of_bytes
from schemas.keys import check_language
from schemas.storage.folder import Folder
from schemas.text import decode_text

TENTHS = 10
"""The weight of a token that counts in full."""

_SENTENCE_END = frozenset({".", ":", "?", "!"})
_DELAYED_START = frozenset({"(", "[", '"', "'", "&apos;", "&quot;", "&#91;", "&#93;"})

_CASED = re.compile(f"[{LETTERS['CASED']}]")
_TAG = re.compile("<[^ ][^>]*>")
# The text before a "<" or ">", else a whole word: a word that contains one outside a tag is cut before it.
_WORD = re.compile("[^ <>]+|[^ ]+")
_BARS = re.compile(r"\|*")

_BEST = re.compile(r"([^ ]+) \(([0-9]+(?:\.[0-9]+)?)/([0-9]+(?:\.[0-9]+)?)\)")
_OTHER = re.compile(r" ([^ ]+) \(([0-9]+(?:\.[0-9]+)?)\)")


@dataclass(frozen=True)
class TruecaseModel:
    """Case of each word, as learned from the training captions.

    Attributes:
        best: form to use for each type; a type is a form in lower case.
        counts: weight of each known form, in tenths of a token.
    """

    best: Mapping[str, str]
    counts: Mapping[str, int]

    @classmethod
    def from_counts(cls, counts: Mapping[str, int]) -> TruecaseModel:
        """Build the model from the sum of `count_forms` over all captions.

        The best form has the highest count, then the smallest code points.
        """
        best: dict[str, str] = {}
        for form, count in counts.items():
            rival = best.setdefault(lower(form), form)
            if (-count, form) < (-counts[rival], rival):
                best[lower(form)] = form
        return cls(best=best, counts=dict(counts))

    @classmethod
    def from_text(cls, text: str, source: str = "truecase model") -> TruecaseModel:
        """Read a model file of Moses or of `to_text`; the best form of each line stays the best.

        Args:
            text: content of the file.
            source: name of the file, for error messages.

        Raises:
            InputError: a line does not have the format, does not add up, or repeats a type; the message names file and line.
        """
        best: dict[str, str] = {}
        counts: dict[str, int] = {}
        for number, line in enumerate(text.removesuffix("\n").split("\n") if text else (), start=1):
            try:
                forms = _parse_line(line)
                (word_type, *other_types) = dict.fromkeys(map(lower, forms))
                if other_types:
                    raise ValueError(
                        f"expected forms of one word, {word_type!r} in lower case, found one of {other_types[0]!r}"
                    )
                if word_type in best:
                    raise ValueError(f"an earlier line also has forms of {word_type!r}")
            except ValueError as error:
                raise InputError(
                    f"{source}, line {number}: {error}; the line is {line[:200]!r}; train the model again or copy it again"
                ) from None
            best[word_type] = next(iter(forms))
            counts.update(forms)
        return cls(best=best, counts=counts)

    def to_text(self) -> str:
        """Return the model as the text of a file that ``truecase.perl`` reads: one line per type, sorted by type.

        A line is ``best (count/total) other (count) ...``, the other forms by decreasing count, then by code point.
        """
        others: dict[str, list[str]] = {word_type: [] for word_type in self.best}
        for form in self.counts:
            word_type = lower(form)
            if form != self.best[word_type]:
                others[word_type].append(form)
        lines = []
        for word_type, best in sorted(self.best.items()):
            forms = sorted(others[word_type], key=lambda form: (-self.counts[form], form))
            total = self.counts[best] + sum(self.counts[form] for form in forms)
            head = f"{best} ({_number(self.counts[best])}/{_number(total)})"
            lines.append(" ".join([head, *(f"{form} ({_number(self.counts[form])})" for form in forms)]) + "\n")
        return "".join(lines)


def count_forms(tokens: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Yield each word of a caption whose case is evidence, with its weight in tenths; a word may occur more than once.

    The first word of a sentence is no evidence, since its capital may be due to its position.
    """
    line = " ".join(tokens)
    words = _split_tags(line, factors=False)[0] if "<" in line or ">" in line else tokens
    start = 0
    while start < len(words) and words[start] in _DELAYED_START:
        start += 1
    first = True
    previous = ""
    for word in words[start:]:
        first = first or previous in _SENTENCE_END
        previous = word
        if not first and _CASED.search(word):  # A letter of the category Lu, Ll or Lt.
            yield word, TENTHS
        # This holds after a word without case as well: Moses counts the word behind `. "` in full.
        first = False


def truecase(tokens: Sequence[str], model: TruecaseModel) -> list[str]:
    """Return the tokens in the case that the model has learned.

    The first word of a sentence takes the best form of its type; any other word keeps a known form and else takes the best.
    An XML tag is joined to the word before it, as the Perl prints it, so only tags can change the number of tokens.
    """
    line = " ".join(tokens)
    if "<" in line or ">" in line or "|" in line:
        return _truecase_marked(line, model)
    return _truecase_words(tokens, model)


def _truecase_words(words: Sequence[str], model: TruecaseModel) -> list[str]:
    """Truecase the words of one caption without tags and factors."""
    best, known = model.best, model.counts
    forms = []
    start = True
    for word in words:
        forms.append(word if not start and word in known else best.get(lower(word), word))
        # The word as read decides, not its new form.
        start = word in _SENTENCE_END or (start and word in _DELAYED_START)
    return forms


def _truecase_marked(line: str, model: TruecaseModel) -> list[str]:
    """Truecase a line with tags or factors; the word proper is the part before the first bar."""
    words, tags = _split_tags(line, factors=True)
    # A word that begins with a bar has no factors.
    heads = [word if word.startswith("|") else word.partition("|")[0] for word in words]
    forms = _truecase_words(heads, model)
    pieces = []
    for i, (word, head, form) in enumerate(zip(words, heads, forms, strict=True)):
        # The Perl prints tags instead of the space before a word.
        pieces.append(tags[i] or (" " if i else ""))
        pieces.append(form + word[len(head) :])
    pieces.append(tags[-1].removesuffix(" "))
    return [token for token in "".join(pieces).split(" ") if token]


def _split_tags(line: str, factors: bool) -> tuple[list[str], list[str]]:
    """Split a line into words and XML tags.

    Args:
        line: tokens joined by single spaces.
        factors: whether a tag right behind a bar is a factor of the word, as it is for the truecaser but not for the trainer.

    Returns:
        The words, and one entry more of tags: those before each word, then those at the end of the line, each followed by a
        space.
    """
    words: list[str] = []
    tags = [""]
    position = 0
    while position < len(line):
        glued = line[position] != " "
        position += not glued
        if tag := _TAG.match(line, position):
            position = tag.end()
            if factors and glued and words and words[-1].endswith("|"):
                bars = _BARS.match(line, position)
                position = bars.end() if bars else position
                words[-1] += line[tag.start() : position]
            else:
                tags[-1] += tag[0] + " "
        elif word := _WORD.match(line, position):
            position = word.end()
            words.append(word[0])
            tags.append("")
    return words, tags


def _parse_line(line: str) -> dict[str, int]:
    """Return the counts of the forms on a line of a model, in tenths and in the order of the line: the best form first.

    Raises:
        ValueError: the line does not have the format, or its counts do not add up to its total.
    """
    if not (best := _BEST.match(line)):
        raise ValueError("expected 'best (count/total) other (count) ...'")
    forms = {best[1]: _tenths(best[2])}
    position = best.end()
    while position < len(line):
        if not (other := _OTHER.match(line, position)):
            raise ValueError(f"expected ' other (count)' at column {position + 1}")
        if other[1] in forms:
            raise ValueError(f"the line has the form {other[1]!r} twice")
        forms[other[1]] = _tenths(other[2])
        position = other.end()
    total = _tenths(best[3])
    # A line that was cut between two forms is still well formed; only the total shows that forms are missing.
    if sum(forms.values()) != total:
        raise ValueError(f"the counts add up to {_number(sum(forms.values()))}, expected the total {_number(total)}")
    return forms


def _tenths(number: str) -> int:
    # The Perl adds up tenths as floating-point numbers and prints the rounding error: 7118.99999999999.
    return round(float(number) * TENTHS)


def _number(tenths: int) -> str:
    """Format a count as Perl prints it: without decimals if it is whole."""
    whole, tenth = divmod(tenths, TENTHS)
    return f"{whole}.{tenth}" if tenth else str(whole)


TRUECASER_FOLDERS = ("_truecaser", "truecaser")
"""The folder in this version of the format of datasets, then that in version 1."""

TRUECASER_FILES = rf"({'|'.join(TRUECASER_FOLDERS)})/[A-Za-z0-9-]+\.model"
"""Regular expression of the paths of truecasers within a captions dataset."""


def truecaser_inputs(texts: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return what truecasers add to the inputs of a dataset: name, size in bytes and digest of each text, by language."""
    return [
        {"name": f"truecaser/{language}.model", "bytes": len(text.encode()), "sha256": sha256_of_bytes(text.encode())}
        for language, text in sorted(texts.items())
    ]


def load_truecasers(location: str) -> dict[str, str]:
    """Return by language the text of every ``LANGUAGE.model`` in a folder, or in its folder ``_truecaser`` if there is one.

    Raises:
        InputError: the folder holds no model, or a broken one.
        UsageError: the name of a file is not a language tag.
    """
    folder = Folder(location)
    below = next((name for name in TRUECASER_FOLDERS if folder.children(name)), None)
    if below is not None:
        folder = Folder(folder.path_of(below))
    texts: dict[str, str] = {}
    for name in folder.children():
        if not name.endswith(".model"):
            continue
        text = _checked_text(folder.read(name), folder.path_of(name))
        texts[check_language(name.removesuffix(".model"))] = text
    if not texts:
        raise InputError(
            f"--truecaser {location!r} holds no LANGUAGE.model, such as en.model: give the folder of a captions dataset "
            "made with --recipe moses-truecase, or a folder of models in Moses' format"
        )
    return texts


def write_truecaser(language: str, text: str, folder: Folder) -> str:
    """Write a truecaser into a captions dataset, and return its path there."""
    name = f"{TRUECASER_FOLDERS[0]}/{language}.model"
    folder.write(name, text.encode())
    return name


@lru_cache(maxsize=64)
def parse_truecaser(text: str) -> TruecaseModel:
    """Parse the text of a model, once per process."""
    return TruecaseModel.from_text(text)


@lru_cache(maxsize=64)
def _checked_text(data: bytes, location: str) -> str:
    """Return the text of a file and check that it is a model, once per process: queries are tokenized one at a time."""
    text = decode_text(data, location)
    TruecaseModel.from_text(text, source=location)
    return text
