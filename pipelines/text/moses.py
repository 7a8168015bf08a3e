"""Text recipes: Moses' lower-casing, normalization and tokenization.

The reference is the output of ``lowercase.perl``, ``normalize-punctuation.perl -l LANGUAGE`` and ``tokenizer.perl -l LANGUAGE``
at Moses commit 3a0631a (2017-12-12), the origin of the ``tok`` files of Multi30K. Newer versions of Moses tokenize some lines
differently. The rules of the normalizer and the abbreviations come from sacremoses; if the two differ, this module follows the
Perl. For speed, only rules that can match are applied.

Letters, digits, case and white space are those of Unicode 14.0 (Perl 5.36) in any version of Python;
``letters.toml`` lists them. Unlike sacremoses, the Perl splits words of Indic scripts at virama and nukta,
which are not alphabetic. It does not split runs of Han, kana and Hangul.

Text is one caption, a line without its line end, so split files on LF only. Language tags are BCP 47; the
primary subtag selects the rules (``pt`` for ``pt-BR``).

Known differences from the Perl, without effect on Multi30K:

* The nonbreaking prefixes of es, is, it, nl, sk, sv and ta differ in a few entries. sacremoses has lists for some languages for
  which Moses falls back to English.
* Text that contains Moses' own placeholder ``DOTMULTI``.
"""

import difflib
import functools
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from importlib.resources import files
from typing import Literal

from schemas.errors import UsageError
from schemas.parameters import TextRecipe

MOSES_COMMIT = "3a0631a"

_Rule = tuple[re.Pattern[str], str]

_TABLE = tomllib.loads(files("pipelines.text").joinpath("letters.toml").read_text())
_LOWER_OFFSETS: list[tuple[int, int, int, int]] = _TABLE.pop("LOWER_OFFSETS")

LETTERS: dict[str, str] = {
    name: content.replace("\n", "").encode().decode("unicode_escape") for name, content in _TABLE.items()
}
"""Contents of character classes of `re`: ALPHABETIC, CASED, DECIMAL, LOWER_CASE, NUMERIC and WHITE_SPACE."""

_WHITE_SPACE = LETTERS["WHITE_SPACE"]
_BLANK = re.compile(f"[{_WHITE_SPACE}]*")
# White space in Python, but not in Perl: U+001C..U+001F are removed before text is split.
_JUNK = re.compile(r"[\x00-\x08\x0e-\x1f]")
_WORD = re.compile(rf"[^{_WHITE_SPACE}\x1c-\x1f]+")
_BEYOND_LATIN = re.compile("[^\0-\u024f]")
_BEYOND_BMP = re.compile("[^\0-\uffff]")
# Up to here, every code point is assigned and its case is stable, so `str` methods are exact.
_LATIN = "\u024f"
_DOTS = re.compile(r"\.{2,}")
_DOTS_MARKER = re.compile("((?:DOT)+)(MULTI)?")  # Also without the end, so that n markers are not tried from each start.
# The Perl's pattern tries each of n full stops without a quote as the first: n**2 steps. The linear one consumes all at once.
_MOVED_FULL_STOPS = r'(\.+)"(\s*[^<])'
_LINEAR_FULL_STOPS = r'(\.+)(?:"(\s*[^<]))?'

# Every rule of the normalizer needs one of these; most captions contain none.
_NORMALIZABLE = re.compile("[\r()%:;`\"„“”–—´‘’‚…«»\xa0]|  |''")

# The ampersand comes first: later, it would escape the entities of the others.
_ENTITIES = (
    *(("&", "&amp;"), ("|", "&#124;"), ("<", "&lt;"), (">", "&gt;")),
    *(("'", "&apos;"), ('"', "&quot;"), ("[", "&#91;"), ("]", "&#93;")),
)

_SPLITS_CONTRACTIONS_LEFT = frozenset({"fr", "it", "ga"})
_OWN_QUOTE_RULES = frozenset({"en", "cs", "cz", "de", "es", "fr"})


@dataclass(frozen=True)
class Recipe:
    """Steps from text to tokens; they run in the order of the fields.

    Attributes:
        tokenizer: ``moses``, with special characters escaped (``&apos;``), or ``whitespace``, which only splits.
        truecase: whether tokens are truecased with a model learned from the training split.
    """

    name: str
    lowercase: bool
    normalize: bool
    tokenizer: Literal["moses", "whitespace"]
    truecase: bool

    def parameters(self) -> TextRecipe:
        """Return the parameters that affect the tokens, for a manifest."""
        uses_moses = self.normalize or self.tokenizer == "moses"
        return TextRecipe(
            recipe=self.name,
            lowercase=self.lowercase,
            normalize=self.normalize,
            tokenizer=self.tokenizer,
            truecase=self.truecase,
            escape=True if self.tokenizer == "moses" else None,
            moses_commit=MOSES_COMMIT if uses_moses else None,
            sacremoses=version("sacremoses") if uses_moses else None,
        )


RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("multi30k-lc", lowercase=True, normalize=True, tokenizer="moses", truecase=False),  # The tok files of Multi30K.
        Recipe("moses-truecase", lowercase=False, normalize=False, tokenizer="moses", truecase=True),
        Recipe("raw", lowercase=False, normalize=False, tokenizer="whitespace", truecase=False),
    )
}


def load_recipe(name: str) -> Recipe:
    """Return a recipe by name.

    Raises:
        UsageError: the name is unknown; the message lists the recipes.
    """
    try:
        return RECIPES[name]
    except KeyError:
        close = difflib.get_close_matches(name, RECIPES, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise UsageError(f"unknown recipe {name!r}: expected one of {', '.join(sorted(RECIPES))}{hint}") from None


def prepare(text: str, language: str, recipe: Recipe) -> list[str]:
    """Return the tokens of a caption after all steps of the recipe except truecasing."""
    if recipe.lowercase:
        text = lower(text)
    if recipe.normalize:
        text = normalize_punctuation(text, language)
    if recipe.tokenizer == "whitespace":
        return _split_words(text, _bound(text))
    return split_tokens(tokenize(text, language))


def lower(text: str) -> str:
    """Return a text in lower case as Perl's ``lc``: capital sigma becomes σ, never ς."""
    if text.isascii() or _BEYOND_LATIN.search(text) is None:
        return text.lower()
    lower_case = _lower_case()
    return "".join(map(lower_case.get, text, text))


def _bound(text: str) -> str:
    """Return the last character of the smallest of four ranges that holds a text."""
    if text.isascii():
        return "\x7f"
    if _BEYOND_LATIN.search(text) is None:
        return _LATIN
    return "\uffff" if _BEYOND_BMP.search(text) is None else "\U0010ffff"


@functools.cache
def _lower_case() -> dict[str, str]:
    """Return the lower case of each character that has one."""
    lower_case = {"İ": "i̇"}
    for first, last, step, offset in _LOWER_OFFSETS:
        lower_case.update((chr(code), chr(code + offset)) for code in range(first, last + 1, step))
    return lower_case


def normalize_punctuation(text: str, language: str) -> str:
    """Return the output of ``normalize-punctuation.perl -l LANGUAGE`` for a line."""
    if _NORMALIZABLE.search(text) is None:
        return text
    # The Perl sees the line end: a full stop before a closing quote moves after the quote before any character but "<".
    text += "\n"
    for pattern, replacement in _normalizer_rules(_primary(language)):
        text = pattern.sub(replacement, text)
    return text[:-1]


def tokenize(text: str, language: str) -> str:
    """Return the output of ``tokenizer.perl -l LANGUAGE`` for a line.

    Single spaces join the tokens, and ``& | < > ' " [ ]`` become entities. A line that ends in ``.'`` gets a
    space at its end. A blank line is unchanged. `prefix_language` selects the abbreviations.
    """
    if _BLANK.fullmatch(text):
        return text
    if not text.isprintable():
        text = _JUNK.sub("", text)
    bound = _bound(text)
    text = _tokenizer(_primary(language), bound).tokenize(" ".join(_split_words(text, bound)))
    for character, entity in _ENTITIES:
        text = text.replace(character, entity)
    return text


def split_tokens(line: str) -> list[str]:
    """Split a tokenized line at ASCII spaces; a blank line has no tokens."""
    # Only a blank line, which is unchanged, can hold other white space.
    return [] if _BLANK.fullmatch(line) else [token for token in line.split(" ") if token]


def _split_words(text: str, bound: str) -> list[str]:
    """Split a text within a bound at white space, including U+001C..U+001F."""
    return text.split() if bound <= _LATIN else _WORD.findall(text)


def prefix_language(language: str) -> str:
    """Return the language of the nonbreaking prefixes, which keep their full stop.

    It is the primary subtag, or ``en`` without a list in sacremoses, as in Moses.
    """
    from sacremoses.corpus import NonbreakingPrefixes

    primary = _primary(language)
    return primary if primary in NonbreakingPrefixes().available_langs.values() else "en"


def _primary(language: str) -> str:
    return language.partition("-")[0].lower()


def unescape(token: str) -> str:
    """Undo the escapes of the tokenizer: ``&apos;s`` becomes ``'s``."""
    for character, entity in reversed(_ENTITIES):
        token = token.replace(entity, character)
    return token


@functools.cache
def _normalizer_rules(language: str) -> tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...]:
    """Compile the Perl's substitutions in its order, for a primary subtag."""
    from sacremoses import MosesPunctNormalizer

    normalizer = MosesPunctNormalizer(lang=language, perl_parity=True)
    # Only newer versions of Moses convert these quotes to apostrophes.
    rules = [(pattern, '"' if pattern in ("‘", "‚") else replacement) for pattern, replacement in normalizer.substitutions]
    if language not in _OWN_QUOTE_RULES:
        # In all languages but English and Czech, the Perl moves commas and full stops out of quotes before its last rule.
        rules[-1:-1] = normalizer.DE_ES_FR_QUOTATION_FOLLOWED_BY_COMMA
    linear = {_MOVED_FULL_STOPS: (_LINEAR_FULL_STOPS, _move_full_stops)}
    # The Perl works on bytes: its digits, letters and white space are ASCII.
    return tuple((re.compile(pattern, re.ASCII), change) for pattern, change in (linear.get(rule[0], rule) for rule in rules))


