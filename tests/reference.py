"""The reference page, docs/reference.md, made of the declarations of options and of the sections of configurations.

``python -m tests.reference`` writes the page; `tests.test_docs` insists that it is current.
"""

import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import typer

from pipelines.commands import app as cli
from pipelines.commands.binding import Option
from schemas.console.tables import Column, Table
from schemas.conversion import dump
from train.config import models, sections

PAGE = Path(__file__).parent.parent / "docs" / "reference.md"
INTRODUCTION = """\
# Reference

Made by `python -m tests.reference` of the declarations in the code. An option stands on a command line as `--NAME`, in a file of
`--config` and in a plan as the key `NAME`, and in the environment as `IMAGEPIVOT_COMMAND_NAME`; see
[configuration](configuration.md).
"""
SECTIONS = {
    "data": sections.DataConfig,
    "loss": sections.LossConfig,
    "optimizer": sections.OptimizerConfig,
    "schedule": sections.ScheduleConfig,
}
MODELS = (models.VseConfig, models.ScanConfig, models.DanConfig, models.MhaDConfig, models.MlmmeConfig)
OPTIONS = tuple(map(Column, ("option", "default", "meaning")))
KEYS = tuple(map(Column, ("key", "default", "meaning")))


def page() -> str:
    """Return the page."""
    parts = [INTRODUCTION, "## Commands\n", *map(_command, _commands()), "## Configuration of a training\n", *_configuration()]
    return "\n".join(parts)


def _commands() -> dict[str, Any]:
    return dict(typer.main.get_command(cli.app).commands)  # type: ignore[attr-defined]


def _command(name: str) -> str:
    command = _commands()[name]
    first = (command.help or "").partition("\n")[0]
    rows = [(f"`{_word(option)}`", _default(option), _plain(option.help)) for option in command.options.values()]
    return f"### imagepivot {name}\n\n{_plain(first)}\n\n{Table(OPTIONS, rows).to_markdown()}\n"


def _word(option: Option) -> str:
    if option.opt.is_behind_dashes:
        return "-- FLAGS"
    return option.label if option.is_argument or option.is_flag else f"{option.label} {option.metavar}"


def _default(option: Option) -> str:
    if option.default is MISSING or option.opt.is_required:
        return "required"
    text = "" if option.default is None or option.is_flag else option.text(option.default)
    return f"`{text}`" if text else ""


def _plain(text: str) -> str:
    """Return a text of rich's markup as Markdown; what is in italics there is code here."""
    text = re.sub(r"\[/?i\]", "`", text.replace("\\[", "["))
    return re.sub(r"\[/?b\]", "**", text)


def _configuration() -> Iterator[str]:
    for section, config in SECTIONS.items():
        rows = [(f"`{section}.{key}`", default, help_) for key, default, help_ in _keys(config)]
        yield Table(KEYS, rows).to_markdown() + "\n"
    for config in MODELS:
        rows = [(f"`model.{key}`", default, help_) for key, default, help_ in _keys(config)]
        yield f'Of `model.kind = "{config.kind}"`:\n\n{Table(KEYS, rows).to_markdown()}\n'


def _keys(config: Any) -> Iterator[tuple[str, str, str]]:
    """Yield each key with its default and its meaning, which the docstrings of the class and of its bases have."""
    meanings: dict[str, str] = {}
    for cls in reversed(config.__mro__):
        section = inspect.getdoc(cls) if cls.__doc__ else ""
        listed = (section or "").partition("Attributes:\n")[2].partition("\n\n")[0]
        for name, text in re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", listed, re.M):
            meanings[name] = " ".join(text.replace("``", "`").split())
    for field in fields(config):
        known = field.default is not MISSING
        yield field.name, f"`{dump(field.default)}`" if known else "", meanings[field.name]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
