"""The commands that may be steps of a plan: what they read, what they make, and which of their options change nothing in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

__all__ = ["COMMANDS", "MANAGED", "CommandLine", "StepCommand"]

Makes = Literal["dataset", "run", "results", "files", "file", "report"]


class CommandLine(Protocol):
    """The commands as the command line knows them."""

    def names(self, command: str) -> Mapping[str, str]:
        """Return the names of the parameters of a command by the keys of a plan, e.g. ``min-count``."""

    def convert(self, command: str, table: Mapping[str, Any], place: str) -> dict[str, Any]:
        """Check a table of options, and return their values by the names of the parameters.

        Raises:
            UsageError: a key is unknown, or a value is of another type.
        """

    def words(self, command: str, values: Mapping[str, Any]) -> list[str]:
        """Return the words of a command line, the command's name first."""

    def configuration(self, command: str, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return every value of the configuration that a training reads, by dotted key; nothing for other commands."""


@dataclass(frozen=True)
class StepCommand:
    """A command as a step.

    Attributes:
        makes: a dataset; the folder of a run; a folder of runs with their results; a folder of files; one file; or a report,
            which is its standard output.
        inputs: parameters that name what it reads.
        images: of those, the ones that name images: they are compared by name, size and modification time.
        named: of the inputs, the ones that may be a name instead of a location, where nothing is at a location of that name; with
            the regular expression of such names.
        neutral: parameters that change nothing in the result.
        adds: parameters with other values of which the command adds to what is there.
        places: of those, the ones that are paths.
        given: values of parameters that every run gets.
        suffix: of a file or a report, the end of its name.
        output: parameter that takes the location of the result; empty for a report.
        runs_elsewhere: whether flags for Beam may send the work to other machines.
        computes: whether a model computes: of these steps one runs at a time, unless the number of jobs is given.
        checks: whether it compares digests with ``--check``.
        overwrites: whether ``--overwrite`` replaces what is there.
    """

    makes: Makes
    inputs: tuple[str, ...] = ()
    images: tuple[str, ...] = ()
    named: Mapping[str, str] = field(default_factory=dict)
    neutral: tuple[str, ...] = ()
    adds: tuple[str, ...] = ()
    places: tuple[str, ...] = ()
    given: Mapping[str, Any] = field(default_factory=dict)
    suffix: str = ""
    output: str = "output"
    runs_elsewhere: bool = False
    computes: bool = False
    checks: bool = False
    overwrites: bool = False


_BEAM = ("workers", "shared_disk", "start_timeout", "beam_flags")
_TORCH = ("device", "memory_map")
_CORPUS = ("captions", "features", "vocabulary", "word_vectors", "token_features")
# What other values made was moved before: only files of a step that was stopped are replaced.
_REPLACED: dict[str, Any] = {"overwrite": True}

COMMANDS: Mapping[str, StepCommand] = {
    "scenes": StepCommand("files"),
    "captions": StepCommand(
        "dataset",
        ("source", "truecaser"),
        neutral=("max_failures", *_BEAM),
        runs_elsewhere=True,
        checks=True,
        overwrites=True,
    ),
    "vocabulary": StepCommand("dataset", ("captions",), neutral=_BEAM, runs_elsewhere=True, checks=True, overwrites=True),
    "encode": StepCommand(
        "dataset", ("captions", "vocabulary"), neutral=_BEAM, runs_elsewhere=True, checks=True, overwrites=True
    ),
    "word-vectors": StepCommand("dataset", ("vocabulary", "files"), checks=True, overwrites=True),
    "features": StepCommand(
        "dataset",
        ("images", "weights", "class_names", "attribute_names"),
        images=("images",),
        named={"weights": r"default|[^/]*:.*"},
        neutral=("device", "batch_size", "max_failures", "gpu", "gpus_per_worker", "worker_machine", *_BEAM),
        given={"update": True},
        runs_elsewhere=True,
        computes=True,
        checks=True,
        overwrites=True,
    ),
    "token-features": StepCommand(
        "dataset",
        ("captions", "model"),
        named={"model": r"[\w.-]+(/[\w.-]+)?"},  # In Hugging Face's cache.
        neutral=("device", "batch_size", *_BEAM),
        runs_elsewhere=True,
        computes=True,
        checks=True,
        overwrites=True,
    ),
    "import": StepCommand("dataset", ("sources", "ids", "boxes", "sizes", "karpathy"), checks=True, overwrites=True),
    "export": StepCommand("files", ("dataset", "captions", "lists"), given=_REPLACED),
    "view": StepCommand("file", ("dataset", "images"), images=("images",), given=_REPLACED, suffix=".png"),
    "train": StepCommand(
        "run",
        (*_CORPUS, "start_from"),
        neutral=("config", "settings", "max_steps", "save_every", "tensorboard", "curves", *_TORCH),
        places=("memory_map",),
        given={"resume": True},
        computes=True,
    ),
    "evaluate": StepCommand(
        "report",
        ("run", "captions", "features", "token_features"),
        neutral=_TORCH,
        places=("memory_map",),
        given={"as_json": True},
        suffix=".json",
        output="",
        computes=True,
    ),
    "embed": StepCommand(
        "files",
        ("run", "features", "captions", "token_features"),
        neutral=("device",),
        computes=True,
        checks=True,
        overwrites=True,
    ),
    "sts": StepCommand(
        "report",
        ("places", "vectors", "truecaser"),
        neutral=("device",),
        given={"as_json": True},
        suffix=".json",
        output="",
        computes=True,
    ),
    "figures": StepCommand(
        "files",
        ("run", "captions", "features", "token_features", "images"),
        images=("images",),
        neutral=_TORCH,
        places=("memory_map",),
        computes=True,
    ),
    "tables": StepCommand(
        "results",
        (*_CORPUS, "sts", "truecaser"),
        neutral=("workers", "plot", *_TORCH),
        adds=("seeds", "rows", "table"),
        places=("memory_map",),
        computes=True,
    ),
}
"""By name, the commands that may be steps."""

MANAGED = {
    "overwrite": "a plan keeps what other values have made, and makes the rest",
    "check": "imagepivot build --check does so for all steps",
    "log_json": "imagepivot build --log-json does so for all steps",
    "detach": "a step has to end before the next one begins",
    "dry_run": "imagepivot build --dry-run does so for all steps",
    "task": "a step makes all of its shards",
    "resume": "a plan always goes on with a run that was stopped",
    "update": "a plan always brings features up to date with images that have changed",
    "retry_failed": "give it to imagepivot features itself, then build again",
    "list_extractors": "it makes nothing",
    "list_presets": "it makes nothing",
    "show": "it makes nothing",
    "as_json": "a plan always keeps reports as JSON",
    "config": "the section of the step holds its values",
}
"""Parameters that no section of a step may hold, with the reason; ``config`` where it names a file of values."""
