"""Truecasing of tokenized captions: the trainer and the truecaser of Moses, as pure functions.

Both follow ``train-truecaser.perl`` and ``truecase.perl`` of Moses (the same at commit 3a0631a and today) token by token, and
their model files are exchangeable. The one rule that is ours: forms of equal count are ordered by code point, where the Perl's
choice depends on its hash seed and differs from run to run.

Training is a sum of `count_forms` over captions, in tenths of a token as integers, so that neither the order nor the
partition of the captions matters. `TruecaseModel.from_counts` turns the sum into a model.

Tokens hold no white space. XML tags (``<`` up to the next ``>``, possibly over several tokens) and factors (``|`` and what
follows) are handled as Moses does; tokens that the tokenizer escaped hold neither.
"""

import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipelines.text.moses import lower
from schemas.errors import InputError

__all__ = ["TENTHS", "TruecaseModel", "count_forms", "truecase"]

TENTHS = 10
"""The weight of a token that counts in full."""

_SENTENCE_END = frozenset({".", ":", "?", "!"})
_DELAYED_START = frozenset({"(", "[", '"', "'", "&apos;", "&quot;", "&#91;", "&#93;"})
_CASED = frozenset({"Ll", "Lu", "Lt"})

_ASCII_LETTER = re.compile("[A-Za-z]")
_TAG = re.compile("<[^ ][^>]*>")
# What stands before a "<" or ">", else a whole word: a word with one that is no tag is cut before it.
_WORD = re.compile("[^ <>]+|[^ ]+")
_BARS = re.compile(r"\|*")

_BEST = re.compile(r"([^ ]+) \(([0-9]+(?:\.[0-9]+)?)/([0-9]+(?:\.[0-9]+)?)\)")
_OTHER = re.compile(r" ([^ ]+) \(([0-9]+(?:\.[0-9]+)?)\)")


@dataclass(frozen=True)
class TruecaseModel:
    """What the training captions say about the case of each word.

    Attributes:
        best: The form to use of each type; a type is a form in lower case.
        counts: The weight of each known form, in tenths of a token.
    """

    best: Mapping[str, str]
    counts: Mapping[str, int]

    @classmethod
    def from_counts(cls, counts: Mapping[str, int]) -> "TruecaseModel":
        """Build the model from summed counts: the best form has the highest count, then the smallest code points.

        Args:
            counts: The weight of each form, in tenths: the sum of `count_forms` over all captions.
        """
        best: dict[str, str] = {}
        for form, count in counts.items():
            rival = best.setdefault(lower(form), form)
            if (-count, form) < (-counts[rival], rival):
                best[lower(form)] = form
        return cls(best=best, counts=dict(counts))

    @classmethod
    def from_text(cls, text: str, source: str = "truecase model") -> "TruecaseModel":
        """Read a model file of Moses or of `to_text`; the best form of each line stays the best.

        Args:
            text: The content of the file.
            source: The name of the file, for the message of an error.

        Raises:
            InputError: If a line is not of the format, does not add up, or repeats a type; the message names file and line.
        """
        best: dict[str, str] = {}
        counts: dict[str, int] = {}
        for number, line in enumerate(text.removesuffix("\n").split("\n") if text else (), start=1):
            try:
                forms = _parse_line(line)
                (kind, *strangers) = dict.fromkeys(map(lower, forms))
                if strangers:
                    raise ValueError(f"expected forms of one word, {kind!r} in lower case, found one of {strangers[0]!r}")
                if kind in best:
                    raise ValueError(f"forms of {kind!r} stand on an earlier line too")
            except ValueError as error:
                raise InputError(
                    f"{source}, line {number}: {error}; the line is {line[:200]!r}; train the model again or copy it afresh"
                ) from None
            best[kind] = next(iter(forms))
            counts.update(forms)
        return cls(best=best, counts=counts)

    def to_text(self) -> str:
        """Return the model as a file that ``truecase.perl`` reads: a line per type, sorted by type.

        A line is ``best (count/total) other (count) ...``, the others by falling count, then by code point.
        """
        others: dict[str, list[str]] = {kind: [] for kind in self.best}
        for form in self.counts:
            kind = lower(form)
            if form != self.best[kind]:
                others[kind].append(form)
        lines = []
        for kind, best in sorted(self.best.items()):
            rest = sorted(others[kind], key=lambda form: (-self.counts[form], form))
            total = self.counts[best] + sum(self.counts[form] for form in rest)
            head = f"{best} ({_number(self.counts[best])}/{_number(total)})"
            lines.append(" ".join([head, *(f"{form} ({_number(self.counts[form])})" for form in rest)]) + "\n")
        return "".join(lines)


