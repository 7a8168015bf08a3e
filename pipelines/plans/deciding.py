"""Whether a step has something to do: what it would be made from now, compared with what it was made from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import Any

from pipelines.plans.catalogue import CommandLine
from pipelines.plans.reading import Plan, Reference, Step
from pipelines.plans.records import Record
from pipelines.plans.states import Found, Result, dataset_result, files_result, find
from schemas.errors import InputError
from schemas.locations import is_remote
from schemas.manifest import Manifest
from schemas.storage import Folder

__all__ = ["Look", "Places", "changes", "options_of", "result_of", "version"]


@cache
def version() -> str:
    """Return the version of imagepivot, which may change what a step makes."""
    return metadata.version("imagepivot")


@dataclass(frozen=True)
class Places:
    """Where the results of a plan's steps are."""

    plan: Plan

    def result(self, step: Step) -> str:
        """Return the location of a step's result."""
        if is_remote(step.output) or step.output.startswith("/"):
            return step.output
        return f"{self.plan.output.rstrip('/')}/{step.output}"

    def location(self, reference: Reference) -> str:
        """Return the location of an input."""
        if not reference.step:
            return reference.location
        made = self.result(self.plan.steps[reference.step])
        return f"{made}/{reference.location}" if reference.location else made


def options_of(step: Step, line: CommandLine, shards: int | None) -> dict[str, Any]:
    """Return what of a step's values its result depends on, by key.

    Args:
        step: the step.
        line: the commands.
        shards: shards of the dataset that it takes their number from; None if unknown, or if there is none.
    """
    kept = {name: value for name, value in step.values.items() if name not in step.kind.neutral}
    if step.like is not None:
        kept["shards"] = "like" if shards is None else shards
    options = {step.keys.get(name, name): value for name, value in kept.items()}
    return {**options, **{f"config.{key}": value for key, value in line.configuration(step.command, step.values).items()}}


def result_of(step: Step, location: str, known: Result | None) -> Result | None:
    """Return what a step has made, if it is whole as far as a listing tells."""
    if step.kind.makes == "dataset":
        return dataset_result(location)
    return files_result(location, step.kind.makes, known)


@dataclass
class Look:
    """A look at steps in their order: what each would be made from now.

    Args:
        places: where results are.
        line: the commands.
        records: what is known of the steps.
        results: what the steps before have made; steps that are looked at before they are done are left out.
    """

    places: Places
    line: CommandLine
    records: Mapping[str, Record]
    results: dict[str, Result]

    def at(self, step: Step) -> Record:
        """Return the record that a step would get; of inputs that are not made yet the digest is empty.

        Raises:
            InputError: an input is not there.
        """
        known = self.records.get(step.name)
        return Record(step.command, options_of(step, self.line, self._shards(step)), dict(self._inputs(step, known)), version())

    def _inputs(self, step: Step, known: Record | None) -> Iterator[tuple[str, Found]]:
        for parameter, references in step.inputs.items():
            for number, reference in enumerate(references):
                name = step.keys.get(parameter, parameter) + (f"[{number}]" if len(references) > 1 else "")
                yield name, self._input(step, parameter, reference, known.inputs.get(name) if known is not None else None)

    def _input(self, step: Step, parameter: str, reference: Reference, known: Found | None) -> Found:
        if reference.step:
            made = self.results.get(reference.step)
            return Found("", made.content if made is not None else "")
        location = reference.location
        if parameter in step.kind.named and not location.startswith("/") and not is_remote(location):
            return Found("", location)
        found = find(location, images=parameter in step.kind.images, known=known)
        if found is None:
            raise InputError(
                f"steps.{step.name}.{step.keys.get(parameter, parameter)} is {location!r}, and nothing is there: check the path, "
                "or give another one with --set"
            )
        return found

    def _shards(self, step: Step) -> int | None:
        if step.like is None or (step.like.step and step.like.step not in self.results):
            return None
        return len(Manifest.read(Folder(self.places.location(step.like))).shards)


def changes(before: Record, now: Record) -> list[str]:
    """Say what differs between what a step was made from and what it would be made from."""
    found = []
    if before.command != now.command:
        found.append(f"command: was {before.command}, now {now.command}")
    for key in dict.fromkeys((*now.options, *before.options)):
        was, is_now = before.options.get(key), now.options.get(key)
        if was != is_now:
            found.append(f"{key}: was {_said(was)}, now {_said(is_now)}")
    for name in dict.fromkeys((*now.inputs, *before.inputs)):
        old, new = before.inputs.get(name), now.inputs.get(name)
        if old is None or new is None or new.differs(old):
            found.append(f"{name} changed")
    if before.version != now.version:
        found.append(f"imagepivot: was {before.version}, now {now.version}")
    if before.result is not None and before.result.unread:
        found.append(f"{before.result.unread:,} inputs could not be read")
    return found


def _said(value: Any) -> str:
    return "not given" if value is None else repr(value)
