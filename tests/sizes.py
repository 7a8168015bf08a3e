"""Size of the program: ``python -m tests.sizes``, in ``make check``, prints modules and lines, and fails beyond the limits."""

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("schemas", "extractors", "pipelines", "train")
MAX_MODULES = 290
MAX_LINES = 600  # Of a module.


def sizes() -> dict[str, int]:
    """Return the number of lines of each module."""
    paths = [ROOT / "imagepivot.py", *(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))]
    return {path.relative_to(ROOT).as_posix(): len(path.read_text(encoding="utf-8").splitlines()) for path in sorted(paths)}


def main() -> None:
    lines = sizes()
    print(f"{sum(lines.values()):,} lines in {len(lines)} modules")
    problems = [f"{name} has {count} lines, at most {MAX_LINES}" for name, count in lines.items() if count > MAX_LINES]
    if len(lines) > MAX_MODULES:
        problems.append(f"there are {len(lines)} modules, at most {MAX_MODULES}")
    sys.exit("\n".join(problems) or 0)


if __name__ == "__main__":
    main()
