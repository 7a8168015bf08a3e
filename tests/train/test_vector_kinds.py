"""Training of the kinds ``dan`` and ``mlmme``, and what is done with their runs: every item is one vector."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from schemas.dataset import open_dataset
from tests.train.test_distributed import SCRIPT
from tests.train.trainings import DAN, MLMME, assert_equal, events, lasting_log, weights
from train.config.sections import from_toml
from train.evaluation import embed_run, evaluate_run, search
from train.evaluation.sts_scoring import sts
from train.jobs import EvaluateJob, SearchJob, StsJob, TrainJob
from train.loop import train
from train.models import Encoded
from train.runs import open_run

DOT = MLMME.replace('scoring = "general"', 'scoring = "dot"')
TEXTS = {"dan": DAN, "mlmme": DOT, "mlmme-general": MLMME}


pytestmark = pytest.mark.slow


@pytest.fixture(params=TEXTS)
def kind(request) -> str:
    return request.param


@pytest.fixture
def corpus(kind, toy, toy_regions):
    return toy_regions if kind == "dan" else toy


@pytest.fixture
def train_kind(kind, corpus, train_toy):
    def run(name: str = "run", *changes: tuple[str, str], **fields):
        text = TEXTS[kind]
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        return train_toy(text, name, corpus=corpus, **fields)

    return run


def sum_of_recalls(corpus, run) -> float:
    job = EvaluateJob(str(run), corpus.captions, corpus.features, splits=("train",))
    return sum(score.retrieval.sum_of_recalls for score in evaluate_run(job) if score.portion == "comparable")


@pytest.mark.cluster
def test_it_learns(train_kind, corpus, tmp_path):
    train_kind("trained")
    train_kind("untrained", ("learning_rate = 0.01", "learning_rate = 1e-9"))
    assert sum_of_recalls(corpus, tmp_path / "trained") > sum_of_recalls(corpus, tmp_path / "untrained") + 100  # Of 1,200.


@pytest.mark.cluster
def test_it_resumes_bit_for_bit(train_kind, tmp_path):
    train_kind("whole")
    train_kind("parts", ("max_steps = 44", "max_steps = 20"))
    train_kind("parts", resume=True)
    assert_equal(weights(tmp_path / "parts"), weights(tmp_path / "whole"))
    train_kind("again")
    assert lasting_log(tmp_path / "again") == lasting_log(tmp_path / "whole")


def test_terms_are_in_the_log(kind, train_kind, tmp_path):
    train_kind("run", ("max_steps = 44", "max_steps = 17"))
    expected = {"c2i/en", "c2i/de"} | (set() if kind == "dan" else {"c2c/en-de"})
    assert [set(line["terms"]) for line in events(tmp_path / "run", "step")] == [expected]
    assert [set(line["terms"]) for line in events(tmp_path / "run", "validation")] == [expected]


def test_vectors_are_embedded_and_searched(kind, train_kind, corpus, tmp_path):
    train_kind("run", ("max_steps = 44", "max_steps = 17"))
    run, width = open_run(tmp_path / "run"), {"dan": 3 * 8, "mlmme": 6, "mlmme-general": 3 * 6}[kind]
    embed_run(run, str(tmp_path / "vectors"), name="toy", features=corpus.features, captions=corpus.captions)
    images = open_dataset(str(tmp_path / "vectors" / "images"))
    stored = np.stack(images.table().to_pandas()["feature"])
    assert stored.shape[1] == run.model.width == width
    if kind == "mlmme":
        np.testing.assert_allclose(np.linalg.norm(stored, axis=1), 1, rtol=1e-5)
    from_features, from_vectors = (
        search(SearchJob(str(tmp_path / "run"), "en1 en2", "en", **{place: folder}, tokenized=True, device="cpu"))
        for place, folder in (("features", corpus.features), ("embeddings", str(tmp_path / "vectors" / "images")))
    )
    assert [hit.image_id for hit in from_features] == [hit.image_id for hit in from_vectors]
    captions = open_dataset(str(tmp_path / "vectors" / "captions"))
    rows = [row for row in captions.table().to_pylist() if row["language"] == "en"]
    vectors = np.array([row["embedding"] for row in rows], np.float32)
    assert vectors.shape[1] == width
    # What is stored is all that a score needs: an inner product.
    scores = run.model.scores(Encoded(torch.from_numpy(stored)), Encoded(torch.from_numpy(vectors[:1])))[:, 0]
    np.testing.assert_allclose(stored @ vectors[0], scores, rtol=1e-5, atol=1e-5)


def test_sentences_are_compared(train_kind, tmp_path):
    train_kind("run", ("max_steps = 44", "max_steps = 17"))
    (tmp_path / "pairs.tsv").write_text("5\ten1 en2\ten2 en1\n2\ten1 en2\ten3\n0\ten1\ten20\n4\ten4 en5\ten5\n")
    _, system = sts(StsJob((str(tmp_path / "pairs.tsv"), str(tmp_path / "run")), tokenized=True, device="cpu")).systems
    assert (system.kind, system.language) == ("run", "en")
    assert np.isfinite(system.correlations[0].pearson)
    assert (np.abs(system.similarities[0]) <= 1 + 1e-6).all()


def test_it_starts_from_another_run(train_kind, tmp_path):
    train_kind("first", ("max_steps = 44", "max_steps = 2"))
    train_kind("second", ("max_steps = 44", "max_steps = 1"), init_from=str(tmp_path / "first"))
    (line,) = events(tmp_path / "second", "started_from")
    assert not line["drawn"]
    train_kind("plain", ("max_steps = 44", "max_steps = 1"))
    first, second, plain = (weights(tmp_path / name) for name in ("first", "second", "plain"))
    for name in (name for name in first if name.endswith("next_seed")):  # As many masks in each step.
        assert first[name] > plain[name]
        assert second[name] - first[name] == first[name] - plain[name]


@pytest.mark.cluster
def test_two_processes_drop_out(toy_regions, tmp_path):
    """Where dropout is stands in the model, so that processes agree on it; each drops out of its own rows."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    torchrun = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    text = DAN.replace("max_steps = 44", "max_steps = 5")
    arguments = [toy_regions.captions, toy_regions.features, toy_regions.vocabulary, str(tmp_path / "two"), text]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, *arguments], env={**torchrun, "RANK": str(rank)}, cwd=Path(__file__).parents[2]
        )
        for rank in range(2)
    ]
    assert [process.wait(timeout=300) for process in processes] == [0, 0]
    train(TrainJob(from_toml(text, "test"), toy_regions, str(tmp_path / "one"), device="cpu"))
    two, one = weights(tmp_path / "two"), weights(tmp_path / "one")
    counts = [name for name in one if name.endswith("next_seed")]
    assert len(counts) == 3
    assert all(torch.equal(two[name], one[name]) for name in counts)


def test_it_trains_in_bfloat16(train_kind, tmp_path):
    steps = ("max_steps = 44", "max_steps = 3")
    train_kind("full", steps)
    train_kind("low", steps, precision="bf16")
    full, low = weights(tmp_path / "full"), weights(tmp_path / "low")
    assert all(values.dtype == full[name].dtype for name, values in low.items())
    name = "sentences.0.words.weight"
    assert 0 < (low[name] - full[name]).norm() < 0.2 * full[name].norm()
