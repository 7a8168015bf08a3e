"""Moses text processing of captions: lower-casing, punctuation normalization and tokenization.

The truth is what ``lowercase.perl``, ``normalize-punctuation.perl -l LANGUAGE`` and ``tokenizer.perl -l LANGUAGE`` print at
Moses commit 3a0631a (2017-12-12), the ones behind the ``tok`` files of Multi30K. Newer Moses tokenizes some lines otherwise.
The rules and character lists come from sacremoses; this module applies them as the Perl does where the two differ, and
applies only those that can match, which is most of the cost.

The text of every function is one caption: a line without its line end, so split files on LF only. Language tags are
BCP 47, and their primary subtag decides the rules: ``pt-BR`` is handled as ``pt``.

Known differences that remain, none of them on Multi30K:

* Letters are those of sacremoses' tables, which are Perl's up to U+052F. Beyond, scripts and letters that came to Unicode
  since about 2018 and Georgian case are unknown to them, Han and Hangul are letters for ``zh``, ``ja`` and ``ko`` only, and
  Indic virama and nukta count as letters.
* The nonbreaking prefixes of es, is, it, nl, sk, sv and ta differ in a few entries, and sacremoses has lists for some languages
  where Moses falls back to English.
* Text that holds Moses' own placeholder ``DOTMULTI``.
"""

import difflib
import functools
import re
from dataclasses import dataclass
from typing import Any, Literal

import sacremoses
from sacremoses.corpus import NonbreakingPrefixes

from schemas.errors import UsageError
from schemas.parameters import TextRecipe

__all__ = [
    "DEFAULT_RECIPE",
    "MOSES_COMMIT",
    "RECIPES",
    "Recipe",
    "lower",
    "normalize_punctuation",
    "prefix_language",
    "prepare",
    "recipe",
    "split_tokens",
    "tokenize",
]

MOSES_COMMIT = "3a0631a"

_Rule = tuple[re.Pattern[str], str]

# Python counts U+001C..U+001F as white space and Perl does not, so these must be gone before anything splits.
_JUNK = re.compile(r"[\x00-\x08\x0e-\x1f]")
_SEPARATORS = frozenset("\x1c\x1d\x1e\x1f")

# Each rule of the normalizer needs one of these; most captions have none.
_NORMALIZABLE = re.compile("[\r()%:;`\"„“”–—´‘’‚…«»\xa0]|  |''")

_SPLITS_CONTRACTIONS_LEFT = frozenset({"fr", "it", "ga"})
_OWN_QUOTE_RULES = frozenset({"en", "cs", "cz", "de", "es", "fr"})


@dataclass(frozen=True)
class Recipe:
    """How captions become tokens; the steps run in the order of the fields.

    Attributes:
        name: What the user types.
        description: One line for a listing.
        lowercase: Whether text is lower-cased.
        normalize: Whether punctuation is normalized.
        tokenizer: ``moses``, with special characters escaped (``&apos;``), or ``whitespace``, which only splits.
        truecase: Whether tokens are truecased with a model learned from the training split.
    """

    name: str
    description: str
    lowercase: bool
    normalize: bool
    tokenizer: Literal["moses", "whitespace"]
    truecase: bool

    def parameters(self) -> TextRecipe:
        """Return everything of the recipe that changes its tokens, for a manifest."""
        uses_moses = self.normalize or self.tokenizer == "moses"
        return TextRecipe(
            recipe=self.name,
            lowercase=self.lowercase,
            normalize=self.normalize,
            tokenizer=self.tokenizer,
            truecase=self.truecase,
            escape=True if self.tokenizer == "moses" else None,
            moses_commit=MOSES_COMMIT if uses_moses else None,
            sacremoses=sacremoses.__version__ if uses_moses else None,
        )


DEFAULT_RECIPE = "multi30k-lc"

