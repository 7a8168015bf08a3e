"""What a run keeps of the dataset in its folder, and the shards of a task of an array job. Importing this loads nothing heavy."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, TypeAlias

from schemas.errors import UsageError
from schemas.options import Opt

Overwrite: TypeAlias = Annotated[bool, Opt("Start anew, whatever dataset OUTPUT holds.")]
Verify: TypeAlias = Annotated[bool, Opt("Compare the digests of what OUTPUT holds, too, and make again what is damaged.")]

_CHANGES = "When images have changed"


@dataclass(frozen=True)
class ReusePolicy:
    """What a run keeps of the dataset that its folder holds. Without ``update``, inputs must not have changed.

    Raises:
        UsageError: two settings contradict each other.
    """

    overwrite: Overwrite = False
    verify: Verify = False
    retry_failed: Annotated[bool, Opt("Try only the images again that failed before.")] = False
    update: Annotated[
        bool, Opt("Bring the dataset in OUTPUT up to date with images that are new, changed or gone.", panel=_CHANGES)
    ] = False
    keep_removed: Annotated[bool, Opt("With --update: keep the rows of images that are gone.", panel=_CHANGES)] = False
    only_add: Annotated[bool, Opt("With --update: add images that are new, and keep everything else.", panel=_CHANGES)] = False
    check_content: Annotated[
        bool, Opt("With --update: read all images and compare digests instead of sizes and modification times.", panel=_CHANGES)
    ] = False

    def __post_init__(self) -> None:
        chosen = {"--keep-removed": self.keep_removed, "--only-add": self.only_add, "--check-content": self.check_content}
        given = [option for option, is_given in chosen.items() if is_given]
        if given and not self.update:
            raise UsageError(f"{' and '.join(given)} says how to update a dataset: give --update, too")
        if self.only_add and (self.keep_removed or self.check_content):
            raise UsageError("--only-add keeps everything that is there: leave out --keep-removed and --check-content")
        if self.overwrite and (self.update or self.retry_failed):
            raise UsageError(
                "--overwrite starts anew, --update and --retry-failed keep what the dataset holds: give one of them"
            )


@dataclass(frozen=True)
class ArrayTask:
    """Task ``index`` of an array job with tasks 0 to ``count - 1``. It makes the shards whose number modulo ``count`` is ``index``.

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
