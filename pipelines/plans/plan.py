"""Plans: TOML files of steps, each a command with its options, run in order.

A plan has no build state of its own. Every command recognises by fingerprint and content whether its output
is up to date, and resumes an unfinished one. Building a plan again therefore runs all of its commands again.
"""

import os
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import product
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
    "text-features": ("captions", "model", "weights"),
    "import": ("sources", "ids", "boxes", "sizes", "karpathy"),
    "export": ("dataset", "captions", "lists"),
    "view": ("dataset", "images"),
    "train": (*_CORPUS, "init_from"),
    "evaluate": ("run", "captions", "features", "token_features", "memory_map"),
    "compare": ("runs",),
    "embed": ("run", "features", "captions", "token_features"),
    "sts": ("places", "vectors", "truecaser"),
    "search": ("run", "features", "embeddings", "truecaser", "images", "captions"),
    "figures": ("run", "captions", "features", "token_features", "images", "memory_map"),
    "reproduce": (*_CORPUS, "sts", "truecaser"),
}
"""Commands of steps, each with its parameters that are locations."""

_DEFAULTS = {"features": {"update": True}, "train": {"resume": True}, "view": {"overwrite": True}}
"""Default values for steps, with which a command can run again."""

_OUTPUTS = ("output", "memory_map", "metrics_file")
_SUFFIXES = {"view": ".png", "search": ".html"}
_JOINT = "(open_clip|sentence):.+"
_NAMED = {"weights": r"default|[^/]*:.*", "model": rf"[\w.-]+(/[\w.-]+)?|{_JOINT}", "run": _JOINT}
"""Parameters that may be a name, as a pattern, instead of a location; an existing location wins."""

_VARIABLES = re.compile(
    r"CUDA_VISIBLE_DEVICES|CUDA_DEVICE_ORDER|PYTORCH_(CUDA_)?ALLOC_CONF|MALLOC_(ARENA_MAX|(TRIM|MMAP)_THRESHOLD_)"
    r"|(OMP|MKL|OPENBLAS|NUMEXPR|RAYON)_NUM_THREADS|OMP_(PLACES|PROC_BIND)|KMP_(AFFINITY|BLOCKTIME)|TOKENIZERS_PARALLELISM"
    r"|IMAGEPIVOT_(?!CACHE$).+"
)
"""Variables that a plan may set: devices, threads, memory, and a project's own. The cache holds compiled code."""


class StepError(ImagepivotError):
    """The command of a step failed, with an exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class PlanCommand(Protocol):
    """A command of the command line, see `pipelines.commands.binding.Command`."""

    @property
    def options(self) -> Mapping[str, Any]:
        """The options by key, e.g. ``min_count``; see `pipelines.commands.binding.Option`."""

    def convert(self, table: Mapping[str, Any], place: str) -> dict[str, Any]:
        """Check a table of options, and return values by key, or raise a `UsageError`."""

    def words(self, values: Mapping[str, Any]) -> list[str]:
        """Return the words of a command line, with the command's name first."""


@dataclass(frozen=True)
class Step:
    """A step of a plan.

    Attributes:
        values: values of the command's parameters; names of steps and paths are replaced by locations.
        dependencies: names of the steps with outputs that it reads.
        environment: variables for the process.
    """

    name: str
    command: str
    values: Mapping[str, Any]
    dependencies: tuple[str, ...]
    output: str
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """A plan: all steps by name, each after its dependencies."""

    name: str
    output: str
    steps: Mapping[str, Step]

    def choose(self, targets: Sequence[str]) -> tuple[Step, ...]:
        """Return the named steps, or all, with their dependencies, in order.

        Raises:
            UsageError: a name is unknown.
        """
        wanted = set(targets or self.steps)
        if unknown := [name for name in targets if name not in self.steps]:
            raise UsageError(f"plan {self.name!r} has no step {unknown[0]!r}{did_you_mean(unknown[0], self.steps)}")
        for step in reversed(list(self.steps.values())):
            if step.name in wanted:
                wanted.update(step.dependencies)
        return tuple(step for step in self.steps.values() if step.name in wanted)


