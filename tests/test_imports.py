"""Imports run one way: ``schemas <- extractors <- pipelines`` and ``schemas <- train``; nothing heavy is imported unasked."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from schemas.features import FeatureSpec
from tests.builders import write_rows

ROOT = Path(__file__).parent.parent
PACKAGES = ("schemas", "extractors", "pipelines", "train")
# What a package must not import.
FORBIDDEN = {
    "extractors": {"apache_beam", "pipelines", "train"},
    "pipelines": {"train"},
    "train": {"apache_beam", "extractors", "pipelines"},
}
# All that a package may import.
ALLOWED = {"schemas": {*sys.stdlib_module_names, "numpy", "pyarrow", "schemas"}}
# The command is composed in one module, which mounts the sub-commands of `train`.
EXCEPTIONS = {"pipelines/commands/app.py": {"train"}}

HEAVY = ("torch", "torchvision", "apache_beam", "PIL", "sacremoses", "detectron2", "typer", "rich")


def imported(source: str) -> Iterator[tuple[int, str]]:
    """Line and top-level package of every import of a module, wherever it stands; '.' for a relative one."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.partition(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, "." if node.level else (node.module or "").partition(".")[0]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in ("import_module", "__import__"):
                yield node.lineno, str(node.args[0].value).partition(".")[0]


def breaches(path: str, source: str) -> list[str]:
    """Imports of a module that break the direction, as ``path:line imports name``."""
    package = path.partition("/")[0]
    forbidden = {*FORBIDDEN.get(package, set()), "."} - EXCEPTIONS.get(path, set())
    allowed = ALLOWED.get(package)
    return [
        f"{path}:{line} imports {name}"
        for line, name in sorted(imported(source))
        if name in forbidden or (allowed is not None and name not in allowed)
    ]


def modules() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


# --- direction -------------------------------------------------------------------------------------------------------


def test_imports_run_one_way():
    found = [
        breach for path in modules() for breach in breaches(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_every_package_is_looked_at():
    assert {path.relative_to(ROOT).parts[0] for path in modules()} == set(PACKAGES)


@pytest.mark.parametrize(
    ("path", "statement", "name"),
    [
        ("schemas/a.py", "import torch", "torch"),
        ("schemas/a.py", "import pandas as pd", "pandas"),
        ("schemas/a.py", "from extractors.base import Extractor", "extractors"),
        ("schemas/a.py", "import os, json, train.data.splits", "train"),
        ("schemas/deep/a.py", "from . import keys", "."),
        ("extractors/a.py", "import apache_beam as beam", "apache_beam"),
        ("extractors/a.py", "from apache_beam.metrics import Metrics", "apache_beam"),
        ("extractors/a.py", "from pipelines import features", "pipelines"),
        ("extractors/a.py", "import train", "train"),
        ("pipelines/a.py", "from train.main import app", "train"),
        ("pipelines/inputs/app.py", "import train", "train"),
        ("train/a.py", "import apache_beam", "apache_beam"),
        ("train/a.py", "from extractors import load", "extractors"),
        ("train/models/a.py", "import pipelines.commands.app", "pipelines"),
        ("train/a.py", "import importlib; importlib.import_module('pipelines.commands.app')", "pipelines"),
        ("train/a.py", "__import__('extractors')", "extractors"),
    ],
)
@pytest.mark.parametrize(
    "place",
    [
        "{}",
        "def lazily():\n    {}",
        "class A:\n    def lazily(self):\n        if True:\n            {}",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    {}",
        "try:\n    {}\nexcept ImportError:\n    pass",
    ],
)
def test_a_breach_is_found_wherever_it_stands(path, statement, name, place):
    source = place.format(statement)
    line = source.splitlines().index(next(text for text in source.splitlines() if statement in text)) + 1
    assert breaches(path, source) == [f"{path}:{line} imports {name}"]


@pytest.mark.parametrize(
    ("path", "statement"),
    [
        ("schemas/a.py", "import json, numpy.linalg, pyarrow.parquet as pq\nfrom schemas.keys import shard_of"),
        ("extractors/a.py", "import torch\nfrom PIL import Image\nfrom schemas.features import FeatureSpec"),
        ("pipelines/a.py", "import apache_beam\nimport extractors\nfrom schemas import open_dataset"),
        ("pipelines/commands/app.py", "def train():\n    from train.main import app"),
        ("train/a.py", "import torch\nfrom schemas import open_dataset\nfrom train.data.splits import load"),
        ("train/a.py", "pipelines = 1  # import pipelines"),
    ],
)
def test_what_is_allowed_is_no_breach(path, statement):
    assert breaches(path, statement) == []


# --- without the rest ------------------------------------------------------------------------------------------------

BLOCKER = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ImportError(name + " is blocked")

sys.meta_path.insert(0, Blocker())
for name in {blocked!r}:
    try:
        __import__(name)
    except ImportError as error:
        assert str(error) == name + " is blocked", error
    else:
        raise AssertionError(name + " was imported")
"""


def run(script: str, *arguments: str, blocked: tuple[str, ...] = ()) -> str:
    """Output of a script in a process in which some packages cannot be imported."""
    process = subprocess.run(
        [sys.executable, "-c", BLOCKER.format(blocked=blocked) + script, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("imports") / "features"
    values = np.arange(24, dtype=np.float32).reshape(6, 4)
    rows = [{"image_id": str(n), "feature": values[n]} for n in range(6)]
    write_rows(path, "features", rows, FeatureSpec(name="pool", shape=(4,)), shards=2)
    return path


def test_schemas_need_numpy_and_pyarrow_only(features):
    script = """
import schemas

dataset = schemas.open_dataset(sys.argv[1], kind="features")
assert schemas.validate(sys.argv[1]) == []
for image_id, row in zip(dataset.image_ids(), dataset.numpy()):
    print(image_id, *row.astype(int))
"""
    lines = run(script, str(features), blocked=HEAVY).splitlines()
    assert sorted(lines) == [f"{n} {4 * n} {4 * n + 1} {4 * n + 2} {4 * n + 3}" for n in range(6)]


def test_extractors_need_no_beam_and_load_no_torch():
    script = "import extractors\nprint(extractors.names(), 'torch' in sys.modules, 'apache_beam' in sys.modules)"
    assert run(script, blocked=("apache_beam",)).endswith("False False\n")


def test_extractors_are_listed_without_torch():
    assert "resnet50-pool" in run("import extractors\nprint(extractors.names())", blocked=("torch", "torchvision"))


@pytest.mark.parametrize("arguments", [["--help"], ["features", "--help"]], ids=" ".join)
def test_help_loads_neither_torch_nor_beam(arguments):
    script = """
from pipelines.commands.app import main

sys.argv[0] = "imagepivot"
try:
    main()
except SystemExit as error:
    assert not error.code, error
print([name for name in ("torch", "torchvision", "apache_beam") if name in sys.modules])
"""
    lines = run(script, *arguments).splitlines()
    assert lines[-1] == "[]"
    assert "Usage: imagepivot" in "\n".join(lines)


def test_importing_the_command_loads_neither_torch_nor_beam():
    script = (
        "import pipelines.commands.app\nprint([name for name in ('torch', 'apache_beam', 'sacremoses') if name in sys.modules])"
    )
    assert run(script) == "[]\n"


def test_the_command_starts_without_torch_and_beam():
    run("import pipelines.commands.app", blocked=("torch", "torchvision", "apache_beam", "sacremoses", "PIL", "detectron2"))
