"""The dataset that a run writes, what it keeps of one that is there, and the shards of a task of an array job."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from schemas.errors import UsageError
from schemas.fingerprints import fingerprint_of, sha256_of_json
from schemas.keys import shard_name
from schemas.kinds import schema_of
from schemas.parameters import feature_of
from schemas.storage.folder import Folder

if TYPE_CHECKING:
    from schemas.dataset import Dataset

__all__ = ["ArrayTask", "OutputDataset", "ReusePolicy", "UpdatePolicy"]


@dataclass(frozen=True)
class UpdatePolicy:
    """Treatment of inputs that have changed since a dataset was written.

    Attributes:
        keep_removed: keep the rows of inputs that are gone.
        only_add: keep whatever is there, and add inputs that are new.
        check_content: compare the bytes of all inputs, not only sizes and modification times.

    Raises:
        UsageError: two settings contradict each other.
    """

    keep_removed: bool = False
    only_add: bool = False
    check_content: bool = False

    def __post_init__(self) -> None:
        if self.only_add and (self.keep_removed or self.check_content):
            raise UsageError("--only-add keeps everything that is there: leave out --keep-removed and --check-content")


@dataclass(frozen=True)
class ReusePolicy:
    """What a run keeps of the dataset that its folder holds.

    Attributes:
        overwrite: keep nothing, whatever dataset the folder holds.
        verify: compare digests, not only sizes, and write damaged shards again.
        update: treatment of inputs that have changed; None if they may not have changed.
        retry_failed: write shards with failures again.
    """

    overwrite: bool = False
    verify: bool = False
    update: UpdatePolicy | None = None
    retry_failed: bool = False


@dataclass(frozen=True)
class OutputDataset:
    """A dataset that a run writes.

    Kind, parameters, inputs and number of shards determine the content and make the fingerprint, before the first shard is made.

    Attributes:
        folder: where the dataset goes.
        kind: one of `schemas.kinds.KEY_COLUMNS`.
        parameters: every parameter that changes content; JSON values only.
        inputs: one entry per input: its name, and its fingerprint (a dataset) or digest (anything else).
        shards: number of shards.
        listings: for a kind whose inputs may change, a digest of what each shard is made from. A shard counts as finished only
            where the statistics in its footer name the same ``listing``.
        states: likewise, a digest of what listing the inputs tells about their content; see `schemas.writing.records`.
        files: content, by name, of files besides the shards that are known before the run. They are not part of the fingerprint: a
            dataset that lacks nothing but these gets them, and its shards stay.
        other_files: regular expression of the names of all files besides the shards that a run of this kind may write.
        sources: datasets that listings and states are of, for messages; empty where they are of images.
    """

    folder: Folder
    kind: str
    parameters: Mapping[str, Any]
    inputs: Sequence[Mapping[str, Any]] = ()
    shards: int = 1
    listings: tuple[str, ...] | None = None
    states: tuple[str, ...] | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    other_files: str = ""
    sources: tuple[str, ...] = ()

    def made_from(self, *sources: Dataset) -> OutputDataset:
        """Return the output with a note of the content of the datasets that it is made from, for its records.

        The fingerprints of these datasets are among the inputs, but their content may be another, e.g. of another version.
        """
        state = sha256_of_json([source.manifest.content_sha256 for source in sources])
        return replace(self, states=(state,) * self.shards, sources=tuple(source.folder.location for source in sources))

    @property
    def fingerprint(self) -> str:
        """SHA-256 of everything that determines the content; see `schemas.fingerprints.fingerprint_of`."""
        return fingerprint_of(self.kind, self.parameters, self.inputs, self.shards)

    @cached_property
    def schema(self) -> pa.Schema:
        """Arrow schema of the rows."""
        return schema_of(self.kind, feature_of(self.parameters))

    def name(self, number: int) -> str:
        """Return the file name of a shard."""
        return shard_name(number, self.shards)

    def is_other_file(self, name: str) -> bool:
        """Whether a file is one that a run of this kind may write besides the shards."""
        return re.fullmatch(self.other_files, name) is not None


@dataclass(frozen=True)
class ArrayTask:
    """One of the tasks of an array job. Of ``N`` shards it makes those whose number modulo ``count`` is ``index``.

    Attributes:
        index: number of the task, from 0 to ``count - 1``.
        count: number of tasks.

    Raises:
        UsageError: there is no such task.
    """

    index: int
    count: int

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise UsageError(
                f"--task is '{self}', expected I/N with I from 0 to N - 1: tasks are numbered from 0, the first of 64 is 0/64"
            )

    @classmethod
    def parse(cls, text: str) -> ArrayTask:
        """Read a task as ``--task`` takes it, e.g. ``3/64``.

        Raises:
            UsageError: it is not written like that, or there is no such task.
        """
        if re.fullmatch(r"[0-9]+/[0-9]+", text) is None:
            raise UsageError(
                f"--task is {text!r}, expected I/N, e.g. 0/64 for the first of 64 tasks: check the variable with the number of "
                "the task"
            )
        index, _, count = text.partition("/")
        return cls(int(index), int(count))

    def shards(self, shards: int) -> range:
        """Return the numbers of the task's shards, of a dataset with so many.

        Raises:
            UsageError: there are more tasks than shards.
        """
        if self.count > shards:
            raise UsageError(
                f"--task is '{self}', and there are {shards} shards: a task makes whole shards, so that {self.count - shards} of "
                f"the {self.count} tasks would have nothing to do. Give all tasks --shards {self.count} or more, or make them fewer"
            )
        return range(self.index, shards, self.count)

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"
