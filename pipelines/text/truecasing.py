"""Trainer and truecaser of Moses for tokenized captions, and their model files.

Both follow ``train-truecaser.perl`` and ``truecase.perl`` of Moses (the same at commit 3a0631a and today), and the model files are
interchangeable. One rule is ours: forms of equal count are ordered by code point; in the Perl they depend on its hash seed.

Training is a sum of `count_forms` over captions, in tenths of a token as integers, independent of order and
partition. `TruecaseModel.from_counts` turns the sum into a model.

Tokens hold no white space, and no ``<``, ``>`` or ``|``, which the tokenizer escapes: XML tags and factors are not implemented.

A captions dataset has one model per language, in Moses' own format, in its folder ``_truecaser``.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import dropwhile, pairwise
from typing import Any, Self

from pipelines.running.process_pool import by_key
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

_CASED = re.compile(f"[{LETTERS['CASED']}]")  # The categories Lu, Ll and Lt.

_BEST = re.compile(r"([^ ]+) \(([0-9]+(?:\.[0-9]+)?)/([0-9]+(?:\.[0-9]+)?)\)")
_OTHER = re.compile(r" ([^ ]+) \(([0-9]+(?:\.[0-9]+)?)\)")
_FOLDER = "_truecaser"
TRUECASER_FILES = rf"{_FOLDER}/[A-Za-z0-9-]+\.model"
"""Regular expression of the paths of truecasers within a captions dataset."""


@dataclass(frozen=True)
class TruecaseModel:
    """Learned case of each word.

    Attributes:
        best: best form of each type; a type is a form in lower case.
        counts: weight of each known form, in tenths of a token.
    """

    best: Mapping[str, str]
    counts: Mapping[str, int]

    @classmethod
    def from_counts(cls, counts: Mapping[str, int]) -> Self:
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
    def from_text(cls, text: str, source: str = "truecase model") -> Self:
        """Read a model file of Moses or of `to_text`; its best forms stay the best.

        Raises:
            InputError: a line does not have the format, does not add up, or repeats a type; the message names file and line.
        """
        best: dict[str, str] = {}
        counts: dict[str, int] = {}
        for line_number, line in enumerate(text.removesuffix("\n").split("\n") if text else (), start=1):
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
                    f"{source}, line {line_number}: {error}; the line is {line[:200]!r}; train the model again or copy it again"
                ) from None
            best[word_type] = next(iter(forms))
            counts.update(forms)
        return cls(best=best, counts=counts)

    def to_text(self) -> str:
        """Return the text of a model file for ``truecase.perl``, a line per type, sorted.

        A line is ``best (count/total) other (count) ...``, the other forms by decreasing count, then by code point.
        """
        forms_by_type = by_key((lower(form), form) for form in self.counts)
        lines = []
        for word_type, best in sorted(self.best.items()):
            others = (form for form in forms_by_type[word_type] if form != best)
            forms = sorted(others, key=lambda form: (-self.counts[form], form))
            total = self.counts[best] + sum(self.counts[form] for form in forms)
            head = f"{best} ({_number(self.counts[best])}/{_number(total)})"
            lines.append(" ".join([head, *(f"{form} ({_number(self.counts[form])})" for form in forms)]) + "\n")
        return "".join(lines)


def count_forms(tokens: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Yield words of a caption with evidence of their case, and weights in tenths.

    The first word of a sentence is no evidence, since its capital may be due to its position.
    """
    words = list(dropwhile(_DELAYED_START.__contains__, tokens))
    for previous, word in pairwise(words):
        # After a word without case as well: Moses counts the word after `. "` in full.
        if previous not in _SENTENCE_END and _CASED.search(word):
            yield word, TENTHS


def truecase(tokens: Sequence[str], model: TruecaseModel) -> list[str]:
    """Return the tokens in their learned case.

    The first word of a sentence takes the best form of its type. Any other word keeps a known form, else takes the best.
    """
    best, counts = model.best, model.counts
    forms = []
    is_start = True
    for token in tokens:
        forms.append(token if not is_start and token in counts else best.get(lower(token), token))
        # The token as read decides, not its new form.
        is_start = token in _SENTENCE_END or (is_start and token in _DELAYED_START)
    return forms


def _parse_line(line: str) -> dict[str, int]:
    """Parse a line of a model into forms and counts in tenths, the best form first.

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


def _tenths(text: str) -> int:
    # The Perl adds up tenths as floating-point numbers and prints the rounding error: 7118.99999999999.
    return round(float(text) * TENTHS)


def _number(tenths: int) -> str:
    """Format a count as Perl prints it: without decimals if it is whole."""
    whole, tenth = divmod(tenths, TENTHS)
    return f"{whole}.{tenth}" if tenth else str(whole)


def truecaser_inputs(texts: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return names, sizes in bytes and digests of truecasers, as inputs of a dataset."""
    return [
        {"name": f"truecaser/{language}.model", "bytes": len(text.encode()), "sha256": sha256_of_bytes(text.encode())}
        for language, text in sorted(texts.items())
    ]


def load_truecasers(location: str) -> dict[str, str]:
    """Return the texts of the files ``LANGUAGE.model`` of a folder by language.

    The folder may also be a captions dataset, with models in its subfolder ``_truecaser``.

    Raises:
        InputError: the folder holds no model, or a broken one.
        UsageError: the name of a file is not a language tag.
    """
    folder = Folder(location)
    if folder.children(_FOLDER):
        folder = Folder(folder.path_of(_FOLDER))
    texts: dict[str, str] = {}
    for name in folder.children():
        if not name.endswith(".model"):
            continue
        text = decode_text(folder.read(name), folder.path_of(name))
        parse_truecaser(text, folder.path_of(name))
        texts[check_language(name.removesuffix(".model"))] = text
    if not texts:
        raise InputError(
            f"--truecaser {location!r} holds no LANGUAGE.model, such as en.model: give the folder of a "
            "captions dataset made with --recipe moses-truecase, or a folder of models in Moses' format"
        )
    return texts


def write_truecaser(language: str, text: str, folder: Folder) -> str:
    """Write a truecaser into a captions dataset, and return its path there."""
    name = f"{_FOLDER}/{language}.model"
    folder.put(name, text.encode())
    return name


@lru_cache(maxsize=64)
def parse_truecaser(text: str, source: str = "truecase model") -> TruecaseModel:
    """Parse the text of a model, once per process: queries come one at a time."""
    return TruecaseModel.from_text(text, source)
