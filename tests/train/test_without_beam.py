"""Training works in an environment that has torch and pyarrow, and neither Beam nor anything else of the pipelines."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
ABSENT = ("apache_beam", "extractors", "sacremoses", "torchvision", "ijson", "tensorboard")

# One process for everything, since most of its time goes into importing torch. "--" separates what its parts print.
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

# The help of the command.
blocked -= {"pipelines", "extractors"}
from pipelines.commands.app import app, main

app(["train", "--help"], standalone_mode=False)
print([name for name in ("torch", "apache_beam") if name in sys.modules])
print("--")

# Every module of the package without an extra, and a training.
import train

for module in pkgutil.walk_packages(train.__path__, "train."):
    if module.name != "train.evaluation.mteb_model":  # It needs the extra mteb.
        importlib.import_module(module.name)

from train.config.sections import load_config
from train.data.splits import open_data
from train.evaluation.evaluation import rank_folds
from train.jobs import Corpus, TrainJob
from train.loop import train
from train.runs.run import open_run

captions, features, vocabulary, output = sys.argv[2:]
overrides = {"model.embed_dim": "6", "model.word_dim": "4", "schedule.batch_size": "9", "schedule.max_steps": "12"}
corpus = Corpus(captions, features, vocabulary)
result = train(TrainJob(load_config("kadar2018/bilingual-c2c", overrides), corpus, output + "/library", device="cpu"))
run = open_run(output + "/library")
data = open_data(captions, features, split="test", portions=run.config.data.portions, expected=run.fingerprints)
print(result.progress.step, len(rank_folds([(run.model, data)], "en", 3)))
print("--")

# The command, which works without the extra of the pipelines.
small = ["--set", "model.embed_dim=6", "--set", "model.word_dim=4", "--max-steps", "3", "--no-tensorboard", "--device", "cpu"]
datasets = ["--captions", captions, "--features", features, "--vocabulary", vocabulary]
sys.argv = ["imagepivot", "train", "gella2017/pivot-asym", output + "/command", *datasets, *small]
try:
    main()
except SystemExit as end:
    assert not end.code, end
print([name for name in ("torch", "apache_beam") if name in sys.modules])
"""


@pytest.fixture(scope="module")
def parts(toy, tmp_path_factory) -> list[str]:
    """What the parts of the script printed."""
    output = tmp_path_factory.mktemp("without-beam")
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT, ",".join(ABSENT), toy.captions, toy.features, toy.vocabulary, str(output)],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "120", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.split("--\n")


@pytest.mark.cluster
def test_help_imports_neither_torch_nor_beam(parts):
    assert "Usage:" in parts[0]
    assert "--list-presets" in parts[0]
    assert parts[0].endswith("[]\n")


def test_train_package_imports_no_beam(parts):
    assert parts[1] == "12 3\n"


def test_command_trains(parts):
    assert "3 steps in" in parts[2]
    assert parts[2].endswith("['torch']\n")
