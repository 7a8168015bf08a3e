"""Names of the detector's classes and attributes, as in every release of it: text files with one name per line."""

from __future__ import annotations

from pathlib import Path

from schemas.errors import InputError
from schemas.text import read_text

CLASSES = 1600
"""Number of classes of the Visual Genome detector, without the background (id 0): line n of the file is class n."""

ATTRIBUTES = 400
"""Number of its attributes, without "none" (id 0): line n of the file is attribute n."""


def read_names(path: Path, expected: int) -> tuple[str, ...]:
    """Read names from a UTF-8 file with one name per line.

    A line with synonyms, ``gray,grey``, is one name and stays as it is.

    Args:
        path: the file.
        expected: number of names that the file must have, e.g. `CLASSES`.

    Returns:
        The names in the order of the file. The first is that of id 1, because 0 is the background, or no attribute.

    Raises:
        InputError: the file is missing or not text, a line is empty, or the number of names differs.
    """
    text = read_text(path)
    names = tuple(line.strip() for line in text.rstrip().split("\n")) if text.strip() else ()
    if "" in names:
        raise InputError(
            f"line {names.index('') + 1} of {str(path)!r} is empty: expected one name per line; remove it or add the name"
        )
    if len(names) != expected:
        raise InputError(
            f"{str(path)!r} has {len(names)} names, expected {expected}, one per line, without one for id 0 (background, or no "
            "attribute): pass the file of the classes as class names and that of the attributes as attribute names"
        )
    return names
