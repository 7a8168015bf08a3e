"""Training works in an environment that has torch and pyarrow, and neither Beam nor anything else of the pipelines."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
ABSENT = ("apache_beam", "extractors", "sacremoses", "torchvision", "ijson", "tensorboard")

# One process for everything, since most of its time goes into importing torch.
SCRIPT = """
import importlib
import pkgutil
import sys

blocked = {*sys.argv[1].split(","), "pipelines"}

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(name + " is blocked", name=name)

sys.meta_path.insert(0, Blocker())
for name in blocked:
    try:
        __import__(name)
    except ModuleNotFoundError as error:
        assert str(error) == name + " is blocked", error
    else:
        raise AssertionError(name + " was imported")

# Every module of the package without an extra.
import train

for module in pkgutil.walk_packages(train.__path__, "train."):
    if module.name != "train.evaluation.mteb_model":  # It needs the extra mteb.
        importlib.import_module(module.name)

# The command, which works without the extra of the pipelines.
blocked -= {"pipelines", "extractors"}
from pipelines.commands.app import main

captions, features, vocabulary, output = sys.argv[2:]
small = ["--set", "model.embed_dim=6", "--set", "model.word_dim=4", "--max-steps", "3", "--no-tensorboard", "--device", "cpu"]
datasets = ["--captions", captions, "--features", features, "--vocabulary", vocabulary]
sys.argv = ["imagepivot", "train", "gella2017/pivot-asym", output, *datasets, *small]
try:
    main()
except SystemExit as end:
    assert not end.code, end
print([name for name in ("torch", "apache_beam") if name in sys.modules])
"""


def test_package_is_imported_and_the_command_trains(toy, tmp_path):
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT, ",".join(ABSENT), toy.captions, toy.features, toy.vocabulary, str(tmp_path / "run")],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "120", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert "3 steps in" in process.stdout
    assert process.stdout.endswith("['torch']\n")
