"""Names of columns in a table of the user's, where they differ from ours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from schemas.errors import UsageError


def check_columns(columns: Iterable[str], known: Sequence[str]) -> None:
    """Check that columns are among those that we know.

    Raises:
        UsageError: one is not.
    """
    unknown = sorted(set(columns) - set(known))
    if unknown:
        raise UsageError(
            f"unknown column {unknown[0]!r}: ours are {', '.join(known)}; write OURS=THEIRS, such as 'image_id=file'"
        )
