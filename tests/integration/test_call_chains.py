"""Modules on the call stacks of commands, against the lists in docs/internals/architecture.md."""

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType

import numpy as np
import pytest
from PIL import Image

from tests.train.conftest import toy, write_run  # noqa: F401

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/internals/architecture.md").read_text(encoding="utf-8").partition("## Modules on the call stack")[2]
PACKAGES = tuple(f"{ROOT / package}/" for package in ("extractors", "pipelines", "schemas", "train"))

pytestmark = pytest.mark.cluster


def listed(command: str) -> tuple[set[str], list[str]]:
    """Return the traced functions of a command on the page, and the modules in order."""
    title, table = re.search(rf"\*\*`{command}`\*\*(.+?)\n\n(.+?)\n\n", f"{PAGE}\n\n", re.DOTALL).groups()
    return set(re.findall(r"`([A-Za-z_.]+)`", title)), re.findall(r"`([a-z0-9_/]+\.py)`", table)


@contextmanager
def stacks(functions: set[str]) -> Iterator[dict[str, str]]:
    """Yield the modules that call these functions, by order of their first appearance, with a function of each."""
    modules: dict[str, str] = {}
    reached: set[CodeType] = set()

    def profile(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or code.co_qualname not in functions or code in reached or not code.co_filename.startswith(PACKAGES):
            return
        reached.add(code)
        stack = []
        while frame is not None:
            if frame.f_code.co_filename.startswith(PACKAGES):
                stack.append(frame.f_code)
            frame = frame.f_back
        for code in reversed(stack):
            modules.setdefault(str(Path(code.co_filename).relative_to(ROOT)), code.co_qualname)

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield modules
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert {code.co_qualname for code in reached} == functions


def test_features_pass_the_listed_modules(tmp_path, imagepivot):
    (tmp_path / "images").mkdir()
    Image.fromarray(np.zeros((64, 64, 3), np.uint8)).save(tmp_path / "images/1.png")
    functions, expected = listed("features")
    options = ("--weights", "random:0", "--device", "cpu", "--shards", "1", "--workers", "1")
    with stacks(functions) as modules:
        imagepivot("features", tmp_path / "images", tmp_path / "features", *options)
    assert list(modules) == expected
    assert len(expected) <= 25


def test_evaluate_passes_the_listed_modules(toy, write_run, imagepivot):  # noqa: F811
    functions, expected = listed("evaluate")
    run = write_run()
    with stacks(functions) as modules:
        imagepivot(
            "evaluate", run, "--captions", toy.captions, "--features", toy.features, "--device", "cpu", "--splits", "test"
        )
    assert list(modules) == expected
    assert len(expected) <= 18
