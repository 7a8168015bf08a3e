"""The command lines of docs/how-to/containers.md, which the tests run as they stand."""

import shlex

from tests.containers.images import ROOT

_PAGE = (ROOT / "docs" / "how-to" / "containers.md").read_text(encoding="utf-8")


def line_of(start: str, having: str = "", **variables: str) -> list[str]:
    """Return the words of the one line that begins with a text, and has another in it, with these variables of the shell."""
    (line,) = [line for line in _PAGE.splitlines() if line.startswith(start) and having in line]
    words = shlex.split(line)
    for name, value in variables.items():
        words = [word.replace(f"${name}", value) for word in words]
    return words
