"""Advice that messages give can be followed: the commands, options and extras that they name exist."""

import ast
import functools
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import typer

from pipelines.commands import app as cli
from pipelines.commands import exit_codes
from tests.test_imports import PACKAGES, imported, module_name, modules

ROOT = Path(__file__).parent.parent
COMMANDS = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
SOURCES = {module_name(path): path.read_text(encoding="utf-8") for path in modules()}
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]

OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9_-]*")
CALL = re.compile(r"imagepivot ([a-z]+(?:-[a-z]+)*)(.*?)(?=, imagepivot |$)")
EXTRA = re.compile(r"imagepivot\[(\w+)\]")
# Options of other programs: pip, tar, docker, Beam.
OTHERS = {
    *("--no-build-isolation", "--upgrade", "--dereference", "--hard-dereference", "--gpus", "--shm-size"),
    *("--runner", "--project", "--job_endpoint", "--job_name", "--region", "--job_server_timeout", "--experiments"),
    *("--dataflow_service_options", "--resource_hints", "--worker_machine_type", "--template_location"),
}
# Words that follow the name in prose, as in "this version of imagepivot reads".
PROSE = {"has", "reads", "run"}


def options_of(command: str) -> set[str]:
    return {option for parameter in COMMANDS[command].params for option in parameter.opts + parameter.secondary_opts}


def literals(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of every string that is no docstring; a formatted value is ``X``."""
    tree = ast.parse(source)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    skipped = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            skipped.update(map(id, node.values))
            yield node.lineno, "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            yield node.lineno, node.value


@functools.cache
def messages() -> list[tuple[str, int, str]]:
    """Module, line and text of every string of the program that is no docstring."""
    return [(module, line, text) for module, source in SOURCES.items() for line, text in literals(source)]


def test_options_in_messages_exist():
    every_option = set().union(*map(options_of, COMMANDS), OTHERS)
    texts = [
        re.sub(r"imagepivot [a-z]+ .*", "", text) for place, _, text in messages() if not place.startswith("pipelines.commands")
    ]
    named = {option for text in texts for option in OPTION.findall(text)}
    assert named - every_option == set()
    assert len(named) > 60


def test_commands_in_messages_exist_with_their_options():
    wrong = []
    for module, line, text in messages():
        for command, rest in CALL.findall(text):
            if command not in COMMANDS:
                wrong += [f"{module}:{line} names the command {command}"] if command not in PROSE else []
            elif missing := set(OPTION.findall(rest)) - options_of(command) - OTHERS:
                wrong.append(f"{module}:{line} names {', '.join(missing)} of {command}")
    assert wrong == []


@pytest.mark.parametrize("name", COMMANDS)
def test_options_in_help_exist(name):
    command = COMMANDS[name]
    texts = [command.help or "", *(parameter.help or "" for parameter in command.params)]
    assert set(OPTION.findall(" ".join(texts))) <= options_of(name) | OTHERS


# --- extras ----------------------------------------------------------------------------------------------------------


def distributions(extra: str) -> set[str]:
    """Names of the distributions that an extra brings, by way of other extras too."""
    found = set()
    for requirement in EXTRAS[extra]:
        if nested := re.match(r"imagepivot\[([\w,]+)\]", requirement):
            found.update(*map(distributions, nested[1].split(",")))
        else:
            found.add(re.match(r"[\w.-]+", requirement)[0].lower())
    return found


def test_extras_in_messages_exist():
    named = {extra for _, _, text in messages() for extra in EXTRA.findall(text)} - {"X"}
    assert named <= set(EXTRAS)
    assert "hdf5" in named


@pytest.mark.slow
def test_extras_provide_their_modules():
    providers = packages_distributions()
    for extra, names in exit_codes._EXTRAS.items():
        for name in names:
            assert {provider.lower().replace("_", "-") for provider in providers[name]} & distributions(extra), (
                f"{name} is not in {extra}"
            )


@pytest.mark.slow
def test_every_optional_import_has_an_extra():
    base = {*sys.stdlib_module_names, *PACKAGES, "imagepivot", "numpy", "pyarrow", "typer", "rich"}
    packages = {name for source in SOURCES.values() for _, name in imported(source)}
    # detectron2, and what it brings, is built from source: a message of its own says how. So
    # does one for Google's packages, which an extra of Beam's brings.
    assert packages - base - {"detectron2", "yaml", "google"} <= set().union(*exit_codes._EXTRAS.values())


@pytest.mark.parametrize(
    ("command", "module", "extra"),
    [
        ("features", "timm", "timm"),
        ("view", "PIL", "all"),
        ("search", "sacremoses", "text"),
        ("figures", "torch", "figures"),
        ("captions", "botocore", "text"),
    ],
)
def test_advised_extra_belongs_to_the_command(monkeypatch, command, module, extra):
    monkeypatch.setattr(sys, "argv", ["imagepivot", command])
    assert exit_codes._extra_for(module) == extra
