"""Plans: commands with their options in a TOML file, each a step, run in order.

A plan keeps no state. Every command recognises by fingerprint and content whether its output is up to date, and continues what was
stopped, so that a plan is built again by running all of its commands again.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Protocol

from schemas.conversion import convert, did_you_mean, parse_toml, parse_value
from schemas.errors import ImagepivotError, InputError, UsageError
from schemas.storage.locations import is_remote, local_path, plain_location
from schemas.text import read_text

_FOLDER = Path(__file__).parent
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_TOP = {"description": str, "extends": str, "output": str, "paths": dict, "steps": dict}
_LIKE = "like:"
_CORPUS = ("captions", "features", "vocabulary", "word_vectors", "token_features", "memory_map")

COMMANDS: Mapping[str, tuple[str, ...]] = {
    "demo": (),
    "captions": ("source", "truecaser"),
    "vocabulary": ("captions",),
    "encode": ("captions", "vocabulary"),
    "word-vectors": ("vocabulary", "files"),
    "features": ("images", "weights", "class_names", "attribute_names"),
    "token-features": ("captions", "model"),
    "import": ("sources", "ids", "boxes", "sizes", "karpathy"),
    "export": ("dataset", "captions", "lists"),
    "view": ("dataset", "images"),
    "train": (*_CORPUS, "init_from"),
    "evaluate": ("run", "captions", "features", "token_features", "memory_map"),
    "embed": ("run", "features", "captions", "token_features"),
    "sts": ("places", "vectors", "truecaser"),
    "figures": ("run", "captions", "features", "token_features", "images", "memory_map"),
    "reproduce": (*_CORPUS, "sts", "truecaser"),
}
"""The commands that may be steps, each with the parameters that name locations."""

_DEFAULTS = {"features": {"update": True}, "train": {"resume": True}, "view": {"overwrite": True}}
"""Values that a step has where the plan gives no others: with them, a command may be given again."""

_SUFFIXES = {"view": ".png", "evaluate": ".json"}
_NAMED = {"weights": r"default|[^/]*:.*", "model": r"[\w.-]+(/[\w.-]+)?"}
"""Parameters that may be a name instead of a location, where nothing is at a location of that name."""


class StepError(ImagepivotError):
    """The command of a step failed, with an exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class StepCommand(Protocol):
    """A command as the command line knows it; `pipelines.commands.binding.Command` is one."""

    @property
    def options(self) -> Mapping[str, Any]:
        """The options by key, e.g. ``min_count``; each has its ``name``, e.g. ``min-count``."""

    def convert(self, table: Mapping[str, Any], place: str) -> dict[str, Any]:
        """Check a table of options, and return their values by the keys, or raise a `UsageError`."""

    def words(self, values: Mapping[str, Any]) -> list[str]:
        """Return the words of a command line, the command's name first."""


@dataclass(frozen=True)
class Step:
    """A step of a plan.

    Attributes:
        values: values of the command's parameters, with locations in place of names of steps and paths.
        needs: names of the steps whose results it reads.
        environment: variables for the process.
    """

    name: str
    command: str
    values: Mapping[str, Any]
    needs: tuple[str, ...]
    output: str
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """A plan: all steps by name, each after those that it needs."""

    name: str
    output: str
    steps: Mapping[str, Step]

    def choose(self, targets: Sequence[str]) -> tuple[Step, ...]:
        """Return the steps of these names and all that they need, in order; every step where no name is given.

        Raises:
            UsageError: there is no step of a name.
        """
        wanted = set(targets or self.steps)
        if unknown := [name for name in targets if name not in self.steps]:
            raise UsageError(f"plan {self.name!r} has no step {unknown[0]!r}{did_you_mean(unknown[0], self.steps)}")
        for step in reversed(list(self.steps.values())):
            if step.name in wanted:
                wanted.update(step.needs)
        return tuple(step for step in self.steps.values() if step.name in wanted)


