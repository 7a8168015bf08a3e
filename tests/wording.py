"""Wording of docstrings and comments: ``python -m tests.wording [FOLDER...]``, in ``make check``, counts constructions to avoid.

Without folders it counts all packages and fails beyond the limits; with folders it prints their counts and their lines with hits.
"""

import ast
import io
import re
import sys
import tokenize
from pathlib import Path

from tests.sizes import PACKAGES, ROOT

LIMITS = {  # Hits per 10,000 words.
    r"what|whatever|who|whoever": 12,
    r"whose|of which": 2,
    r"there (?:is|are|was|were)": 8,
    r"make|makes|made|making": 22,
    r"stand|stands|lie|lies": 1,
}
OPENING = re.compile(r"(?:What|Whether|Where|How|Which|Of|So|Who)\b")
MAX_OPENINGS = 0.01  # Of all docstrings.
MAX_FIRST_LINE = 80


def prose(path: Path) -> tuple[list[str], list[tuple[int, str]]]:
    """Return the docstrings of a module, and its docstrings and comments with their line numbers."""
    source = path.read_text(encoding="utf-8")
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = [
        (node.body[0].lineno, text)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, documented) and (text := ast.get_docstring(node)) is not None
    ]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = [(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]
    return [text for _, text in docstrings], docstrings + comments


def main() -> None:
    folders = [Path(name) for name in sys.argv[1:]]
    paths = [path for folder in folders or [ROOT / package for package in PACKAGES] for path in sorted(folder.rglob("*.py"))]
    paths += [] if folders else [ROOT / "imagepivot.py"]
    docstrings, texts = [], []
    for path in paths:
        module_docstrings, lines = prose(path)
        docstrings += module_docstrings
        texts += [(path, line, text.lower()) for line, text in lines]
    words = sum(len(re.findall(r"[a-z][a-z']*", text)) for _, _, text in texts)
    problems = []
    for pattern, limit in LIMITS.items():
        regex = re.compile(rf"\b(?:{pattern})\b")
        rate = sum(len(regex.findall(text)) for _, _, text in texts) / words * 10_000
        print(f"{rate:6.1f} per 10,000 words, at most {limit}: {pattern}")
        problems += [f"too often in docstrings and comments: {pattern}"] if rate > limit else []
        if folders:
            for path, line, text in texts:
                for hit in (part.strip() for part in text.splitlines() if regex.search(part)):
                    print(f"    {path}:{line}: {hit}")
    openings = [text for text in docstrings if OPENING.match(text)]
    print(f"{len(openings)} of {len(docstrings)} docstrings begin with a question word")
    problems += ["too many docstrings begin with a question word"] if len(openings) > MAX_OPENINGS * len(docstrings) else []
    long = [line for text in docstrings if len(line := text.splitlines()[0]) > MAX_FIRST_LINE]
    problems += [f"first line of more than {MAX_FIRST_LINE} characters: {line}" for line in long]
    sys.exit(0 if folders else "\n".join(problems) or 0)


if __name__ == "__main__":
    main()
