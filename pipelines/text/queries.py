"""Tokenization of search queries, as of the captions of a run; text encoders."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from pipelines.text.moses import load_recipe, prepare
from pipelines.text.truecasing import load_truecasers, parse_truecaser, truecase
from schemas.errors import UsageError
from schemas.parameters import TextRecipe

if TYPE_CHECKING:
    from extractors.tokens.sentence_encoders import SentenceModel


def load_text_encoder(model: str, device: str = "cpu") -> SentenceModel:
    """Load a text encoder, ``open_clip:...`` or ``sentence:...``."""
    from extractors.tokens.request import TextRequest

    return cast("SentenceModel", TextRequest(model).load(device))


def tokenize_query(text: str, language: str, steps: TextRecipe | None, truecaser: str = "") -> list[str]:
    """Tokenize a query in a language, a BCP 47 tag.

    ``steps`` is the recipe in the manifest of the encoded captions; None if the manifest has none.
    ``truecaser`` is the folder of the truecasers of the captions, for a recipe that truecases.

    Raises:
        UsageError: the recipe is unknown or has changed, a truecaser is missing, or the recipe does not truecase.
        InputError: the truecasers are missing or broken.
    """
    if steps is None:
        raise UsageError(
            "the run does not state how its captions were tokenized: they were encoded by an earlier "
            "version. Encode them again and train again, or give tokens instead of text, with --tokenized"
        )
    current = load_recipe(steps.recipe)
    stored = steps.to_json()
    changed = sorted(
        key for key, value in current.parameters().to_json().items() if key != "sacremoses" and stored.get(key) != value
    )
    if changed:
        raise UsageError(
            f"recipe {current.name!r} has changed since the captions of this run were tokenized "
            f"({', '.join(changed)} differ): give tokens instead of text, with --tokenized"
        )
    if current.truecase and not truecaser:
        raise UsageError(f"recipe {current.name!r} truecases: give --truecaser with the folder of the captions of this run")
    if truecaser and not current.truecase:
        raise UsageError(f"recipe {current.name!r} does not truecase: leave --truecaser out")
    tokens = prepare(text, language, current)
    if not truecaser:
        return tokens
    models = load_truecasers(truecaser)
    if language not in models:
        raise UsageError(f"--truecaser {truecaser!r} holds no {language}.model: it has {', '.join(sorted(models))}")
    return truecase(tokens, parse_truecaser(models[language]))
