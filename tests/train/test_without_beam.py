"""Training works in an environment that has torch and pyarrow, and neither Beam nor anything else of the pipelines."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

BLOCKER = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(name + " is blocked", name=name)

sys.meta_path.insert(0, Blocker())
for name in {blocked!r}:
    try:
        __import__(name)
    except ModuleNotFoundError as error:
        assert str(error) == name + " is blocked", error
    else:
        raise AssertionError(name + " was imported")
"""
ABSENT = ("apache_beam", "extractors", "sacremoses", "torchvision", "ijson", "tensorboard")


def run(script: str, *arguments: str, blocked: tuple[str, ...]) -> str:
    """Output of a script in a process in which some packages cannot be imported."""
    process = subprocess.run(
        [sys.executable, "-c", BLOCKER.format(blocked=blocked) + script, *arguments],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "120"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_training_and_every_module_of_the_package(toy, tmp_path):
    script = """
import importlib
import pkgutil
import train

for module in pkgutil.walk_packages(train.__path__, "train."):
    importlib.import_module(module.name)

from train.config.sections import resolve
from train.data.splits import open_data
from train.evaluation.evaluating import evaluate
from train.data.corpus import Corpus
from train.loop import TrainJob, train
from train.runs.run import open_run

captions, features, vocabulary, output = sys.argv[1:]
overrides = {"model.embedding": "6", "model.words": "4", "schedule.batch_size": "9", "schedule.max_steps": "12"}
corpus = Corpus(captions, features, vocabulary)
result = train(TrainJob(resolve("kadar2018/bilingual-c2c", overrides), corpus, output, device="cpu"))
run = open_run(output)
data = open_data(captions, features, split="test", portions=run.config.data.portions, expected=run.fingerprints)
print(result.standing.step, sorted(evaluate(run.model, data)))
"""
    blocked = (*ABSENT, "pipelines")
    assert (
        run(script, toy.captions, toy.features, toy.vocabulary, str(tmp_path / "run"), blocked=blocked) == "12 ['de', 'en']\n"
    )


COMMAND = """
from pipelines.commands.app import main

sys.argv[0] = "imagepivot"
try:
    main()
except SystemExit as end:
    assert not end.code, end
print([name for name in ("torch", "apache_beam") if name in sys.modules])
"""


def test_help_of_the_command_loads_neither_torch_nor_beam():
    lines = run(COMMAND, "train", "--help", blocked=ABSENT).splitlines()
    assert "Usage: imagepivot train" in "\n".join(lines)
    assert lines[-1] == "[]"


def test_the_command_trains(toy, tmp_path):
    datasets = ["--captions", toy.captions, "--features", toy.features, "--vocabulary", toy.vocabulary]
    small = ["--set", "model.embedding=6", "--set", "model.words=4", "--max-steps", "3", "--no-tensorboard", "--device", "cpu"]
    out = run(COMMAND, "train", "gella2017/pivot-asym", str(tmp_path / "run"), *datasets, *small, blocked=ABSENT)
    assert "3 steps in" in out
    assert out.endswith("['torch']\n")
