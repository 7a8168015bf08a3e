"""Fixtures of small corpora and runs, which those of `train` define, and of commands."""

import pytest

from pipelines.commands import app as cli
from pipelines.commands import results
from tests.train.conftest import (  # noqa: F401
    finished_run,
    gappy,
    kinds,
    multi30k,
    toy,
    toy_2016,
    train_toy,
    without_features,
    write_run,
)


@pytest.fixture
def command(capsys, monkeypatch):
    """Run a command; return its standard output and standard error."""
    for console in (results.console, results.notes):
        monkeypatch.setattr(console, "_width", 140)

    def run(*arguments: object) -> tuple[str, str]:
        cli.app([str(argument) for argument in arguments], standalone_mode=False)
        printed = capsys.readouterr()
        return printed.out, printed.err

    return run


@pytest.fixture
def tokenizer(monkeypatch) -> list:
    """Tokenize without a recipe's steps, and note languages and truecasers."""
    asked = []

    def tokenize(text, language, recipe, truecaser) -> list[str]:
        asked.append((language, truecaser))
        return [f"{language}{word}" for word in f"{text} {recipe.recipe} {truecaser}".split()]

    monkeypatch.setattr("pipelines.text.queries.tokenize_query", tokenize)
    return asked