def command_lines(
    steps: Sequence[Step], commands: Mapping[str, PlanCommand], overwrite: Collection[str] = ()
) -> list[list[str]]:
    """Return the words of each step's command, with ``--overwrite`` where named.

    Raises:
        UsageError: the command of such a step has no ``--overwrite``.
    """
    lines = []
    for step in steps:
        values = step.values
        if step.name in overwrite:
            if "overwrite" not in commands[step.command].options:
                raise UsageError(
                    f"--overwrite {step.name}: imagepivot {step.command} has no --overwrite; delete {step.output!r} instead"
                )
            values = {name: value for name, value in values.items() if name != "update"} | {"overwrite": True}
        try:
            lines.append(commands[step.command].words(values))
        except UsageError as error:
            raise UsageError(f"{error} (in steps.{step.name})") from None
    return lines


def build(
    steps: Sequence[Step],
    commands: Sequence[Sequence[str]],
    run: Callable[[Sequence[str], Mapping[str, str]], int],
    on_step: Callable[[str], None] = lambda text: None,
) -> None:
    """Run the commands of steps in order, up to the first that fails.

    The commands are those of `command_lines`. `run` runs one with variables and returns its exit code, e.g.
    `schemas.process.steps.run_command`. `on_step` is called with name and command of a step before it runs.

    Raises:
        StepError: a command failed.
    """
    for index, (step, words) in enumerate(zip(steps, commands, strict=True)):
        on_step(f"{step.name}: imagepivot {shlex.join(words)}")
        if code := run(words, step.environment):
            names = ", ".join(step.name for step in steps[index + 1 :])
            skipped = f", these steps did not run: {names}" if names else ""
            raise StepError(
                f"step {step.name} (imagepivot {step.command}) failed with exit code {code}{skipped}. "
                "Follow its message, then run the same command again",
                code,
            )


def plan_names() -> tuple[str, ...]:
    """Return the names of the built-in plans."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))


def read_plan(
    source: str,
    commands: Mapping[str, PlanCommand],
    *,
    output: str = "",
    settings: Mapping[str, str] | None = None,
    trust: bool = False,
) -> Plan:
    """Read and check a plan.

    Args:
        source: name of a built-in plan, or path of a TOML file, which ends in ``.toml``.
        commands: the commands by name.
        output: folder for the results; the plan's own if empty.
        settings: values by dotted key, as TOML, e.g. ``{"steps.vocabulary.min-count": "5"}``; a word needs no quotes.
        trust: whether the plan may name code to run, set any variable, and write anywhere. Else outputs lie
            below the plan's folder, the current one, or that of ``output``. ``settings`` are trusted.

    Raises:
        UsageError: the plan is missing, or a key or value in it is invalid or not trusted.
    """
    table = read_plan_table(source)
    overrides = {_override(table, key, text) for key, text in (settings or {}).items()}
    folder = local_path(source).parent if source.endswith(".toml") else Path()
    name = Path(source).stem
    is_override = bool(output) or ("output",) in overrides
    output = _rebase(output or table.get("output", f"build/{name}"), Path() if is_override else folder)
    try:
        sections = table.get("steps", {})
        if not sections:
            raise UsageError("it has no steps: a section [steps.NAME] with a command makes one")
        paths = {
            key: _rebase(convert(value, str, f"paths.{key}"), Path() if ("paths", key) in overrides else folder)
            for key, value in table.get("paths", {}).items()
        }
        outputs = {key: _output_of(key, section, output) for key, section in sections.items()}
        _check_distinct(outputs)
        reader = _Reader(paths, outputs, commands, folder, trust)
        steps = {
            key: reader.step(key, section, {parts[2] for parts in overrides if parts[:2] == ("steps", key)})
            for key, section in sections.items()
        }
        if not trust:
            _check_outputs(steps.values(), overrides, [str(folder), ".", *([output] if is_override else [])])
        steps = _order(steps)
    except UsageError as error:
        raise UsageError(f"plan {source!r}: {error}") from error
    return Plan(name, output, steps)


def _output_of(name: str, section: Any, folder: str) -> str:
    """Return the location of a step's output."""
    place = f"steps.{name}"
    if not _NAME.fullmatch(name):
        raise UsageError(f"{place}: expected a step name of letters, digits, - and _ that begins with a letter or digit")
    if not isinstance(section, dict):
        raise UsageError(f"{place} is {section!r}, expected a section [{place}]")
    command = convert(section.get("command", ""), str, f"{place}.command")
    if command not in COMMANDS:
        problem = f"{place}.command is {command!r}" if command else f"{place} has no command"
        raise UsageError(f"{problem}{did_you_mean(command, COMMANDS)}")
    output = plain_location(convert(section.get("output", name + _SUFFIXES.get(command, "")), str, f"{place}.output"))
    if output in ("", "."):
        raise UsageError(f"{place}.output is {output!r}, expected a location, relative to the output folder of the plan")
    return output if is_remote(output) or output.startswith("/") else f"{folder.rstrip('/')}/{output}"


