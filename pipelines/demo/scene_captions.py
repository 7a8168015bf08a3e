"""Captions of a drawn scene in the manner of Multi30K.

The ``translation`` portion has one sentence in each language, all with the same meaning. The ``comparable``
portion has five sentences in English and five in German that are chosen independently: they differ in wording
and in content. The grammars are in ``scene_languages.toml``.
"""

from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TypeAlias

from pipelines.demo.scenes import Scene, ShapeGroup
from schemas.conversion import convert, parse_toml

FULL_TEMPLATES = 5
"""Number of templates, the first ones, that mention everything and have the same meaning in each language."""

_COMPARABLE_LANGUAGES = ("en", "de")
_COMPARABLE_CAPTIONS = 5
_SIZE_SHARE = 0.6  # Share of the comparable captions that mention sizes.

_Table: TypeAlias = dict[str, dict[str, str]]


@dataclass(frozen=True)
class Language:
    """Tables and templates of one language.

    Attributes:
        nouns: shape to gender and forms: ``1_dat`` is the dative singular, ``2_dat`` the dative plural,
            ``1_the`` the singular with its article. A case without a column has the form of the nominative.
        adjectives: size or colour to its forms, by ending.
        agreement: gender and case to the endings of adjectives (``one``, ``many``) and to the words for 1, 2, 3 and 4.
        grounds: background colour to its forms.
        positions: position to the words for the place, for the relation to another group, and the case after that relation.
        verbs: "is" and "are".
        single: templates for scenes with one group, the full ones first.
        double: templates for scenes with two groups, the full ones first.
        articles: article and next word to the article that is written before that word instead.
    """

    nouns: _Table
    adjectives: _Table
    agreement: _Table
    grounds: _Table
    positions: _Table
    verbs: tuple[str, str]
    single: tuple[str, ...]
    double: tuple[str, ...]
    colour_last: bool = False
    articles: tuple[tuple[str, str, str], ...] = ()


def _parse(text: str) -> _Table:
    """Parse a table with a header of column names and a first column of row names."""
    header, *rows = [line.split() for line in text.strip().splitlines()]
    return {_word_form(name): dict(zip(header, map(_word_form, cells), strict=True)) for name, *cells in rows}


def _word_form(cell: str) -> str:
    return "" if cell == "-" else cell.replace("_", " ")


_SECTIONS = parse_toml(Path(__file__).with_name("scene_languages.toml").read_text(encoding="utf-8"))
LANGUAGES: dict[str, Language] = {
    code: convert({key: _parse(value) if isinstance(value, str) else value for key, value in section.items()}, Language, code)
    for code, section in _SECTIONS.items()
}
"""Languages by code, in the order of captions."""


@dataclass(frozen=True)
class Caption:
    """One sentence about a scene; indices count within language and portion."""

    language: str
    portion: str
    index: int
    text: str


def captions_of_scene(scene: Scene) -> list[Caption]:
    """Return all captions of a scene.

    The choice of templates depends only on the scene.
    """
    sentences = []
    for position, language in enumerate(LANGUAGES):
        if language in _COMPARABLE_LANGUAGES:
            rng = Random(8 * scene.variant + position + 1)
            for index, template in enumerate(_draw_templates(rng, language, scene)):
                text = caption(scene, language, template, with_size=rng.random() < _SIZE_SHARE)
                sentences.append(Caption(language, "comparable", index, text))
    template = int(Random(8 * scene.variant).random() * FULL_TEMPLATES)
    sentences += [Caption(language, "translation", 0, caption(scene, language, template)) for language in LANGUAGES]
    return sentences


def caption(scene: Scene, language: str, template: int, *, with_size: bool = True) -> str:
    """Describe a scene in one sentence, by a template index below `template_count`."""
    grammar = LANGUAGES[language]
    return _capital(_templates(grammar, scene)[template].format_map(_fillers(grammar, scene, with_size)))


def template_count(language: str, scene: Scene) -> int:
    """Return the number of templates that a language has for a scene."""
    return len(_templates(LANGUAGES[language], scene))


def _templates(grammar: Language, scene: Scene) -> tuple[str, ...]:
    return grammar.single if len(scene.groups) == 1 else grammar.double


def _draw_templates(rng: Random, language: str, scene: Scene) -> list[int]:
    """Sample without replacement, by the version-independent ``Random.random()``."""
    indices = list(range(template_count(language, scene)))
    return [indices.pop(int(rng.random() * len(indices))) for _ in range(_COMPARABLE_CAPTIONS)]


def _fillers(grammar: Language, scene: Scene, with_size: bool) -> dict[str, str]:
    """Return the values for the placeholders of templates."""
    parts = dict(grammar.grounds[scene.background])
    for name, group in zip("ab", scene.groups, strict=False):
        for case in {key.partition(" ")[2] for key in grammar.agreement}:
            parts[f"{name}_{case}"] = _phrase(grammar, group, case, with_size)
        parts[name] = parts[f"{name}_nom"]
        parts[name.upper()] = _capital(parts[name])
        parts[f"the_{name}"] = _noun(grammar, group, "the")
        parts[f"is_{name}"] = grammar.verbs[group.count > 1]
        parts[f"place_{name}"] = grammar.positions[group.position]["place"]
    if len(scene.groups) == 2:
        for part, group, other in (("relation", scene.groups[0], "b"), ("reverse", scene.groups[1], "a")):
            position = grammar.positions[group.position]
            parts[part] = f"{position['relation']} {parts[other + '_' + position['case']]}"
    return parts


def _phrase(grammar: Language, group: ShapeGroup, case: str, with_size: bool) -> str:
    """Name a group, e.g. "two small red circles" or "zwei kleinen roten Kreisen"."""
    agreement = grammar.agreement[f"{grammar.nouns[group.shape]['gender']} {case}"]
    ending = agreement["one" if group.count == 1 else "many"]
    colour, noun = grammar.adjectives[group.colour][ending], _noun(grammar, group, case)
    words = [noun, colour] if grammar.colour_last else [colour, noun]
    if with_size:
        words.insert(0, grammar.adjectives[group.size][ending])
    article = agreement[str(group.count)]
    for plain, following, instead in grammar.articles:
        if (article, words[0]) == (plain, following):
            article = instead
    return " ".join([article, *words]).strip()


def _noun(grammar: Language, group: ShapeGroup, case: str) -> str:
    forms, prefix = grammar.nouns[group.shape], "1" if group.count == 1 else "2"
    return forms.get(f"{prefix}_{case}", forms[f"{prefix}_nom"])


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