def words_of(steps: Sequence[Step], commands: Mapping[str, StepCommand], overwrite: Collection[str] = ()) -> list[list[str]]:
    """Return the words of each step's command, with ``--overwrite`` for the steps of some names.

    Raises:
        UsageError: the command of such a step has no ``--overwrite``.
    """
    words = []
    for step in steps:
        values = step.values
        if step.name in overwrite:
            if "overwrite" not in commands[step.command].options:
                raise UsageError(
                    f"--overwrite {step.name}: imagepivot {step.command} has no --overwrite; delete {step.output!r} instead"
                )
            values = {name: value for name, value in values.items() if name != "update"} | {"overwrite": True}
        try:
            words.append(commands[step.command].words(values))
        except UsageError as error:
            raise UsageError(f"{error} (in steps.{step.name})") from None
    return words


def build(
    steps: Sequence[Step],
    commands: Sequence[Sequence[str]],
    run: Callable[[Sequence[str], Mapping[str, str]], int],
    tell: Callable[[str], None] = lambda text: None,
) -> None:
    """Run the commands of steps in order, up to the first that fails.

    `schemas.process.steps.run_command` runs one, given its words and its variables, and returns its exit code.

    Raises:
        StepError: a command failed.
    """
    for number, (step, words) in enumerate(zip(steps, commands, strict=True)):
        tell(f"{step.name}: imagepivot {shlex.join(words)}")
        if code := run(words, step.environment):
            later = ", ".join(step.name for step in steps[number + 1 :])
            raise StepError(
                f"step {step.name} (imagepivot {step.command}) ended with exit code {code}"
                f"{f', and was not followed by {later}' if later else ''}. Do what it advises, then give the same command again",
                code,
            )


def plan_names() -> tuple[str, ...]:
    """Return the names of the plans that come with the package."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))


def read_plan(
    source: str, commands: Mapping[str, StepCommand], *, output: str = "", settings: Mapping[str, str] | None = None
) -> Plan:
    """Read and check a plan.

    Args:
        source: name of a plan that comes with the package, or path of a TOML file, which ends in ``.toml``.
        commands: the commands by name.
        output: folder for the results; the plan's own if empty.
        settings: values by dotted key, as TOML, e.g. ``{"steps.vocabulary.min-count": "5"}``; a word needs no quotes.

    Raises:
        UsageError: there is no such plan, or something in it is not understood.
    """
    table = read_table(source)
    given = {_override(table, key, text) for key, text in (settings or {}).items()}
    folder = local_path(source).parent if source.endswith(".toml") else Path()
    name = Path(source).stem
    own = table.get("output", f"build/{name}")
    place = _locate(output, Path()) if output else _locate(own, Path() if ("output",) in given else folder)
    try:
        sections = table.get("steps", {})
        if not sections:
            raise UsageError("it has no steps: a section [steps.NAME] with a command makes one")
        paths = {
            key: _locate(convert(value, str, f"paths.{key}"), Path() if ("paths", key) in given else folder)
            for key, value in table.get("paths", {}).items()
        }
        outputs = {key: _output_of(key, section, place) for key, section in sections.items()}
        reader = _Reader(paths, outputs, commands, folder)
        steps = {
            key: reader.step(key, section, {part[2] for part in given if part[:2] == ("steps", key)})
            for key, section in sections.items()
        }
        steps = {key: steps[key] for key in _order({key: step.needs for key, step in steps.items()})}
    except UsageError as error:
        raise UsageError(f"plan {source!r}: {error}") from error
    return Plan(name, place, steps)


def _output_of(name: str, section: Any, folder: str) -> str:
    """Return the location of a step's result."""
    place = f"steps.{name}"
    if not _NAME.fullmatch(name):
        raise UsageError(f"{place}: a step is called by letters, digits, - and _, beginning with a letter or digit")
    if not isinstance(section, dict):
        raise UsageError(f"{place} is {section!r}, expected a section [{place}]")
    command = convert(section.get("command", ""), str, f"{place}.command")
    if command not in COMMANDS:
        found = f"{place}.command is {command!r}" if command else f"{place} has no command"
        raise UsageError(f"{found}{did_you_mean(command, COMMANDS)}")
    output = plain_location(convert(section.get("output", name + _SUFFIXES.get(command, "")), str, f"{place}.output"))
    if output in ("", "."):
        raise UsageError(f"{place}.output is {output!r}, expected a location; it starts at the folder of the build")
    return output if is_remote(output) or output.startswith("/") else f"{folder.rstrip('/')}/{output}"


