"""Dialects of CSV and TSV: delimiter and quoting of values.

Files do not declare them. The delimiter is that of a ``sep=`` line (Excel writes one above the header), else that of the file's
extension. If the header then lacks a required column, it is the one of ``,``, tab, ``;`` and ``|`` that yields all of them.
"""

import csv
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from schemas.conversion import convert
from schemas.errors import InputError, UsageError
from schemas.text import LONE_CR, MAX_LINE

Quoting: TypeAlias = Literal["auto", "rfc4180", "none"]
"""``rfc4180``: a value that begins with ``"`` ends at the closing ``"``; ``auto``: as ``rfc4180``, but a value that looks like
rows, by its line ends and delimiters, is an error; ``none``: a quote is an ordinary character."""

_CHECKED_LINES = 100
_ENTRY_BYTES = 8  # Size of a line in a list, so that empty lines count.
_DELIMITERS = (",", "\t", ";", "|")
_SEP_LINE = re.compile(r'"?sep=(.)"?')

csv.field_size_limit(sys.maxsize)  # For the whole process; the default is 131,072 characters a value.


@dataclass(frozen=True)
class Dialect:
    r"""The delimiter and the quoting of a CSV or TSV file.

    Attributes:
        delimiter: the character between two values, a tab also as ``tab`` or ``\t``; empty: detected.

    Raises:
        UsageError: the delimiter is not one character that can separate values, or the quoting is unknown.

    >>> Dialect("tab", "none")
    Dialect(delimiter='\t', quoting='none')
    """

    delimiter: str = ""
    quoting: Quoting = "auto"

    def __post_init__(self) -> None:
        delimiter = {"tab": "\t", "\\t": "\t"}.get(self.delimiter, self.delimiter)
        if len(delimiter) > 1 or delimiter in ('"', "\r", "\n"):
            raise UsageError(f"--delimiter is {self.delimiter!r}, expected one character, e.g. ';' or 'tab'")
        object.__setattr__(self, "delimiter", delimiter)
        convert(self.quoting, Quoting, "--quoting")


AUTO_DIALECT = Dialect()


def header_lines(lines: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Yield the optional ``sep=`` line and the header from numbered lines."""
    for line_number, line in lines:
        if line:
            yield line_number, line
            if not _SEP_LINE.fullmatch(line):
                return


def find_delimiter(head: Sequence[str], default: str, wanted: Collection[str]) -> str:
    """Return the delimiter of a table by its `header_lines` and required columns."""
    if len(head) > 1 and (match := _SEP_LINE.fullmatch(head[0])):
        return match[1]
    headers = {delimiter: _split(head[-1], delimiter) for delimiter in (default, *_DELIMITERS)} if head else {}
    complete = [delimiter for delimiter, header in headers.items() if set(wanted) <= set(header)]
    if default in complete or not headers:
        return default
    if len(complete) == 1:
        return complete[0]
    # A column is missing. The error lists the columns, so split a single one.
    return max(headers, key=lambda delimiter: len(headers[delimiter])) if len(headers[default]) == 1 else default


def _split(line: str, delimiter: str) -> list[str]:
    try:
        return next(csv.reader([line], delimiter=delimiter, strict=True), [])
    except csv.Error:
        return []


def split_rows(
    numbered: Iterable[tuple[int, str]], delimiter: str, quoting: Quoting, location: str
) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows of numbered lines, each with the number of its first line.

    Raises:
        InputError: quotes do not match, `quoting` is ``auto`` and a quoted value looks like rows, or a row is too long.
    """
    count = width = first = size = 0
    lines: list[str] = []  # Lines of the current row.

    def check() -> None:
        """Check that a row over several lines is not several rows."""
        rows = sum(line.count(delimiter) + 1 == width for line in lines)
        if quoting == "auto" and 4 * rows >= 3 * len(lines):
            raise InputError(
                f"{location!r}, row {count} (line {first}): a value in quotes holds the delimiter {delimiter!r} and a line end, "
                f"and the {len(lines)} lines of this row would be {rows} rows without the quotes: give --quoting none if quotes "
                "are ordinary characters in this file, or --quoting rfc4180 if the value is right"
            )

    def stream() -> Iterator[str]:
        nonlocal first, size
        for line_number, line in numbered:
            if not lines:
                first, size = line_number, len(line)
            elif (size := size + len(line) + _ENTRY_BYTES) > MAX_LINE:
                raise InputError(
                    f"{location!r}, row {count} (line {first}): more than {MAX_LINE >> 20} MiB: close quotes or give --quoting none"
                )
            lines.append(line)
            if len(lines) == _CHECKED_LINES:  # The quote may be open to the end of a large file.
                check()
            yield line + "\n"

    reader = csv.reader(
        stream(), delimiter=delimiter, quoting=csv.QUOTE_NONE if quoting == "none" else csv.QUOTE_MINIMAL, strict=True
    )
    try:
        for row in reader:
            if row:
                if len(lines) > 1:
                    check()
                yield first, row
                width = width or len(row)
                count += 1
            lines.clear()
    except csv.Error as error:
        problem = (
            f"{error}. A value that begins with a quote must end with one, and a quote or line end inside a value needs quotes "
            "around the value (RFC 4180); if quotes are ordinary characters in this file, give --quoting none"
        )
        if str(error).startswith("new-line character"):
            problem = f"a CR outside quotes, without the LF of a line end; {LONE_CR}"
        raise InputError(f"{location!r}, row {count} (line {first}): {problem}") from error
