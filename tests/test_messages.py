"""Advice that messages give can be followed: the commands, options and extras that they name exist."""

import ast
import functools
import inspect
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
from tests.test_imports import PACKAGES, graph, imported, imported_modules, module_name, modules

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


def _is_private(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name.startswith("_")


def _imports_of(node: ast.stmt) -> list[str]:
    return [module for _, module in imported_modules(ast.unparse(node), SOURCES)]


def _jobs_in(node: ast.stmt, jobs: dict[str, ast.ClassDef]) -> set[str]:
    """Names of the jobs in a piece of source, and of those in their fields."""
    named: set[str] = set()
    todo = [node]
    while todo:
        found = {part.id for part in ast.walk(todo.pop()) if isinstance(part, ast.Name) and part.id in jobs} - named
        named |= found
        todo += [jobs[name] for name in found]
    return named


@functools.cache
def reached() -> dict[str, set[str]]:
    """By module the commands that can come to it, by the imports in the function of the command and in what it imports."""
    edges: dict[str, set[str]] = {module: set(others) for module, others in graph(SOURCES).items()}
    # The catalogue imports an extractor's module by its name.
    edges["extractors.catalogue"] |= {module for module in SOURCES if module.startswith("extractors.")}
    # The transforms of several commands wrap what the module of each command imports itself.
    edges["pipelines.text.transforms"] = set()
    # A command that takes a job comes to what the job's own methods import.
    jobs = {node.name: node for node in ast.parse(SOURCES["pipelines.jobs"]).body if isinstance(node, ast.ClassDef)}
    lazily = {module for node in jobs.values() for module in _imports_of(node)}
    edges["pipelines.jobs"] -= lazily
    commands: dict[str, set[str]] = {module: set() for module in SOURCES}
    for name, command in COMMANDS.items():
        function = inspect.unwrap(command.callback)
        body = ast.parse(SOURCES[function.__module__]).body
        # Of a module with several commands, the function of this one and what all share.
        # What is imported for annotations alone stands in an `if`.
        shared = [node for node in body if not isinstance(node, (ast.FunctionDef, ast.If)) or _is_private(node)]
        own = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == function.__name__]
        todo = [module for node in shared + own for _, module in imported_modules(ast.unparse(node), SOURCES)]
        todo += [module for node in own for job in _jobs_in(node, jobs) for module in _imports_of(jobs[job])]
        if name == "build":
            todo.append("pipelines.commands.build")  # By way of the function for Python.
        while todo:
            module = todo.pop()
            if name not in commands[module]:
                commands[module].add(name)
                todo.extend(edges[module])
    return commands


@functools.cache
def messages() -> list[tuple[str, int, str]]:
    """Module, line and text of every string of the program that is no docstring."""
    return [(module, line, text) for module, source in SOURCES.items() for line, text in literals(source)]


def test_reached_finds_known_commands():
    assert reached()["pipelines.text.vocabulary"] == {"vocabulary"}
    assert {"captions", "features", "view"} <= reached()["pipelines.inputs.tables"]
    assert "train" not in reached()["pipelines.inputs.tables"]
    assert {"evaluate", "reproduce"} <= reached()["train.evaluation.scores"]
    assert sum(bool(OPTION.search(text)) for _, _, text in messages()) > 60


def test_options_in_messages_exist():
    """An option in a message exists for a command that comes to it; in what reads the users' input, for all of them."""
    wrong = []
    for module, line, text in messages():
        if module.startswith("pipelines.commands"):
            continue
        # Builds come to everything, but a step's own command says what it has to say.
        commands = reached()[module] - {"build", "demo"} or reached()[module]
        for option in set(OPTION.findall(re.sub(r"imagepivot [a-z]+ .*", "", text))) - OTHERS:
            having = {command for command in commands if option in options_of(command)}
            if not having or (module.startswith("pipelines.inputs.") and having != commands):
                wrong.append(f"{module}:{line} advises {option}, which {', '.join(sorted(commands - having))} lack")
    assert wrong == []


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
        ("features", "torch", "pipelines"),
        ("features", "timm", "timm"),
        ("view", "PIL", "all"),
        ("import", "h5py", "hdf5"),
        ("reproduce", "matplotlib", "train"),
        ("search", "sacremoses", "text"),
        ("figures", "torch", "figures"),
        ("figures", "sklearn", "figures"),
        ("figures", "botocore", "stores"),
        ("captions", "botocore", "text"),
    ],
)
def test_advised_extra_belongs_to_the_command(monkeypatch, command, module, extra):
    monkeypatch.setattr(sys, "argv", ["imagepivot", command])
    assert exit_codes._extra_for(module) == extra
