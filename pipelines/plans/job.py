"""What ``imagepivot build`` is asked to do, and what comes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from schemas.errors import ImagepivotError, UsageError

__all__ = ["Build", "BuildJob", "LockError", "StepEnd", "StepError"]


class StepError(ImagepivotError):
    """A step failed.

    Attributes:
        code: exit code of its command.
    """

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


class LockError(ImagepivotError):
    """Something differs from the lock file."""


@dataclass(frozen=True)
class BuildJob:
    """A plan to be built.

    Attributes:
        plan: name of a plan that comes with the package, or path of a TOML file.
        targets: names of the steps to make, with all that they need; all steps if empty.
        output: folder for the results; the plan's own if empty.
        settings: values in place of those of the plan, as TOML by dotted key, e.g. ``{"steps.vocabulary.min-count": "5"}``.
        jobs: most steps at a time; 0: all that are independent, but one at a time of those that compute with a model.
        workers: worker processes of each step that runs on Beam; None: as the plan says.
        beam_flags: flags for Beam for each such step, in place of those of the plan.
        shared_disk: as for `pipelines.running.execution.Execution`.
        start_timeout: likewise.
        check: run the command of every step, with its comparison of digests.
        replace: delete what other values have made, instead of keeping it in the folder ``.plan``.
        prune: delete afterwards what other values have made before.
        locked: compare with the lock file, which stays as it is.

    Raises:
        UsageError: a value is out of range.
    """

    plan: str
    targets: tuple[str, ...] = ()
    output: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    jobs: int = 0
    workers: int | None = None
    beam_flags: tuple[str, ...] = ()
    shared_disk: bool = False
    start_timeout: float | None = None
    check: bool = False
    replace: bool = False
    prune: bool = False
    locked: bool = False

    def __post_init__(self) -> None:
        if not self.plan:
            raise UsageError(
                "name a plan, or a file that ends in .toml; imagepivot build --list lists the plans of the package"
            )
        if self.jobs < 0:
            raise UsageError(f"--jobs is {self.jobs}, expected 0 or more")

    @property
    def execution(self) -> dict[str, object]:
        """Values for the steps that run on Beam."""
        values = {
            "workers": self.workers,
            "beam_flags": list(self.beam_flags),
            "shared_disk": self.shared_disk,
            "start_timeout": self.start_timeout,
        }
        return {name: value for name, value in values.items() if value is not None and value is not False and value != []}


@dataclass(frozen=True)
class StepEnd:
    """What became of a step.

    Attributes:
        name: its name.
        location: where its result is.
        done: what was done: ``up to date``, ``made`` or ``taken back``.
        rows: rows of a dataset; None for other results.
        bytes: size of the result.
        seconds: time that it took.
    """

    name: str
    location: str
    done: str
    rows: int | None
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Build:
    """A plan that is built.

    Attributes:
        output: folder of the results.
        lock: the lock file.
        steps: what became of each step, in order.
    """

    output: str
    lock: str
    steps: tuple[StepEnd, ...]

    def location(self, step: str) -> str:
        """Return where the result of a step is."""
        return next(end.location for end in self.steps if end.name == step)
