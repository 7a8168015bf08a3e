"""Registered model kinds, with and without vectors, from registration to evaluation."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from schemas.errors import UsageError
from tests.train.conftest import EDGES
from tests.train.trainings import CONFIG, SCAN, assert_equal, weights
from train.config import models as config_models
from train.config.models import ScanConfig, VseConfig, model_kinds
from train.config.sections import from_toml, to_toml
from train.evaluation.embedding import embed
from train.evaluation.scores import evaluate
from train.evaluation.search import search
from train.jobs import EmbedJob, EvaluateJob, SearchJob, TrainJob
from train.loop.training import train
from train.loop.training_data import load_training_inputs
from train.models.catalogue import register_model
from train.models.scan import Scan
from train.runs.run import open_run


@dataclass(frozen=True)
class Pairwise(ScanConfig):
    kind: ClassVar[str] = "pairwise"


@pytest.fixture
def pairwise(kinds) -> str:
    """Register the kind ``pairwise``, a model without vectors, and return a configuration."""
    register_model(Pairwise, Scan)
    return SCAN.replace('kind = "scan"', 'kind = "pairwise"')


def test_configuration_of_a_registered_kind(pairwise):
    config = from_toml(pairwise, "test")
    assert config.model == Pairwise(embed_dim=16, word_dim=8, attention="t2i", pooling="lse")
    assert model_kinds() == ("pairwise", "vse")
    assert from_toml(to_toml(config), "copy") == config
    with pytest.raises(UsageError, match=r"unknown key model\.text: expected "):
        from_toml(pairwise.replace("word_dim = 8", "text = 8"), "test")
    # Another kind than that of the extended configuration drops its keys.
    assert from_toml('extends = "demo"\n[model]\nkind = "pairwise"', "test").model == Pairwise()
    small = VseConfig(embed_dim=64, word_dim=7)
    assert from_toml('extends = "demo"\n[model]\nkind = "vse"\nword_dim = 7', "test").model == small


@pytest.mark.slow
def test_registered_model_without_vectors(pairwise, toy_regions, train_toy, tmp_path):
    folder = train_toy(pairwise.replace("44", "2"), corpus=toy_regions).folder
    assert isinstance(open_run(folder).model, Scan)
    scores = evaluate(EvaluateJob(folder, toy_regions.captions, toy_regions.features, splits=("train",)))
    assert {score.language for score in scores} == {"en", "de"}
    for use in (
        lambda: embed(EmbedJob(folder, str(tmp_path / "embedded"), features=toy_regions.features)),
        lambda: search(SearchJob(folder, "a", "en", toy_regions.features, tokenized=True)),
    ):
        with pytest.raises(UsageError, match=r"a model of the kind 'pairwise', .* imagepivot evaluate scores it"):
            use()
    assert not (tmp_path / "embedded").exists()


def test_run_of_an_unregistered_kind_is_no_damaged_one(pairwise, toy_regions, train_toy, monkeypatch):
    folder = train_toy(pairwise.replace("44", "2"), corpus=toy_regions).folder
    monkeypatch.delitem(config_models._SECTIONS, "pairwise")
    unknown = r"%s: model\.kind is 'pairwise', expected one of 'vse': import the module that registers it .* --import MODULE"
    with pytest.raises(UsageError, match=unknown % r"best\.pt"):
        open_run(folder)
    with pytest.raises(UsageError, match=unknown % r"last\.pt"):
        train_toy(CONFIG, resume=True)


@pytest.mark.slow
def test_training_inputs_replace_the_corpus(toy, finished_run, tmp_path):
    config = from_toml(CONFIG, "test")
    job = TrainJob(config, None, str(tmp_path / "run"), device="cpu", curves=False)
    result = train(job, training_inputs=load_training_inputs(config, toy, seed=0))
    assert result.progress == finished_run[1].progress
    assert_equal(weights(tmp_path / "run"), weights(finished_run[0]))


@pytest.mark.cluster
def test_command_loads_kinds_from_entry_points(toy, tmp_path):
    site = tmp_path / "site"
    (site / "edges-1.0.dist-info").mkdir(parents=True)
    (site / "edges-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: edges\nVersion: 1.0\n")
    (site / "edges-1.0.dist-info" / "entry_points.txt").write_text("[imagepivot.models]\ncounts = edges\n")
    (site / "edges.py").write_text(EDGES)
    (tmp_path / "own.toml").write_text(
        '[data]\nportions = { en = ["comparable"] }\n[model]\nkind = "counts"\nwidth = 4\n[schedule]\nmax_steps = 5\n'
    )
    data = ("--captions", toy.captions, "--features", toy.features)

    def run(*arguments: str, code: int = 0, path: Path = site) -> str:
        script = Path(sys.executable).with_name("imagepivot")
        environment = {**os.environ, "PYTHONPATH": str(path)}
        done = subprocess.run([script, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    run("train", "own.toml", "run", *data, "--vocabulary", toy.vocabulary, "--device", "cpu")
    evaluation = ("evaluate", "run", *data, "--splits", "test", "--device", "cpu")
    assert "en" in run(*evaluation)
    assert "best.pt: model.kind is 'counts', expected one of 'dan', " in run(*evaluation, code=2, path=tmp_path)
