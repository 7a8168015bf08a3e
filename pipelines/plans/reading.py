"""Plans as TOML: strictly read, each section checked against the options of its command, names put in place of locations."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from pipelines.plans.catalogue import COMMANDS, MANAGED, CommandLine, StepCommand
from schemas.arguments import did_you_mean
from schemas.errors import InputError, UsageError
from schemas.locations import is_remote, local_path, plain_location
from schemas.text import read_text

__all__ = ["Plan", "Reference", "Step", "plan_names", "read_plan", "read_table"]

_SHIPPED = Path(__file__).parent / "shipped"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_TOP = {"description": str, "extends": str, "output": str, "paths": dict, "steps": dict}
_LIKE = "like:"


@dataclass(frozen=True)
class Reference:
    """An input: what another step makes, or a location.

    Attributes:
        step: name of the step; empty for a location.
        location: the location; of a step's result what lies below it, empty for all of it.
    """

    step: str
    location: str


@dataclass(frozen=True)
class Step:
    """A step of a plan.

    Attributes:
        name: its name.
        command: name of the command.
        values: values of the command's parameters, as the plan gives them, inputs and output left out.
        inputs: by parameter, its inputs, in order.
        keys: by parameter, the key in the plan.
        output: location of the result, relative to the folder of the build unless it is absolute.
        like: the step whose number of shards this one takes; empty if none.
        environment: variables for the process.
    """

    name: str
    command: str
    values: Mapping[str, Any]
    inputs: Mapping[str, tuple[Reference, ...]]
    keys: Mapping[str, str]
    output: str
    like: Reference | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> StepCommand:
        """What the catalogue says of the command."""
        return COMMANDS[self.command]

    @property
    def references(self) -> tuple[Reference, ...]:
        """All inputs."""
        found = tuple(reference for references in self.inputs.values() for reference in references)
        return found if self.like is None else (*found, self.like)

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the steps that must be done before."""
        return tuple(dict.fromkeys(reference.step for reference in self.references if reference.step))


@dataclass(frozen=True)
class Plan:
    """A plan.

    Attributes:
        name: its name.
        file: its file; None for a plan that comes with the package.
        description: what it makes, in words.
        output: folder for the results.
        steps: all steps by name, each after those that it needs.
    """

    name: str
    file: Path | None
    description: str
    output: str
    steps: Mapping[str, Step]

    def chosen(self, targets: Sequence[str]) -> tuple[Step, ...]:
        """Return the steps of these names and all that they need, in order; every step where no name is given.

        Raises:
            UsageError: there is no step of a name.
        """
        wanted = set(targets or self.steps)
        for name in targets:
            if name not in self.steps:
                raise UsageError(f"{self.name} has no step {name!r}{did_you_mean(name, self.steps)}")
        for step in reversed(list(self.steps.values())):
            if step.name in wanted:
                wanted.update(step.needs)
        return tuple(step for step in self.steps.values() if step.name in wanted)


def plan_names() -> tuple[str, ...]:
    """Return the names of the plans that come with the package."""
    return tuple(sorted(path.stem for path in _SHIPPED.glob("*.toml")))


def read_plan(source: str, line: CommandLine, *, output: str = "", settings: Mapping[str, str] | None = None) -> Plan:
    """Read and check a plan.

    Args:
        source: name of a plan that comes with the package, or path of a TOML file, which ends in ``.toml``.
        line: the commands.
        output: folder for the results; the plan's own if empty.
        settings: values by dotted key, as TOML, e.g. ``{"steps.vocabulary.min-count": "5"}``; a word needs no quotes.

    Raises:
        UsageError: there is no such plan, or something in it is not understood.
    """
    file = _file(source)
    table = read_table(source)
    given = {_override(table, key, text) for key, text in (settings or {}).items()}
    folder = file.parent if file is not None else Path()
    name = Path(source).stem
    try:
        paths = {
            key: _located(_text(value, f"paths.{key}"), Path() if ("paths", key) in given else folder)
            for key, value in table.get("paths", {}).items()
        }
        reader = _Reader(paths, tuple(table.get("steps", {})), line)
        if not reader.steps:
            raise UsageError("it has no steps: a section [steps.NAME] with a command makes one")
        steps = {
            key: reader.step(key, section, folder, {part[2] for part in given if part[:2] == ("steps", key)})
            for key, section in table["steps"].items()
        }
        steps = {key: steps[key] for key in _order({key: step.needs for key, step in steps.items()})}
    except UsageError as error:
        raise UsageError(f"plan {source!r}: {error}") from error
    own = table.get("output", f"build/{name}")
    place = _located(output, Path()) if output else _located(own, Path() if ("output",) in given else folder)
    return Plan(name, file, table.get("description", ""), place, steps)


