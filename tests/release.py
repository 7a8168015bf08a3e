"""Check before a release: ``python -m tests.release`` prints what is not ready, and fails then."""

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent
_PLACEHOLDER = re.compile(r"\.invalid\b")


def problems(root: Path = ROOT) -> Iterator[str]:
    """Yield placeholders of addresses, and places with another version or without date."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    version = project["version"]
    for name, address in project["urls"].items():
        if _PLACEHOLDER.search(address):
            yield f"pyproject.toml: the address {name} is {address!r}, a placeholder: write the real one"
    citation = yaml.safe_load((root / "CITATION.cff").read_text(encoding="utf-8"))
    if citation["version"] != version:
        yield f"CITATION.cff: the version is {citation['version']}, expected {version} as in pyproject.toml"
    headings = re.findall(r"^## (.+)$", (root / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    expected = f"{version} ({citation['date-released']})"
    if headings[0] != expected:
        yield f"CHANGELOG.md: the first heading is {headings[0]!r}, expected {expected!r}"


if __name__ == "__main__":
    sys.exit("\n".join(problems()) or 0)
