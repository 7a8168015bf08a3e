"""Policies of a run: reuse, tasks, failures, notes. Imports no heavy packages."""

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Self, TypeAlias

from schemas.errors import UsageError
from schemas.options import Opt

Overwrite: TypeAlias = Annotated[bool, Opt("Replace any existing dataset in OUTPUT.")]
_EXISTING = "Existing dataset in OUTPUT"
Verify: TypeAlias = Annotated[bool, Opt("Verify digests of shards, and rewrite damaged ones.", panel=_EXISTING)]
_MAX_NOTES_BYTES = 4096


@dataclass(frozen=True)
class ReusePolicy:
    """Policy for the existing dataset in a run's folder.

    Without ``update``, inputs must not have changed.

    Raises:
        UsageError: two settings contradict each other.

    Examples:
        >>> policy = imagepivot.ReusePolicy(update=True, keep_removed=True)
        >>> job = imagepivot.FeaturesJob("photos", "features", policy=policy)
    """

    overwrite: Overwrite = False
    verify: Verify = False
    retry_failed: Annotated[bool, Opt("Retry only the images that failed before.", panel=_EXISTING)] = False
    update: Annotated[bool, Opt("Update OUTPUT to new, changed and removed images.", panel=_EXISTING)] = False
    keep_removed: Annotated[bool, Opt("Keep the rows of removed images (--update only).", panel=_EXISTING)] = False
    only_add: Annotated[bool, Opt("Only add new images (--update only).", panel=_EXISTING)] = False
    accept_unknown: Annotated[bool, Opt("Keep rows of an unknown version of the code.", panel=_EXISTING)] = False
    check_content: Annotated[bool, Opt("Compare digests, not times (--update only).", panel=_EXISTING)] = False

    def __post_init__(self) -> None:
        options = {"--keep-removed": self.keep_removed, "--only-add": self.only_add, "--check-content": self.check_content}
        chosen = [option for option, is_chosen in options.items() if is_chosen]
        if chosen and not self.update:
            raise UsageError(f"{' and '.join(chosen)} needs --update: give --update, too")
        if self.only_add and (self.keep_removed or self.check_content):
            raise UsageError("--only-add keeps everything that is there: leave out --keep-removed and --check-content")
        if self.overwrite and (self.update or self.retry_failed):
            raise UsageError("--overwrite replaces the dataset, --update and --retry-failed keep its rows: give one of them")


@dataclass(frozen=True)
class Notes:
    """Notes about a run for the manifest: job, image, commit.

    Raises:
        UsageError: a note has another form or a key of another one, or all together are too large.

    Examples:
        >>> imagepivot.Notes(("job=1234", "commit=84359f4f")).to_json()
        {'job': '1234', 'commit': '84359f4f'}
    """

    texts: Annotated[
        tuple[str, ...],
        Opt("Add a note to the manifest; repeatable.", name="note", metavar="K=V", is_repeated=True),
    ] = ()

    def __post_init__(self) -> None:
        for text in self.texts:
            if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*=.*", text) is None or not text.isprintable():
                raise UsageError(
                    f"--note is {text!r}, expected KEY=VALUE: a key of letters, digits, _, . and -, and a "
                    "value without line ends and control characters"
                )
        if len(self.to_json()) < len(self.texts):
            raise UsageError("--note has a key twice: give each key once")
        if (size := len("".join(self.texts).encode())) > _MAX_NOTES_BYTES:
            raise UsageError(f"--note has {size:,} bytes in all, expected at most {_MAX_NOTES_BYTES:,}: shorten the values")

    def to_json(self) -> dict[str, str]:
        """Return the notes by key."""
        pairs = (text.partition("=") for text in self.texts)
        return {key: value for key, _, value in pairs}


@dataclass(frozen=True)
class ArrayTask:
    """Task of an array job; it writes the shards ``index``, ``index + count``, ...

    Raises:
        UsageError: the index is not between 0 and ``count - 1``.

    Examples:
        >>> list(imagepivot.ArrayTask.parse("1/3").shards(8))
        [1, 4, 7]
    """

    index: int
    count: int

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise UsageError(
                f"--task is '{self}', expected I/N with I from 0 to N - 1: tasks are numbered from 0, the first of 64 is 0/64"
            )

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the value of ``--task``, e.g. ``3/64``.

        Raises:
            UsageError: the text has another form, or the index is out of range.
        """
        if re.fullmatch(r"[0-9]+/[0-9]+", text) is None:
            raise UsageError(
                f"--task is {text!r}, expected I/N, e.g. 0/64 for the first of 64 tasks: check the variable with the task's index"
            )
        index, _, count = text.partition("/")
        return cls(int(index), int(count))

    def shards(self, shards: int) -> range:
        """Return the indices of the task's shards in a dataset with ``shards`` shards.

        Raises:
            UsageError: the job has more tasks than the dataset has shards.
        """
        if self.count > shards:
            raise UsageError(
                f"--task is '{self}', expected at most one task per shard, and the dataset has {shards}: "
                f"give all tasks --shards {self.count} or more, or start fewer tasks"
            )
        return range(self.index, shards, self.count)

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


@dataclass(frozen=True)
class FailureLimit:
    """Number or share of inputs that may fail, e.g. ``10`` or ``1%``.

    Raises:
        UsageError: the text is neither a number nor a share from 0% to 100%.

    Examples:
        >>> limit = imagepivot.FailureLimit("1%")
        >>> limit.is_exceeded(failed=3, rows=297), limit.is_exceeded(failed=4, rows=296)
        (False, True)
    """

    text: str = "0"

    def __post_init__(self) -> None:
        number = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)(%?)", self.text)
        if number is None or (float(number[1]) > 100 if number[2] else "." in number[1]):
            raise UsageError(
                f"--max-failures is {self.text!r}, expected 0 or more, or a share of the inputs from 0% to 100%, e.g. 1%"
            )

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the value of ``--max-failures``; errors are those of the class."""
        return cls(text.strip())

    def is_exceeded(self, *, failed: int, rows: int) -> bool:
        """Return whether more inputs failed, or all: an empty dataset is never a success."""
        number, inputs = Fraction(self.text.removesuffix("%")), rows + failed
        return failed > (number * inputs / 100 if self.text.endswith("%") else number) or (failed > 0 and not rows)

    def __str__(self) -> str:
        return self.text
