"""Captions of a drawn scene in the manner of Multi30K.

The ``translation`` portion has one sentence in each language, all with the same meaning. The ``comparable`` portion has five
sentences in English and five in German that are chosen independently: they differ in wording and in what they mention.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from pipelines.demo.scene_languages import FULL_TEMPLATES, LANGUAGES, Language
from pipelines.demo.scenes import Group, Scene

_COMPARABLE_LANGUAGES = ("en", "de")
_COMPARABLE_CAPTIONS = 5
_SIZE_SHARE = 0.6  # Share of the comparable captions that mention sizes.


@dataclass(frozen=True)
class Caption:
    """One sentence about one scene, without the image id.

    Attributes:
        language: ``en``, ``de``, ``fr`` or ``cs``.
        portion: ``comparable`` or ``translation``.
        index: number of the sentence within language and portion.
        text: the sentence.
    """

    language: str
    portion: str
    index: int
    text: str


def captions(scene: Scene) -> list[Caption]:
    """Make all captions of a scene: five comparable ones in English and German, one translation in each language.

    The choice of templates depends only on the scene.
    """
    sentences = []
    for number, language in enumerate(LANGUAGES):
        if language in _COMPARABLE_LANGUAGES:
            rng = Random(8 * scene.variant + number + 1)
            for index, template in enumerate(_draw_templates(rng, language, scene)):
                text = caption(scene, language, template, with_size=rng.random() < _SIZE_SHARE)
                sentences.append(Caption(language, "comparable", index, text))
    template = int(Random(8 * scene.variant).random() * FULL_TEMPLATES)
    sentences += [Caption(language, "translation", 0, caption(scene, language, template)) for language in LANGUAGES]
    return sentences


def caption(scene: Scene, language: str, template: int, *, with_size: bool = True) -> str:
    """Describe a scene in one sentence.

    Args:
        scene: the scene to describe.
        language: ``en``, ``de``, ``fr`` or ``cs``.
        template: number of the sentence pattern, below ``template_count``. The first five mention everything and mean
            the same in each language.
        with_size: whether to say how large the shapes are.
    """
    grammar = LANGUAGES[language]
    text = _templates(grammar, scene)[template].format_map(_parts(grammar, scene, with_size))
    return _capital(text)


def template_count(language: str, scene: Scene) -> int:
    """Return the number of sentence patterns that a language has for a scene."""
    return len(_templates(LANGUAGES[language], scene))


def _templates(grammar: Language, scene: Scene) -> tuple[str, ...]:
    return grammar.single if len(scene.groups) == 1 else grammar.double


def _draw_templates(rng: Random, language: str, scene: Scene) -> list[int]:
    """Draw different templates. Only ``random()`` itself gives the same numbers in all versions of Python."""
    left = list(range(template_count(language, scene)))
    return [left.pop(int(rng.random() * len(left))) for _ in range(_COMPARABLE_CAPTIONS)]


def _parts(grammar: Language, scene: Scene, with_size: bool) -> dict[str, str]:
    """Make the parts that templates refer to."""
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
        for part, group_number, other_name in (("relation", 0, "b"), ("reverse", 1, "a")):
            position = grammar.positions[scene.groups[group_number].position]
            parts[part] = f"{position['relation']} {parts[other_name + '_' + position['case']]}"
    return parts


def _phrase(grammar: Language, group: Group, case: str, with_size: bool) -> str:
    """Name a group, e.g. "two small red circles" and "zwei kleinen roten Kreisen"."""
    agreement = grammar.agreement[f"{grammar.nouns[group.shape]['gender']} {case}"]
    ending = agreement["one" if group.count == 1 else "many"]
    size = grammar.adjectives[group.size][ending]
    colour = grammar.adjectives[group.colour][ending]
    noun = _noun(grammar, group, case)
    words = [noun, colour] if grammar.colour_last else [colour, noun]
    if with_size:
        words.insert(0, size)
    article = agreement[str(group.count)]
    for plain, following, instead in grammar.articles:
        if (article, words[0]) == (plain, following):
            article = instead
    return " ".join([article, *words]).strip()


def _noun(grammar: Language, group: Group, case: str) -> str:
    forms = grammar.nouns[group.shape]
    number = 1 if group.count == 1 else 2
    return forms.get(f"{number}_{case}", forms[f"{number}_nom"])


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