def count_forms(tokens: Sequence[str], possibly_use_first_token: bool = False) -> Iterator[tuple[str, int]]:
    """Yield each word of a caption whose case is evidence, with its weight in tenths; a word may come more than once.

    The first word of a sentence is no evidence, since its capital may be due to its place.

    Args:
        tokens: The tokens of one caption, not lower-cased.
        possibly_use_first_token: Count a first word too if it does not begin with a capital, and count it one tenth if it
            is the only word of the caption (``--possiblyUseFirstToken`` of Moses).
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
        if _has_case(word):
            if not first:
                yield word, TENTHS
            elif possibly_use_first_token:
                if word[0] == lower(word[0]):
                    yield word, TENTHS
                elif len(words) == 1:
                    yield word, 1
        # Also after a word without case: Moses counts the word behind `. "` in full.
        first = False


def truecase(tokens: Sequence[str], model: TruecaseModel) -> list[str]:
    """Return the tokens in the case that the model has learned.

    The first word of a sentence takes the best form of its type; any other keeps its form if it is known, else takes the best.
    An XML tag is glued to the word before it, as the Perl prints it, so only with tags may the number of tokens change.

    Args:
        tokens: The tokens of one caption, not lower-cased.
        model: What `TruecaseModel.from_counts` made of the training captions.
    """
    line = " ".join(tokens)
    if "<" in line or ">" in line or "|" in line:
        return _truecase_marked(line, model)
    return _truecase_words(tokens, model)


def _truecase_words(words: Sequence[str], model: TruecaseModel) -> list[str]:
    """Truecase the words of one caption, which holds neither tags nor factors."""
    best, known = model.best, model.counts
    forms = []
    start = True
    for word in words:
        forms.append(word if not start and word in known else best.get(lower(word), word))
        # The word as it was read decides, not its new form.
        start = word in _SENTENCE_END or (start and word in _DELAYED_START)
    return forms


def _truecase_marked(line: str, model: TruecaseModel) -> list[str]:
    """Truecase a line with tags or factors: a word is what stands before its first bar."""
    words, tags = _split_tags(line, factors=True)
    # A word that begins with a bar has no factors.
    heads = [word if word.startswith("|") else word.partition("|")[0] for word in words]
    forms = _truecase_words(heads, model)
    pieces = []
    for i, (word, head, form) in enumerate(zip(words, heads, forms, strict=True)):
        # The Perl prints tags in place of the space before a word.
        pieces.append(tags[i] or (" " if i else ""))
        pieces.append(form + word[len(head) :])
    pieces.append(tags[-1].removesuffix(" "))
    return [token for token in "".join(pieces).split(" ") if token]


def _split_tags(line: str, factors: bool) -> tuple[list[str], list[str]]:
    """Split a line into its words and the XML tags before each word, each with a space behind it; the last tags end the line.

    Args:
        line: Tokens joined by single spaces.
        factors: Whether a tag right behind a bar is a factor of the word, as the truecaser has it and the trainer not.
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


def _has_case(word: str) -> bool:
    """Return whether a word has an upper-case, lower-case or title-case letter: what Perl calls Lu, Ll and Lt."""
    if _ASCII_LETTER.search(word):
        return True
    return not word.isascii() and any(unicodedata.category(character) in _CASED for character in word)


def _parse_line(line: str) -> dict[str, int]:
    """Return the counts of the forms of a model line, in tenths and in its order, the best form first.

    Raises:
        ValueError: If the line is not of the format or does not add up.
    """
    if not (best := _BEST.match(line)):
        raise ValueError("expected 'best (count/total) other (count) ...'")
    forms = {best[1]: _tenths(best[2])}
    position = best.end()
    while position < len(line):
        if not (other := _OTHER.match(line, position)):
            raise ValueError(f"expected ' other (count)' at column {position + 1}")
        if other[1] in forms:
            raise ValueError(f"the form {other[1]!r} stands on the line twice")
        forms[other[1]] = _tenths(other[2])
        position = other.end()
    total = _tenths(best[3])
    # A line that was cut between two forms is well formed, and only this shows that known forms are lost.
    if sum(forms.values()) != total:
        raise ValueError(f"the counts add up to {_number(sum(forms.values()))}, not to the total {_number(total)}")
    return forms


def _tenths(number: str) -> int:
    # The Perl adds up tenths as floating-point numbers and prints the noise: 7118.99999999999.
    return round(float(number) * TENTHS)


def _number(tenths: int) -> str:
    """Print a count as Perl does: no decimals for whole numbers."""
    whole, tenth = divmod(tenths, TENTHS)
    return f"{whole}.{tenth}" if tenth else str(whole)
