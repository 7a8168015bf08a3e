"""Regular expressions on hostile text: none of the packages needs more than linear time."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.sizes import ROOT, sizes

LENGTH = 100_000
SECONDS = 300  # Linear patterns need half a minute for all texts together, a quadratic one minutes for a single text.
LANGUAGES = ("en", "de", "fr", "cs", "es", "it", "zh", "ja", "ar", "hi", "fi", "ga", "ta", "cz", "pt-BR")
TOKENIZED = ("en", "de", "fr", "cs", "zh")  # Their rules include all of other languages.
SHORT = {"pipelines/inputs/images/opening.py": "a glob pattern is as short as a path, and needs quadratic time for brackets"}
ATOMS = (
    *"aA1 .,'\"-_/\\:%&#()[]{}<=\t\r\n\xa0\u200d…«“´中ا👍",
    *("e\u0301", "\x1b[", "1,", ". ", "1 ", "a'", "''", ") ", " (", "». ", '."', ',"', "a.b.", "…,", "' ", "I. "),
    *("DOT", "DOTMULTI", "://", "a/", "../", "part-", "%41", "a@", "a:", "&#39;", "<b>"),
)
METHODS = ("match", "fullmatch", "search", "sub", "split", "findall", "finditer")


def patterns() -> Iterator[tuple[str, "re.Pattern[str]", set[str]]]:
    """Yield all literal patterns of text in the code and those of the normalizer: place, pattern, and methods that are called."""
    from pipelines.text import moses

    for module in sizes():
        if module in SHORT:
            continue
        source = (ROOT / module).read_text(encoding="utf-8")
        tree = ast.parse(source)
        names = {
            inner: target.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
            for inner in ast.walk(node.value)
        }
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Call) and ast.unparse(node.func).startswith("re.") and node.args):
                continue
            text = node.args[0]
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                method = ast.unparse(node.func).removeprefix("re.")
                called = set(re.findall(rf"\b{names[node]}(?:\[\w+\])?\.(\w+)", source)) if node in names else {method}
                yield f"{module}:{node.lineno}", re.compile(text.value), called.intersection(METHODS) or set(METHODS)
    for language in LANGUAGES:
        for pattern, _ in moses._normalizer_rules(language):
            yield f"normalizer of {language}", pattern, {"sub"}


def apply_all() -> None:
    """Apply all patterns to all hostile texts, and recipes in all languages; print each place before."""
    from pipelines.text.moses import RECIPES, prepare

    texts = [(atom * LENGTH)[:LENGTH] for atom in ATOMS]
    different = {(pattern.pattern, *sorted(methods)): (place, pattern, methods) for place, pattern, methods in patterns()}
    print(len(different), "patterns", flush=True)
    for place, pattern, methods in different.values():
        print(place, repr(pattern.pattern), flush=True)
        for text in texts:
            for end in ("", '"<'):  # Often only a mismatch at the end makes a pattern go back.
                for method in methods:
                    found = pattern.sub("", text + end) if method == "sub" else getattr(pattern, method)(text + end)
                    for _ in found if method == "finditer" else ():
                        pass
    for recipe in RECIPES.values():
        for language in TOKENIZED:
            for text in texts:
                print(recipe.name, language, repr(text[:8]), flush=True)
                prepare(text, language, recipe)
    print("complete", flush=True)


@pytest.mark.cluster
def test_patterns_on_repeated_text_need_linear_time() -> None:
    command = [sys.executable, "-c", "from tests.test_patterns import apply_all; apply_all()"]
    try:
        lines = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=SECONDS, check=True).stdout.splitlines()
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"not linear: {(error.stdout or b'').decode().splitlines()[-1]}")
    assert int(lines[0].split()[0]) > 50
    assert lines[-1] == "complete"