def _move_full_stops(found: re.Match[str]) -> str:
    """Move full stops behind the quote that follows them, as the Perl does."""
    return found[0] if found[2] is None else f'"{found[1]}{found[2]}'


def _cut_class(bound: str, content: str) -> str:
    """Cut the content of a character class at a bound: `re` is slow beyond the BMP."""
    cut = re.sub(f"[^\0-{bound}].*", "", content)
    return cut + bound if cut.endswith("-") else cut


def _apostrophe_rules(language: str, letter: str, number: str) -> tuple[_Rule, ...]:
    """Compile the substitutions around apostrophes, in their order."""
    if language == "en":
        rules = [
            (f"([^{letter}])'([^{letter}])", r"\1 ' \2"),
            (f"([^{letter}{number}])'([{letter}])", r"\1 ' \2"),
            (f"([{letter}])'([^{letter}])", r"\1 ' \2"),
            (f"([{letter}])'([{letter}])", r"\1 '\2"),
            (f"([{number}])'(s)", r"\1 '\2"),
        ]
    elif language in _SPLITS_CONTRACTIONS_LEFT:
        rules = [
            (f"([^{letter}])'([^{letter}])", r"\1 ' \2"),
            (f"([^{letter}])'([{letter}])", r"\1 ' \2"),
            (f"([{letter}])'([^{letter}])", r"\1 ' \2"),
            (f"([{letter}])'([{letter}])", r"\1' \2"),
        ]
    else:
        rules = [("'", " ' ")]
    return tuple((re.compile(pattern), replacement) for pattern, replacement in rules)


def _dots_of(marker: re.Match[str]) -> str:
    """Return the dots of a placeholder, or text that only resembles one."""
    return "." * (len(marker[1]) // len("DOT")) if marker[2] else marker[0]


class _Tokenizer:
    """Tokenizer of a primary subtag, for text within a bound."""

    def __init__(self, language: str, bound: str) -> None:
        from sacremoses.corpus import NonbreakingPrefixes

        letter, digit, number, lower_case = (
            _cut_class(bound, LETTERS[name]) for name in ("ALPHABETIC", "DECIMAL", "NUMERIC", "LOWER_CASE")
        )
        prefixes: set[str] = set()
        numeric: set[str] = set()
        for entry in NonbreakingPrefixes().words(prefix_language(language)):
            prefix, marker, _ = entry.partition(" #NUMERIC_ONLY#")
            (numeric if marker else prefixes).add(prefix)
        if prefix_language(language) == "en":
            prefixes.discard("Rs")  # added to Moses after the commit
        self.special = re.compile(rf"([^{letter}{digit} .'`,\-])")
        self.commas = (
            (re.compile(f"([^{number}]),"), r"\1 , "),
            (re.compile(f",([^{number}])"), r" , \1"),
            (re.compile(f"([{number}]),$"), r"\1 , "),
        )
        self.apostrophes = _apostrophe_rules(language, letter, number)
        self.prefixes = prefixes - numeric  # Numeric prefixes keep their full stop only before a number.
        self.numeric_prefixes = numeric
        self.letter = re.compile(f"[{letter}]")
        self.lower_case = re.compile(f"[{lower_case}]")

    def tokenize(self, text: str) -> str:
        """Return the tokenized line, not escaped, for words joined by single spaces."""
        text = " ".join(self.special.split(text))
        if ".." in text:
            text = _DOTS.sub(lambda dots: f" {'DOT' * len(dots[0])}MULTI ", text)
        if "," in text:
            for pattern, replacement in self.commas:
                text = pattern.sub(replacement, text)
        if "'" in text:
            for pattern, replacement in self.apostrophes:
                text = pattern.sub(replacement, text)
        words = [word for word in text.split(" ") if word]
        if "." in text:
            self._split_full_stops(words)
        text = " ".join(words)
        if text.endswith(".'"):
            text = text[:-2] + " . ' "
        return _DOTS_MARKER.sub(_dots_of, text) if "MULTI" in text else text

    def _split_full_stops(self, words: list[str]) -> None:
        """Split full stops off words, in place, unless they belong to the word."""
        for i, word in enumerate(words):
            if not word.endswith(".") or word == ".":
                continue
            stem = word[:-1]
            following = words[i + 1] if i + 1 < len(words) else ""
            if (
                self.lower_case.match(following)
                or stem in self.prefixes
                or ("." in stem and self.letter.search(stem))
                or (stem in self.numeric_prefixes and "0" <= following[:1] <= "9")
            ):
                continue
            words[i] = stem + " ."


_tokenizer = functools.cache(_Tokenizer)