def _check_distinct(outputs: Mapping[str, str]) -> None:
    """Check that no two steps write one output; an output inside another one is valid."""
    steps: dict[str, str] = {}
    for name, output in outputs.items():
        if (other := steps.setdefault(_real(output), name)) != name:
            raise UsageError(f"steps.{other} and steps.{name} both write {output!r}: give one of them another output")


def _check_outputs(steps: Iterable[Step], overrides: Collection[tuple[str, ...]], roots: Sequence[str]) -> None:
    """Refuse outputs that are neither overridden nor in a root; links are followed."""
    real = [os.path.join(_real(root), "") for root in roots]  # noqa: PTH118 -- a location may be in a store
    for step, key in product(steps, _OUTPUTS):
        output = _rebase(step.values.get(key), Path())
        is_checked = output and ("steps", step.name, key.replace("_", "-")) not in overrides
        if is_checked and not any(_real(output).startswith(root) for root in real):
            raise UsageError(
                f"steps.{step.name}: the plan would write {output!r}, which is outside its folder and the current one: nothing was "
                "done. Name a folder with --output, or give --trust if you know the plan"
            )


def _real(location: str) -> str:
    return location.rstrip("/") if is_remote(location) else os.path.realpath(location)


@dataclass(frozen=True)
class _Reader:
    """Reader of steps, with locations relative to ``folder``."""

    paths: Mapping[str, str]
    outputs: Mapping[str, str]
    commands: Mapping[str, PlanCommand]
    folder: Path
    trust: bool

    def step(self, name: str, section: Mapping[str, Any], overrides: Collection[str]) -> Step:
        """Read the section of a step."""
        place = f"steps.{name}"
        if name in self.paths:
            raise UsageError(f"{place} and paths.{name} have the same name: rename one of them")
        table = {key: value for key, value in section.items() if key not in ("command", "output", "environment")}
        command = section["command"]
        variables = convert(section.get("environment", {}), dict[str, str], f"{place}.environment")
        values = self.commands[command].convert(table, place)
        keys = {key: option.name for key, option in self.commands[command].options.items()}
        for key, value in values.items():
            if not self.trust and keys[key] not in overrides:
                self.commands[command].options[key].check_code(value, place)
        if empty := [keys[parameter] for parameter, value in values.items() if value in ("", ())]:
            raise UsageError(f"{place}.{empty[0]} is empty: give a value, or leave the key out for its default")
        dependencies: dict[str, None] = {}
        for parameter, value in values.items():
            base, key = Path() if keys[parameter] in overrides else self.folder, f"{place}.{keys[parameter]}"
            if parameter in COMMANDS[command]:
                items = value if isinstance(value, tuple) else (value,)
                locations = [self._location(item, base, key, dependencies, _NAMED.get(parameter)) for item in items]
                values[parameter] = tuple(locations) if isinstance(value, tuple) else locations[0]
            elif parameter == "shards" and isinstance(value, str) and value.startswith(_LIKE):
                values[parameter] = _LIKE + self._location(value.removeprefix(_LIKE), base, key, dependencies)
            elif (command, parameter) == ("train", "config") and value.endswith(".toml"):
                values[parameter] = _rebase(value, base)
        values = {**_DEFAULTS.get(command, {}), **values, "output": self.outputs[name]}
        own = f"IMAGEPIVOT_{command.upper().replace('-', '_')}_"
        refused = [key for key in variables if not _VARIABLES.fullmatch(key) or key.startswith(own)]
        if refused and not self.trust:
            raise UsageError(
                f"{place}.environment sets {refused[0]}, and a variable can run code: nothing was done. Expected one of devices, "
                "threads or memory, or IMAGEPIVOT_NAME of your own; give --trust if you know the plan"
            )
        return Step(name, command, values, tuple(dependencies), self.outputs[name], variables)

    def _location(self, value: str, base: Path, key: str, dependencies: dict[str, None], names: str | None = None) -> str:
        """Resolve a value to a location, and add its step to the dependencies."""
        first, slash, rest = value.partition("/")
        if first in self.outputs:
            dependencies[first] = None
            return f"{self.outputs[first]}{slash}{rest}"
        if first in self.paths:
            if self.paths[first]:
                return f"{self.paths[first]}{slash}{rest}"
            raise UsageError(
                f"{key} needs paths.{first}, which is not set: give --set paths.{first}=LOCATION, or set it in [paths] of the plan"
            )
        location = _rebase(value, base)
        if is_remote(location) or os.path.lexists(location):
            return location
        if names is not None and re.fullmatch(names, value):
            return value
        if "/" not in value and (matches := get_close_matches(value, (*self.outputs, *self.paths), n=1)):
            raise UsageError(f"{key} is {value!r}, which is not a step, path or file: did you mean {matches[0]!r}?")
        return location


