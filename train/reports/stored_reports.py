"""Reports as JSON files that name what they were made from, see `schemas.made_from`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from schemas.errors import DatasetError, UsageError
from schemas.escapes import to_json
from schemas.made_from import read_made_from
from schemas.storage.folder import file_at


def check_report(location: str) -> None:
    """Check that a report may be written to a location.

    Raises:
        UsageError: its name does not end in ``.json``.
        DatasetError: a file that is not a report is there, or nothing can be written.
    """
    folder, name = file_at(location)
    if not name.endswith(".json"):
        raise UsageError(f"--output is {location!r}, expected a file that ends in .json")
    if folder.size(name) is not None and not read_made_from(folder, name):
        raise DatasetError(
            f"{location!r} is no report of imagepivot evaluate: choose another name for the report; nothing was changed"
        )
    folder.check_writable()


def is_current_report(location: str, made_from: Mapping[str, Any]) -> bool:
    """Return whether a report was made from the same."""
    return read_made_from(*file_at(location)) == made_from


def read_report(location: str) -> str:
    """Return the text of a report."""
    folder, name = file_at(location)
    return folder.read(name).decode()


def write_report(location: str, report: Mapping[str, Any], made_from: Mapping[str, Any]) -> None:
    """Write a report with the key ``made_from``."""
    folder, name = file_at(location)
    folder.write(name, (to_json({**report, "made_from": made_from}, indent=2) + "\n").encode())
