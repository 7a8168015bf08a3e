"""The interface of every layout that datasets are exported to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, Protocol, TypeAlias

from pipelines.exchange.exporters.staging import Staging
from pipelines.running.meter import Meter
from schemas.dataset import Dataset
from schemas.errors import UsageError

__all__ = ["ExportLayout", "Note", "check_choice", "split_name"]

Note: TypeAlias = Callable[[str], None]
"""Takes a sentence that users of the files should read."""


class ExportLayout(Protocol):
    """The options of one kind of files: a frozen dataclass whose constructor does no I/O.

    Attributes:
        format: name of the kind of files.
    """

    format: ClassVar[str]

    def write(self, dataset: Dataset, staging: Staging, *, meter: Meter, note: Note) -> list[Path]:
        """Write the files of a dataset.

        Args:
            dataset: features or regions.
            staging: the folder to write to.
            meter: counts images, for the display of progress.
            note: takes sentences that users of the files should read.

        Returns:
            The files.

        Raises:
            ImagepivotError: the dataset does not fit the layout, or a file cannot be written.
        """


def check_choice(option: str, value: str, choices: tuple[str, ...]) -> None:
    """Check that the value of an option is one of its choices.

    Raises:
        UsageError: it is not.
    """
    if value not in choices:
        raise UsageError(f"{option} is {value!r}, expected one of {', '.join(choices)}")


def split_name(split: str, split_names: tuple[tuple[str, str], ...]) -> str:
    """Return the layout's name of a split, given pairs of our name and the layout's."""
    return dict(split_names).get(split, split)