@dataclass(frozen=True)
class _Reader:
    """Reads sections: relative locations start at ``folder``, those of keys that a command line gives at the current one."""

    paths: Mapping[str, str]
    outputs: Mapping[str, str]
    commands: Mapping[str, StepCommand]
    folder: Path

    def step(self, name: str, section: Mapping[str, Any], given: Collection[str]) -> Step:
        """Read the section of a step."""
        place = f"steps.{name}"
        if name in self.paths:
            raise UsageError(f"{place} and paths.{name} have one name: call one of them otherwise")
        table = {key: value for key, value in section.items() if key not in ("command", "output", "environment")}
        command, environment = section["command"], section.get("environment", {})
        if not isinstance(environment, dict):
            raise UsageError(f"{place}.environment is {environment!r}, expected a table of texts")
        values = self.commands[command].convert(table, place)
        keys = {key: option.name for key, option in self.commands[command].options.items()}
        if empty := [keys[parameter] for parameter, value in values.items() if value in ("", ())]:
            raise UsageError(f"{place}.{empty[0]} is empty: give a value, or leave the key out for its default")
        needs: dict[str, None] = {}
        for parameter, value in values.items():
            base, where = Path() if keys[parameter] in given else self.folder, f"{place}.{keys[parameter]}"
            if parameter in COMMANDS[command]:
                several = value if isinstance(value, tuple) else (value,)
                found = [self._location(item, base, where, needs, _NAMED.get(parameter)) for item in several]
                values[parameter] = tuple(found) if isinstance(value, tuple) else found[0]
            elif parameter == "shards" and isinstance(value, str) and value.startswith(_LIKE):
                values[parameter] = _LIKE + self._location(value.removeprefix(_LIKE), base, where, needs)
            elif (command, parameter) == ("train", "config") and value.endswith(".toml"):
                values[parameter] = _locate(value, base)
        values = {**_DEFAULTS.get(command, {}), **values, "output": self.outputs[name]}
        variables = {key: convert(value, str, f"{place}.environment.{key}") for key, value in environment.items()}
        return Step(name, command, values, tuple(needs), self.outputs[name], variables)

    def _location(self, value: str, base: Path, place: str, needs: dict[str, None], names: str | None = None) -> str:
        """Return the location that a value means, and note the step that it names."""
        first, slash, rest = value.partition("/")
        if first in self.outputs:
            needs[first] = None
            return f"{self.outputs[first]}{slash}{rest}"
        if first in self.paths:
            if self.paths[first]:
                return f"{self.paths[first]}{slash}{rest}"
            raise UsageError(
                f"{place} needs paths.{first}, which is not given: --set paths.{first}=LOCATION, or [paths] in a plan"
            )
        location = _locate(value, base)
        if is_remote(location) or os.path.lexists(location):
            return location
        if names is not None and re.fullmatch(names, value):
            return value
        if "/" not in value and (matches := get_close_matches(value, (*self.outputs, *self.paths), n=1)):
            raise UsageError(f"{place} is {value!r}, and there is no such step, path or file: did you mean {matches[0]!r}?")
        return location


