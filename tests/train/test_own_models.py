"""Registered model kinds, with and without vectors, from registration to evaluation."""

import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from schemas.errors import UsageError
from tests.train.conftest import EDGES
from tests.train.trainings import CONFIG, assert_equal, weights
from train.config import models as config_models
from train.config.models import ModelConfig, VseConfig, model_kinds
from train.config.sections import from_toml, to_toml
from train.data.batches import CaptionBatch
from train.evaluation.embedding import embed
from train.evaluation.scores import evaluate
from train.evaluation.search import search
from train.jobs import EmbedJob, EvaluateJob, SearchJob, TrainJob
from train.loop.training import train
from train.loop.training_data import load_training_inputs
from train.models.catalogue import register_model
from train.models.retrieval_model import Dimensions, Encoded, ImageBatch, RetrievalModel
from train.runs.run import open_run


@dataclass(frozen=True)
class Pairwise(ModelConfig):
    kind: ClassVar[str] = "pairwise"
    width: int = 5


class PairwiseModel(RetrievalModel):
    """Scores by attention of the image over words."""

    similarity = "attention"
    vectors = False

    def __init__(self, config: Pairwise, dimensions: Dimensions) -> None:
        super().__init__()
        self.languages, self.width = dimensions.languages, config.width
        self.images = torch.nn.Linear(*dimensions.feature_shape, config.width)
        self.words = torch.nn.Embedding(dimensions.vocabulary_size, config.width)

    def encode_images(self, images: ImageBatch) -> Encoded:
        return Encoded(self.images(images.features)[:, None])

    def encode_captions(self, captions: CaptionBatch, language: str) -> Encoded:
        ids = torch.from_numpy(captions.padded(0))
        return Encoded(self.words(ids), ids != 0)

    def scores(self, a: Encoded, b: Encoded) -> Tensor:
        products = torch.einsum("ae,bte->abt", a.values[:, 0], b.values).masked_fill(~b.mask, -torch.inf)
        attention = products.softmax(dim=2)
        return (attention * products.nan_to_num(neginf=0)).sum(2)


@pytest.fixture
def pairwise(kinds) -> str:
    """Register the kind ``pairwise``, and return a configuration."""
    register_model(Pairwise, PairwiseModel)
    start, end = CONFIG.index("embed_dim"), CONFIG.index("[loss]")
    return (CONFIG[:start] + 'kind = "pairwise"\nwidth = 4\n' + CONFIG[end:]).replace("c2c_probability = 0.5", "")


def test_configuration_of_a_registered_kind(pairwise):
    config = from_toml(pairwise, "test")
    assert config.model == Pairwise(width=4)
    assert model_kinds() == ("pairwise", "vse")
    assert from_toml(to_toml(config), "copy") == config
    with pytest.raises(UsageError, match=r"unknown key model\.word_dim: expected 'width'"):
        from_toml(pairwise.replace("width = 4", "word_dim = 4"), "test")
    with pytest.raises(UsageError, match=r"model\.width is 'a', expected a whole number"):
        from_toml(pairwise.replace("width = 4", "width = 'a'"), "test")


def test_extends_with_another_kind_drops_its_keys(pairwise):
    config = from_toml('extends = "demo"\n[model]\nkind = "pairwise"', "test")
    assert config.model == Pairwise()
    assert from_toml('extends = "demo"\n[model]\nkind = "vse"\nword_dim = 7', "test").model == VseConfig(
        embed_dim=64, word_dim=7
    )


def test_registering_a_used_kind_is_refused(kinds):
    @dataclass(frozen=True)
    class Other(ModelConfig):
        kind: ClassVar[str] = "vse"

    with pytest.raises(UsageError, match="model kind 'vse' exists already"):
        register_model(Other, PairwiseModel)
    register_model(Pairwise, PairwiseModel)
    register_model(Pairwise, PairwiseModel)  # A notebook's cell that is run again.


@pytest.mark.slow
def test_registered_model_without_vectors(pairwise, toy, train_toy, tmp_path):
    train_toy(pairwise, "whole")
    train_toy(pairwise.replace("44", "20"), "parts")
    train_toy(pairwise, "parts", resume=True)
    assert_equal(weights(tmp_path / "whole"), weights(tmp_path / "parts"))
    run = open_run(tmp_path / "whole")
    assert isinstance(run.model, PairwiseModel)
    scores = evaluate(EvaluateJob(str(tmp_path / "whole"), toy.captions, toy.features, splits=("train",)))
    assert {score.language for score in scores} == {"en", "de"}
    untrained = train_toy(pairwise.replace("0.01", "1e-9"), "untrained")
    before = evaluate(EvaluateJob(untrained.folder, toy.captions, toy.features, splits=("train",)))
    assert sum(score.retrieval.sum_of_recalls for score in scores) > sum(score.retrieval.sum_of_recalls for score in before)
    for use in (
        lambda: embed(EmbedJob(run.folder.location, str(tmp_path / "embedded"), features=toy.features)),
        lambda: search(SearchJob(str(tmp_path / "whole"), "a", "en", toy.features, tokenized=True)),
    ):
        with pytest.raises(UsageError, match=r"a model of the kind 'pairwise', .* imagepivot evaluate scores it"):
            use()
    assert not (tmp_path / "embedded").exists()


def test_run_of_an_unregistered_kind_is_no_damaged_one(pairwise, train_toy, monkeypatch):
    folder = train_toy(pairwise.replace("44", "2")).folder
    monkeypatch.delitem(config_models._SECTIONS, "pairwise")
    unknown = r"%s: model\.kind is 'pairwise', expected one of 'vse': import the module that registers it .* --import MODULE"
    with pytest.raises(UsageError, match=unknown % r"best\.pt"):
        open_run(folder)
    with pytest.raises(UsageError, match=unknown % r"last\.pt"):
        train_toy(CONFIG, resume=True)


@pytest.mark.slow
def test_training_inputs_replace_the_corpus(toy, train_toy, tmp_path):
    expected = train_toy(CONFIG, "corpus")
    config = from_toml(CONFIG, "test")
    training_inputs = load_training_inputs(config, toy, seed=0)
    job = TrainJob(config, None, str(tmp_path / "training_inputs"), device="cpu")
    assert train(job, training_inputs=training_inputs).progress == expected.progress
    assert_equal(weights(tmp_path / "training_inputs"), weights(tmp_path / "corpus"))
    zeros = replace(training_inputs.training.features, stored=training_inputs.training.features.stored * 0)
    other = replace(training_inputs, training=replace(training_inputs.training, features=zeros))
    train(replace(job, output=str(tmp_path / "zeros")), training_inputs=other)
    assert not torch.equal(weights(tmp_path / "zeros")["images.bias"], weights(tmp_path / "corpus")["images.bias"])


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
    scores = run(*evaluation)
    assert "en" in scores
    assert "best.pt: model.kind is 'counts', expected one of 'dan', " in run(*evaluation, code=2, path=tmp_path)
    (tmp_path / "own_edges.py").write_text(EDGES)
    assert run(*evaluation, "--import", "own_edges", path=tmp_path) == scores
