"""The lock file of a plan: what every step was made from and what came of it, for comparison on another machine.

It holds no location and no time. Parameters, inputs, weights and results are compared in this order, so that the first difference
of a step is a cause of the next ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pipelines.plans.deciding import version
from pipelines.plans.reading import Plan, Step
from pipelines.plans.records import Record
from pipelines.plans.states import Result
from schemas.errors import DatasetError
from schemas.storage import Folder

__all__ = ["Lock"]

_FORMAT = "imagepivot-lock 1"
_LIBRARIES = "imagepivot"


@dataclass
class Lock:
    """A lock file.

    Attributes:
        location: the file.
        steps: by step what is locked.
        is_there: whether the file exists.
    """

    location: str
    steps: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    is_there: bool = False

    @classmethod
    def read(cls, plan: Plan) -> Lock:
        """Read the lock file of a plan, which lies beside it, or of a plan of the package in the folder of the results.

        Raises:
            DatasetError: it is damaged.
        """
        folder = Folder(plan.output if plan.file is None else str(plan.file.parent))
        name = f"{plan.name}.lock"
        location = folder.path_of(name)
        try:
            content = json.loads(folder.read(name))
            if content["format"] != _FORMAT:
                raise ValueError(f"its format is {content['format']!r}")
            return cls(location, dict(content["steps"]), True)
        except FileNotFoundError:
            return cls(location)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DatasetError(
                f"{location!r} is not a lock file ({error}): restore it, or delete it and build again"
            ) from error

    def write(self, made: Mapping[str, tuple[Step, Record, Result]], plan: Plan) -> None:
        """Put steps that are done into the file; those that the plan lacks now are left out."""
        steps = {name: entry for name, entry in self.steps.items() if name in plan.steps}
        steps |= {name: _entry(*done) for name, done in made.items()}
        ordered = {name: steps[name] for name in plan.steps if name in steps}
        content = json.dumps({"format": _FORMAT, "steps": ordered}, indent=2, ensure_ascii=False) + "\n"
        if steps == self.steps and list(steps) == list(ordered) and self.is_there:
            return
        parent, _, name = self.location.rpartition("/")
        Folder(parent or "/").write(name, content.encode())
        self.steps = steps

    def causes(self, step: Step, now: Record) -> Iterator[str]:
        """Yield what differs in parameters and in inputs that no step makes."""
        locked = self.steps.get(step.name)
        if locked is None:
            yield f"steps.{step.name}: parameter: the step is not in the lock file"
            return
        if locked["command"] != now.command:
            yield f"steps.{step.name}: parameter command: locked {locked['command']!r}, here {now.command!r}"
        options = locked["options"]
        for key in dict.fromkeys((*options, *now.options)):
            was, here = options.get(key), now.options.get(key)
            if was != here and here != "like":  # The number is known once the other dataset is there.
                yield f"steps.{step.name}: parameter {key}: locked {was!r}, here {here!r}"
        made = {step.keys.get(name, name) for name, references in step.inputs.items() if any(one.step for one in references)}
        for name in dict.fromkeys((*locked["inputs"], *now.inputs)):
            here = now.inputs[name].digest if name in now.inputs else "nothing"
            was = locked["inputs"].get(name, "nothing")
            if was != here and name.partition("[")[0] not in made:
                yield f"steps.{step.name}: input {name}: locked {was[:12]}, here {here[:12]}"

    def effects(self, step: Step, result: Result, differing: set[str]) -> Iterator[str]:
        """Yield what differs in weights and results.

        Args:
            step: the step.
            result: what it has made.
            differing: steps that differ; this one is added if it does.
        """
        locked = self.steps.get(step.name)
        if locked is None or locked["content"] == result.content:
            return
        causes = [name for name in step.needs if name in differing]
        differing.add(step.name)
        if locked["weights"] != dict(result.weights):
            yield f"steps.{step.name}: weights: locked {_short(locked['weights'])}, here {_short(result.weights)}"
        elif causes:
            yield f"steps.{step.name}: result: follows from {' and '.join(causes)}"
        else:
            libraries = {_LIBRARIES: version(), **result.libraries}
            others = [
                f"{name}: locked {locked['libraries'].get(name)}, here {libraries.get(name)}"
                for name in dict.fromkeys((*locked["libraries"], *libraries))
                if locked["libraries"].get(name) != libraries.get(name)
            ]
            because = f" ({'; '.join(others)})" if others else " with the same versions of libraries"
            yield f"steps.{step.name}: result: locked {locked['content'][:12]}, here {result.content[:12]}{because}"


def _entry(step: Step, record: Record, result: Result) -> dict[str, Any]:
    entry = {
        "command": step.command,
        "options": dict(record.options),
        "inputs": {name: found.digest for name, found in record.inputs.items()},
        "weights": dict(result.weights),
        "kind": result.kind,
        "fingerprint": result.fingerprint,
        "content": result.content,
        "rows": result.rows,
        "bytes": result.bytes,
        "libraries": {_LIBRARIES: record.version, **result.libraries},
    }
    return json.loads(json.dumps(entry))


def _short(weights: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {str(value)[:40]}" for name, value in sorted(weights.items())) or "none"