@dataclass(frozen=True)
class _Reader:
    paths: Mapping[str, str]
    steps: Sequence[str]
    line: CommandLine

    def step(self, name: str, section: Any, folder: Path, given: Collection[str]) -> Step:
        """Read the section of a step. Relative locations start at the folder, those of keys that are given at the current one."""
        place = f"steps.{name}"
        if not _NAME.fullmatch(name):
            raise UsageError(f"{place}: a step is called by letters, digits, - and _, beginning with a letter or digit")
        if not isinstance(section, dict):
            raise UsageError(f"{place} is {section!r}, expected a section [{place}]")
        if name in self.paths:
            raise UsageError(f"{place} and paths.{name} have one name: call one of them otherwise")
        table = dict(section)
        command = _text(table.pop("command", ""), f"{place}.command")
        if command not in COMMANDS:
            said = f"{place}.command is {command!r}" if command else f"{place} has no command"
            raise UsageError(f"{said}{did_you_mean(command, COMMANDS)}")
        kind = COMMANDS[command]
        output = _text(table.pop("output", name + kind.suffix), f"{place}.output")
        if "," in output or output in ("", "."):
            raise UsageError(f"{place}.output is {output!r}, expected a location; it starts at the folder of the build")
        environment = table.pop("environment", {})
        if not isinstance(environment, dict):
            raise UsageError(f"{place}.environment is {environment!r}, expected a table of texts")
        keys = self.line.names(command)
        for key in table:
            self._refuse(key, keys, place)
        values = self.line.convert(command, table, place)
        written = {parameter: key.replace("_", "-") for key, parameter in keys.items()}
        if empty := [written[parameter] for parameter, value in values.items() if value in ("", [])]:
            raise UsageError(f"{place}.{empty[0]} is empty: give a value, or leave the key out for its default")
        inputs: dict[str, tuple[Reference, ...]] = {}
        for parameter in kind.inputs:
            if value := values.pop(parameter, None):
                base = Path() if written[parameter] in given else folder
                many = value if isinstance(value, list) else [value]
                where = f"{place}.{written[parameter]}"
                inputs[parameter] = tuple(self._reference(item, base, where, kind.named.get(parameter)) for item in many)
        for parameter in kind.places:
            if parameter in values:
                values[parameter] = _located(values[parameter], Path() if written[parameter] in given else folder)
        if command == "train" and str(values.get("config", "")).endswith(".toml"):
            values["config"] = _located(values["config"], Path() if "config" in given else folder)
        like = None
        if isinstance(shards := values.get("shards"), str) and shards.startswith(_LIKE):
            like = self._reference(shards.removeprefix(_LIKE), folder, f"{place}.shards")
        return Step(
            name,
            command,
            values,
            inputs,
            written,
            plain_location(output),
            like,
            {key: _text(value, f"{place}.environment.{key}") for key, value in environment.items()},
        )

    def _refuse(self, key: str, keys: Mapping[str, str], place: str) -> None:
        parameter = keys.get(key.replace("_", "-"), key.replace("-", "_"))
        if parameter in MANAGED and not (parameter == "config" and "config" in keys.values()):
            raise UsageError(f"{place}.{key} is not for a plan: {MANAGED[parameter]}")

    def _reference(self, value: str, base: Path, place: str, names: str | None = None) -> Reference:
        first, _, rest = value.partition("/")
        if first in self.steps:
            return Reference(first, rest)
        if first in self.paths:
            if not self.paths[first]:
                raise UsageError(
                    f"{place} needs paths.{first}, which is not given: --set paths.{first}=LOCATION, or [paths] in a plan"
                )
            return Reference("", f"{self.paths[first]}/{rest}" if rest else self.paths[first])
        if not value:
            raise UsageError(f"{place} is empty, expected a location, or the name of a step")
        location = _located(value, base)
        if names is not None and re.fullmatch(names, value) and not os.path.lexists(location):
            return Reference("", value)
        if "/" not in value and not is_remote(location) and not os.path.lexists(location):
            known = (*self.steps, *self.paths)
            if matches := get_close_matches(value, known, n=1):
                raise UsageError(f"{place} is {value!r}, and there is no such step, path or file: did you mean {matches[0]!r}?")
        return Reference("", location)