def read_plan_table(source: str, folder: Path = Path(), chain: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return a plan as a table, merged into the plan that it extends.

    A relative path begins in `folder`; `chain` holds the plans that extend this one, outermost first.

    Raises:
        UsageError: the plan is missing, is not TOML, or has an unknown key.
    """
    by = f"{chain[-1]!r} extends {source!r}, but " if chain else ""
    if source in chain:
        raise UsageError(f"plan {chain[0]!r} extends itself: {' -> '.join((*chain, source))}")
    if not source.endswith(".toml") and source not in plan_names():
        close = did_you_mean(source, plan_names())
        raise UsageError(f"{by}there is no plan {source!r}{close} (a plan of your own is a file that ends in .toml)")
    file = folder / local_path(source) if source.endswith(".toml") else _FOLDER / f"{source}.toml"
    if not os.path.isfile(file):  # noqa: PTH113 -- False, not an error, for impossible paths
        place = source if is_remote(source) else str(file)  # A path would lose a slash of an address, and its password show.
        raise UsageError(f"{by}there is no file {place!r}: check the path, or see imagepivot build --list for built-in plans")
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
    base = read_plan_table(table.pop("extends"), file.parent, (*chain, source))
    steps = {**base.get("steps", {})}
    for name, section in table.get("steps", {}).items():
        before = steps.get(name)
        if isinstance(section, dict) and isinstance(before, dict):
            is_same = section.get("command", before.get("command")) == before.get("command")
            section = {**_without(before, section), **section} if is_same else section
        steps[name] = section
    return {**base, **table, "paths": {**base.get("paths", {}), **table.get("paths", {})}, "steps": steps}


def _without(section: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    """Return a section without the given keys; ``a-b`` and ``a_b`` are one key."""
    removed = {key.replace("_", "-") for key in keys}
    return {key: value for key, value in section.items() if key.replace("_", "-") not in removed}


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


def _order(steps: Mapping[str, Step]) -> dict[str, Step]:
    """Sort steps topologically, else in the order of the plan."""
    ordered: dict[str, None] = {}

    def add(name: str, chain: tuple[str, ...]) -> None:
        if name in chain:
            raise UsageError(f"the steps depend on each other: {' -> '.join((*chain[chain.index(name) :], name))}")
        for other in steps[name].dependencies if name not in ordered else ():
            add(other, (*chain, name))
        ordered[name] = None

    for name in steps:
        add(name, ())
    return {name: steps[name] for name in ordered}


def _rebase(value: Any, base: Path) -> str:
    """Return a location, relative below the current folder; empty stays empty."""
    text = plain_location(value) if value else ""
    if not text or is_remote(text):
        return text
    path = os.path.abspath(base / text)  # noqa: PTH100 -- links stay
    relative = os.path.relpath(path)
    return path if relative.startswith((os.pardir, "-")) else relative
