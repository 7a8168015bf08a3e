"""The commands in their groups, one per module; those that run other commands are added by the application."""

from __future__ import annotations

from functools import cache
from inspect import getdoc
from typing import Any

import typer

from pipelines.commands import datasets, demo, doctor, exchange, features, tasks, text, view
from pipelines.commands.configuration import Command
from train.commands import figures, runs, sts, tables, train

__all__ = ["GROUPS", "commands", "prepare"]

GROUPS = (
    *(text.app, features.app, tasks.app, datasets.app, view.app, doctor.app, exchange.app, demo.app),
    *(train.app, runs.app, sts.app, figures.app, tables.app),
)


def prepare(group: typer.Typer) -> typer.Typer:
    """Give the commands of a group what all have, and the paragraphs of their help one line each: the terminal wraps them."""
    for command in group.registered_commands:
        paragraphs = (getdoc(command.callback) or "").split("\n\n")
        command.cls = Command
        command.help = "\n\n".join(paragraph.replace("\n", " ") for paragraph in paragraphs)
    return group


@cache
def commands() -> dict[str, Any]:
    """Return the commands of all groups, by name."""
    every = typer.Typer()
    for group in GROUPS:
        every.add_typer(prepare(group))
    return dict(typer.main.get_command(every).commands)  # type: ignore[attr-defined]