def _file(source: str) -> Path | None:
    return local_path(source) if source.endswith(".toml") else None


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
    file = _file(source)
    if file is None:
        if source not in plan_names():
            close = did_you_mean(source, plan_names())
            raise UsageError(f"{by}there is no plan {source!r}{close} (a plan of your own is a file that ends in .toml)")
        file = _SHIPPED / f"{source}.toml"
    else:
        file = folder / file
        if not os.path.isfile(file):  # noqa: PTH113 -- false, too, where no file can be
            raise UsageError(
                f"{by}there is no file {str(file)!r}: check the path; imagepivot build --list lists the plans of the package"
            )
    try:
        table = tomllib.loads(read_text(file))
    except (InputError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"{str(file)!r} is not a plan: {error}") from error
    for key, value in table.items():
        if key not in _TOP:
            raise UsageError(f"plan {source!r} has a key {key!r}{did_you_mean(key, _TOP)}")
        if not isinstance(value, _TOP[key]):
            raise UsageError(
                f"plan {source!r}: {key} is {value!r}, expected {'a table' if _TOP[key] is dict else 'text in quotes'}"
            )
    if "extends" not in table:
        return table
    base = read_table(table.pop("extends"), file.parent, (*chain, source))
    steps = {**base.get("steps", {})}
    for name, section in table.get("steps", {}).items():
        before = steps.get(name)
        if isinstance(section, dict) and isinstance(before, dict):
            is_same = section.get("command", before.get("command")) == before.get("command")
            section = _merged(before, section) if is_same else section
        steps[name] = section
    return {**base, **table, "paths": {**base.get("paths", {}), **table.get("paths", {})}, "steps": steps}


def _merged(base: Mapping[str, Any], section: Mapping[str, Any]) -> dict[str, Any]:
    """Return a section with the keys that it leaves out from another one; ``a-b`` and ``a_b`` are one key."""
    own = {key.replace("_", "-") for key in section}
    return {**{key: value for key, value in base.items() if key.replace("_", "-") not in own}, **section}


def _override(table: dict[str, Any], key: str, text: str) -> tuple[str, ...]:
    """Set one value, and return the parts of its key."""
    parts = tuple(key.split("."))
    is_known = parts == ("output",) or (parts[0] == "paths" and len(parts) == 2) or (parts[0] == "steps" and len(parts) == 3)
    if not is_known:
        raise UsageError(f"--set {key!r}: expected paths.NAME, steps.NAME.OPTION or output")
    if parts[0] == "steps":
        steps = table.get("steps", {})
        if parts[1] not in steps:
            raise UsageError(f"--set {key!r}: the plan has no step {parts[1]!r}{did_you_mean(parts[1], steps)}")
        plain = parts[2].replace("_", "-")
        section = steps[parts[1]] = {name: value for name, value in steps[parts[1]].items() if name.replace("_", "-") != plain}
        section[plain] = _value(text)
        return ("steps", parts[1], plain)
    if parts[0] == "paths":
        table.setdefault("paths", {})[parts[1]] = text
    else:
        table["output"] = text
    return parts


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return text


def _order(needs: Mapping[str, Sequence[str]]) -> list[str]:
    """Return names so that each stands behind those that it needs, else as they were."""
    try:
        tuple(TopologicalSorter(needs).static_order())
    except CycleError as error:
        raise UsageError(f"the steps need each other in a circle: {' -> '.join(reversed(error.args[1]))}") from error
    done: dict[str, None] = {}

    def add(name: str) -> None:
        for other in needs[name]:
            add(other)
        done[name] = None

    for name in needs:
        add(name)
    return list(done)


def _located(value: Any, base: Path) -> str:
    """Return a location that means the same in every folder; empty stays empty."""
    text = plain_location(value) if value else ""
    return text if not text or is_remote(text) else os.path.abspath(base / text)  # noqa: PTH100 -- links are kept


def _text(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{place} is {value!r}, expected text in quotes")
    return value