RECIPES: dict[str, Recipe] = {
    r.name: r
    for r in (
        Recipe(
            name="multi30k-lc",
            description="lower-case, normalize punctuation, Moses tokenizer: the tok files of Multi30K",
            lowercase=True,
            normalize=True,
            tokenizer="moses",
            truecase=False,
        ),
        Recipe(
            name="moses-truecase",
            description="Moses tokenizer, then a truecaser learned from the training split",
            lowercase=False,
            normalize=False,
            tokenizer="moses",
            truecase=True,
        ),
        Recipe(
            name="raw",
            description="text as it is, split at white space",
            lowercase=False,
            normalize=False,
            tokenizer="whitespace",
            truecase=False,
        ),
    )
}


def recipe(name: str) -> Recipe:
    """Return the recipe of this name.

    Raises:
        UsageError: If there is none; the message lists the known names.
    """
    try:
        return RECIPES[name]
    except KeyError:
        close = difflib.get_close_matches(name, RECIPES, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise UsageError(f"unknown recipe {name!r}: expected one of {', '.join(sorted(RECIPES))}{hint}") from None


def prepare(text: str, language: str, recipe: Recipe) -> list[str]:
    """Return the tokens of a caption: every step of the recipe but the truecasing, which needs a model.

    Args:
        text: The caption, without its line end.
        language: BCP 47 tag.
        recipe: What to do.
    """
    if recipe.lowercase:
        text = lower(text)
    if recipe.normalize:
        text = normalize_punctuation(text, language)
    if recipe.tokenizer == "whitespace":
        return text.split()
    return split_tokens(tokenize(text, language))


def lower(text: str) -> str:
    """Return the text in lower case, as Perl's ``lc`` does: each character on its own, so capital sigma gives σ, never ς."""
    # The final sigma is the only place where Python looks at a character's neighbours.
    return text.replace("Σ", "σ").lower()


def normalize_punctuation(text: str, language: str) -> str:
    """Return what ``normalize-punctuation.perl -l LANGUAGE`` prints for a line, without the line end."""
    if _NORMALIZABLE.search(text) is None:
        return text
    # The Perl works on the line with its line end, which matters: a full stop before a closing quote is moved
    # behind it when any character but "<" follows.
    text += "\n"
    for pattern, replacement in _normalizer_rules(_primary(language)):
        text = pattern.sub(replacement, text)
    return text[:-1]


def tokenize(text: str, language: str, escape: bool = True) -> str:
    """Return what ``tokenizer.perl -l LANGUAGE`` prints for a line, without the line end.

    Tokens are joined by one space. A line that ends in ``.'`` gets a space at its end. A blank line comes back unchanged.

    Args:
        text: The caption, without its line end.
        language: BCP 47 tag; see `prefix_language` for languages without abbreviations of their own.
        escape: Whether ``& | < > ' " [ ]`` become entities, as Moses does by default.
    """
    if not text or (text.isspace() and _SEPARATORS.isdisjoint(text)):
        return text
    if not text.isprintable():
        text = _JUNK.sub("", text)
    rules = _tokenizer_rules(_primary(language))
    text = rules.tokenize(" ".join(text.split()))
    return _escape(text) if escape else text


def split_tokens(line: str) -> list[str]:
    """Return the tokens of a tokenized line: what stands between ASCII spaces, never empty. A blank line has none."""
    # Only a blank line, which the tokenizer prints unchanged, can hold white space of another kind.
    return [] if line.isspace() else [token for token in line.split(" ") if token]


def prefix_language(language: str) -> str:
    """Return the language whose nonbreaking prefixes are in force: words like ``Mr`` that keep their full stop.

    This is the primary subtag where sacremoses has a list for it, else ``en``: Moses itself falls back to English.
    """
    primary = _primary(language)
    return primary if primary in NonbreakingPrefixes().available_langs.values() else "en"


def _primary(language: str) -> str:
    return language.partition("-")[0].lower()


def _escape(text: str) -> str:
    # The ampersand goes first, or it would escape the others' entities.
    text = text.replace("&", "&amp;").replace("|", "&#124;").replace("<", "&lt;").replace(">", "&gt;")
    return text.replace("'", "&apos;").replace('"', "&quot;").replace("[", "&#91;").replace("]", "&#93;")


@functools.cache
def _normalizer_rules(language: str) -> tuple[_Rule, ...]:
    """Compile the Perl's substitutions in its order, for a primary subtag."""
    normalizer = sacremoses.MosesPunctNormalizer(lang=language, perl_parity=True)
    # These quotes became apostrophes in newer Moses only.
    rules = [(p, '"') if p in ("‘", "‚") else (p, r) for p, r in normalizer.substitutions]
    if language not in _OWN_QUOTE_RULES:
        # The Perl moves commas and full stops out of quotes in all languages but English and Czech, before its last rule.
        rules[-1:-1] = normalizer.DE_ES_FR_QUOTATION_FOLLOWED_BY_COMMA
    # The Perl sees bytes: its digits, letters and white space are ASCII.
    return tuple((re.compile(pattern, re.ASCII), replacement) for pattern, replacement in rules)


@functools.cache
def _tokenizer_rules(language: str) -> "_TokenizerRules":
    """Gather the rules for a primary subtag, once per process: the character lists are large."""
    moses = sacremoses.MosesTokenizer(lang=language)
    if language == "en":
        apostrophes = moses.ENGLISH_SPECIFIC_APOSTROPHE
    elif language in _SPLITS_CONTRACTIONS_LEFT:
        apostrophes = moses.FR_IT_SPECIFIC_APOSTROPHE
    else:
        apostrophes = [moses.NON_SPECIFIC_APOSTROPHE]
    prefixes: set[str] = set()
    numeric: set[str] = set()
    for entry in NonbreakingPrefixes().words(prefix_language(language)):
        prefix, marker, _ = entry.partition(" #NUMERIC_ONLY#")
        (numeric if marker else prefixes).add(prefix)
    if prefix_language(language) == "en":
        prefixes.discard("Rs")  # came to Moses after the commit
    return _TokenizerRules(
        moses=moses,
        apostrophes=tuple(apostrophes),
        prefixes=frozenset(prefixes - numeric),
        numeric_prefixes=frozenset(numeric),
        letters=frozenset(moses.IsAlpha),
        lower_case=frozenset(moses.IsLower),
    )


@dataclass(frozen=True)
class _TokenizerRules:
    """The tokenizer of one language: sacremoses' rules, each applied only where it can match.

    Attributes:
        moses: The tokenizer of sacremoses, which owns the patterns.
        apostrophes: The substitutions around apostrophes, in order.
        prefixes: Words that keep their full stop.
        numeric_prefixes: Words that keep it before a number.
        letters: The characters that are letters.
        lower_case: The characters that are lower-case letters.
    """

    moses: Any
    apostrophes: tuple[_Rule, ...]
    prefixes: frozenset[str]
    numeric_prefixes: frozenset[str]
    letters: frozenset[str]
    lower_case: frozenset[str]

    def tokenize(self, text: str) -> str:
        """Return the tokenized line, not escaped; white space in the text is single spaces between words."""
        moses = self.moses
        pattern, replacement = moses.PAD_NOT_ISALNUM
        text = pattern.sub(replacement, text)
        if ".." in text:
            text = moses.replace_multidots(text)
        if "," in text:
            for pattern, replacement in (moses.COMMA_SEPARATE_1, moses.COMMA_SEPARATE_2, moses.COMMA_SEPARATE_3):
                text = pattern.sub(replacement, text)
        if "'" in text:
            for pattern, replacement in self.apostrophes:
                text = pattern.sub(replacement, text)
        words = text.split()
        if "." in text:
            self._split_full_stops(words)
        text = " ".join(words)
        if text.endswith(".'"):
            text = text[:-2] + " . ' "
        return moses.restore_multidots(text) if "MULTI" in text else text

    def _split_full_stops(self, words: list[str]) -> None:
        """Split the full stop off each word that ends in one, in place, unless it belongs to the word."""
        for i, word in enumerate(words):
            if not word.endswith(".") or word == ".":
                continue
            stem = word[:-1]
            following = words[i + 1][0] if i + 1 < len(words) else ""
            if (
                following in self.lower_case
                or stem in self.prefixes
                or ("." in stem and not self.letters.isdisjoint(stem))
                or (stem in self.numeric_prefixes and "0" <= following <= "9")
            ):
                continue
            words[i] = stem + " ."
