"""Names of columns in a table of the user's, where they differ from ours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from schemas.errors import UsageError

__all__ = ["check_columns", "parse_columns"]


def parse_columns(argument: str) -> dict[str, str]:
    """Parse ``image_id=img,text=caption`` into a mapping from our name of a column to the table's.

    Raises:
        UsageError: it is of another form, or names a column twice.
    """
    columns: dict[str, str] = {}
    for item in argument.split(","):
        ours, equals, theirs = item.partition("=")
        ours = ours.strip()
        if not (ours and equals and theirs):
            raise UsageError(
                f"cannot understand {item!r} in the columns {argument!r}: write OURS=THEIRS with commas between, "
                f"such as 'image_id=file'"
            )
        if ours in columns:
            raise UsageError(f"the columns {argument!r} name {ours!r} twice: keep one")
        columns[ours] = theirs
    return columns


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