def read_table(source: str, folder: Path = Path(), chain: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return a plan as a table, with what it leaves out from the plan that it extends.

    Args:
        source: as `read_plan` takes it.
        folder: where a relative path starts.
        chain: the plans that extend it, the first one first.

    Raises:
        UsageError: there is no such plan, or it is not TOML.
    """
    by = f"{chain[-1]!r} extends {source!r}, but " if chain else ""
    if source in chain:
        raise UsageError(f"plan {chain[0]!r}: extends goes round in a circle: {' -> '.join((*chain, source))}")
    if not source.endswith(".toml") and source not in plan_names():
        close = did_you_mean(source, plan_names())
        raise UsageError(f"{by}there is no plan {source!r}{close} (a plan of your own is a file that ends in .toml)")
    file = folder / local_path(source) if source.endswith(".toml") else _FOLDER / f"{source}.toml"
    if not os.path.isfile(file):  # noqa: PTH113 -- false, too, where no file can be
        advice = "check the path; imagepivot build --list lists the plans of the package"
        raise UsageError(f"{by}there is no file {str(file)!r}: {advice}")
    try:
        table = parse_toml(read_text(file))
    except (InputError, UsageError) as error:
        raise UsageError(f"{str(file)!r} is not a plan: {error}") from error
    for key, value in table.items():
        if key not in _TOP:
            raise UsageError(f"plan {source!r} has a key {key!r}{did_you_mean(key, _TOP)}")
        convert(value, _TOP[key], f"plan {source!r}: {key}")
    if "extends" not in table:
        return table
    base = read_table(table.pop("extends"), file.parent, (*chain, source))
    steps = {**base.get("steps", {})}
    for name, section in table.get("steps", {}).items():
        before = steps.get(name)
        if isinstance(section, dict) and isinstance(before, dict):
            is_same = section.get("command", before.get("command")) == before.get("command")
            section = {**_without(before, section), **section} if is_same else section
        steps[name] = section
    return {**base, **table, "paths": {**base.get("paths", {}), **table.get("paths", {})}, "steps": steps}


def _without(section: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    """Return a section without some keys; ``a-b`` and ``a_b`` are one key."""
    plain = {key.replace("_", "-") for key in keys}
    return {key: value for key, value in section.items() if key.replace("_", "-") not in plain}


def _override(table: dict[str, Any], key: str, text: str) -> tuple[str, ...]:
    """Set one value, and return the parts of its key."""
    parts = tuple(key.split("."))
    if not (parts == ("output",) or (parts[0], len(parts)) in (("paths", 2), ("steps", 3))):
        raise UsageError(f"--set {key!r}: expected paths.NAME, steps.NAME.OPTION or output")
    if parts[0] != "steps":
        (table if len(parts) == 1 else table.setdefault("paths", {}))[parts[-1]] = text
        return parts
    steps = table.get("steps", {})
    if parts[1] not in steps:
        raise UsageError(f"--set {key!r}: the plan has no step {parts[1]!r}{did_you_mean(parts[1], steps)}")
    option = parts[2].replace("_", "-")
    steps[parts[1]] = {**_without(steps[parts[1]], (option,)), option: parse_value(text)}
    return ("steps", parts[1], option)


def _order(needs: Mapping[str, Sequence[str]]) -> list[str]:
    """Return names so that each follows those that it needs, else as they were."""
    ordered: dict[str, None] = {}

    def add(name: str, chain: tuple[str, ...]) -> None:
        if name in chain:
            raise UsageError(f"the steps need each other in a circle: {' -> '.join((*chain[chain.index(name) :], name))}")
        for other in needs[name] if name not in ordered else ():
            add(other, (*chain, name))
        ordered[name] = None

    for name in needs:
        add(name, ())
    return list(ordered)


def _locate(value: Any, base: Path) -> str:
    """Return a location that means the same in every folder; empty stays empty."""
    text = plain_location(value) if value else ""
    return text if not text or is_remote(text) else os.path.abspath(base / text)  # noqa: PTH100 -- links are kept
