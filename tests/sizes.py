"""Size of the program: ``python -m tests.sizes``, in ``make check``, prints modules and lines, and fails for long ones."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("schemas", "extractors", "pipelines", "train")
MAX_LINES = 600  # Of a module.
MAX_FIRST_LINE = 80  # Characters of the first line of a docstring.


def modules() -> list[Path]:
    """Return the files of all modules."""
    return [ROOT / "imagepivot.py", *sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))]


def sizes() -> dict[str, int]:
    """Return the number of lines of each module."""
    return {path.relative_to(ROOT).as_posix(): len(path.read_text(encoding="utf-8").splitlines()) for path in modules()}


def long_first_lines(path: Path) -> Iterator[str]:
    """Yield the first lines of docstrings that are too long."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = (node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, documented))
    first_lines = ((ast.get_docstring(node) or "").partition("\n")[0] for node in nodes)
    yield from (line for line in first_lines if len(line) > MAX_FIRST_LINE)


def main() -> None:
    lines = sizes()
    print(f"{sum(lines.values()):,} lines in {len(lines)} modules")
    problems = [f"{name} has {count} lines, at most {MAX_LINES}" for name, count in lines.items() if count > MAX_LINES]
    problems += [
        f"{path}: {line}: at most {MAX_FIRST_LINE} characters" for path in modules() for line in long_first_lines(path)
    ]
    sys.exit("\n".join(problems) or 0)


if __name__ == "__main__":
    main()
