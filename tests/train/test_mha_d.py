"""Training of the kind ``mha-d``, whose images are several features each and whose vectors are several heads."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from schemas.dataset import open_dataset
from schemas.errors import UsageError
from tests.train.test_distributed import SCRIPT
from tests.train.trainings import DAN, MHA_D, assert_equal, events, lasting_log, weights
from train.config.sections import from_toml
from train.evaluation import embed_run, evaluate_run, search
from train.jobs import EvaluateJob, SearchJob, TrainJob
from train.loop import train
from train.material import Material, open_material
from train.models import ImageBatch
from train.runs import open_run

TERMS = {
    *("c2i/en", "c2i/de", "c2c/en-de"),
    *("diversity/images", "diversity/en", "diversity/de"),
    *("diversity/images-en", "diversity/images-de", "diversity/en-de"),
}


@dataclass(frozen=True)
class _Masked(Material):
    """Material whose images have one to three features, and a filling in place of the others."""

    filling: float = 0.0

    def inputs(self, batch, device, rows=slice(None)):
        inputs = super().inputs(batch, device, rows)
        mask = torch.arange(3) < 1 + inputs.numbers[rows][:, None] % 3
        features = torch.where(mask[..., None], inputs.images.features, torch.tensor(self.filling))
        return replace(inputs, images=ImageBatch(features, mask))


@pytest.fixture
def train_regions(train_toy, toy_regions):
    def run(text: str = MHA_D, name: str = "run", **fields):
        return train_toy(text, name, corpus=toy_regions, **fields)

    return run


@pytest.mark.slow
def test_it_learns(train_regions, toy_regions, tmp_path):
    result = train_regions(MHA_D.replace("embed_dim = 6", "embed_dim = 16").replace("max_steps = 44", "max_steps = 150"))
    chance, found = [], []
    for score in evaluate_run(EvaluateJob(str(tmp_path / "run"), toy_regions.captions, toy_regions.features, ("val",))):
        if score.portion == "comparable":
            chance.append(score.chance["text_to_image"][1])
            found.append(score.retrieval.text_to_image.recall_at_5)
    assert len(found) == 2
    assert result.progress.best_score > 300
    assert sum(found) > 1.3 * sum(chance)


@pytest.mark.slow
def test_terms_are_in_the_log(train_regions, tmp_path):
    train_regions()
    for line in events(tmp_path / "run", "step"):
        assert set(line["terms"]) == TERMS
    validations = events(tmp_path / "run", "validation")
    assert [line["step"] for line in validations] == [17, 34, 44]
    for line in validations:
        terms = line["terms"]
        assert set(terms) == TERMS
        weight = {"c2i": 1.0, "c2c": 0.6, "diversity": 0.5}
        assert line["loss"] == pytest.approx(
            sum(weight[name.partition("/")[0]] * value for name, value in terms.items()), rel=1e-6
        )


@pytest.mark.slow
def test_diversity_keeps_heads_apart(train_regions, tmp_path):
    spread = {}
    for name, weight in (("with", 0.5), ("without", 0.0)):
        train_regions(MHA_D.replace("diversity_weight = 0.5", f"diversity_weight = {weight}"), name)
        last = open_run(tmp_path / name).model
        features = torch.from_numpy(np.random.default_rng(0).standard_normal((30, 3, 8)).astype(np.float32))
        first, second = last.encode_images(ImageBatch(features)).values.unflatten(1, (2, 6)).unbind(1)
        spread[name] = float((1 - torch.cosine_similarity(first, second)).mean().detach())
    assert spread["with"] > spread["without"]


@pytest.mark.slow
def test_it_resumes_bit_for_bit(train_regions, tmp_path):
    train_regions(name="whole")
    train_regions(MHA_D.replace("max_steps = 44", "max_steps = 20"), "parts")
    train_regions(name="parts", resume=True)
    assert_equal(weights(tmp_path / "parts"), weights(tmp_path / "whole"))
    train_regions(name="again")
    assert lasting_log(tmp_path / "again") == lasting_log(tmp_path / "whole")


@pytest.mark.slow
def test_several_batches_a_step(train_regions, tmp_path):
    result = train_regions(MHA_D.replace("batch_size = 9", "batch_size = 3\ngrad_accum_steps = 3"))
    assert result.progress.step == 44
    assert all(set(line["terms"]) == TERMS for line in events(tmp_path / "run", "step"))


@pytest.mark.slow
def test_bf16_learns_too(train_regions, tmp_path):
    text = MHA_D.replace("max_steps = 44", "max_steps = 3")
    train_regions(text, "full")
    train_regions(text, precision="bf16")
    low, full = weights(tmp_path / "run"), weights(tmp_path / "full")
    assert all(value.dtype == torch.float32 for value in low.values())
    name = "regions.weight"
    assert 0 < (low[name] - full[name]).norm() < 0.2 * full[name].norm()


@pytest.mark.slow
def test_each_item_is_one_vector(train_regions, toy_regions, tmp_path):
    train_regions()
    run = open_run(tmp_path / "run")
    assert run.model.width == 12
    embed_run(run, str(tmp_path / "vectors"), name="toy", features=toy_regions.features, captions=toy_regions.captions)
    images = open_dataset(str(tmp_path / "vectors" / "images"))
    stored = np.stack(images.table().to_pandas()["feature"])
    assert stored.shape[1] == 12
    np.testing.assert_allclose(np.linalg.norm(stored, axis=1), 1, rtol=1e-5)
    from_features, from_vectors = (
        search(SearchJob(str(tmp_path / "run"), "en1 en2", "en", **{place: folder}, tokenized=True, device="cpu"))
        for place, folder in (("features", toy_regions.features), ("embeddings", str(tmp_path / "vectors" / "images")))
    )
    assert [hit.image_id for hit in from_features] == [hit.image_id for hit in from_vectors]
    assert len(from_features) == 10


@pytest.mark.slow
def test_it_starts_from_another_run(train_regions, tmp_path):
    train_regions(name="first")
    text = MHA_D.replace('de = ["comparable"]', 'fr = ["translation"]').replace("max_steps = 44", "max_steps = 1")
    train_regions(text, "second", init_from=str(tmp_path / "first"))
    assert len(events(tmp_path / "second", "started_from")) == 1


def test_one_feature_an_image_is_refused(toy, train_toy, tmp_path):
    with pytest.raises(UsageError, match=r"have the shape \[8\], but a model of the kind 'mha-d' attends to several"):
        train_toy(MHA_D, corpus=toy)
    assert not (tmp_path / "run" / "last.pt").exists()


def test_diversity_of_a_model_without_heads_is_refused(toy, train_toy):
    text = MHA_D.replace('kind = "mha-d"', "").replace("num_heads = 2\nattention_dim = 5\ncontext_dim = 7", "")
    with pytest.raises(UsageError, match=r"loss\.diversity_weight is 0\.5, but this model \(JointEmbedding\) has 1 head"):
        train_toy(text, corpus=toy)


@pytest.mark.slow
def test_absent_regions_do_not_count_in_a_training(toy_regions, tmp_path):
    """Two materials that differ only in regions that are absent give the same weights, bit for bit."""
    config = from_toml(MHA_D.replace("max_steps = 44", "max_steps = 12"), "test")
    material = open_material(config, toy_regions, seed=0)
    results = []
    for name, filling in (("zeros", 0.0), ("noise", 1e3)):
        train(
            TrainJob(config, None, str(tmp_path / name), device="cpu", curves=False),
            material=_Masked(*(getattr(material, field) for field in material.__dataclass_fields__), filling=filling),
        )
        results.append(weights(tmp_path / name))
    assert_equal(*results)


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.parametrize("text", [MHA_D, DAN.replace("dropout = 0.2", "dropout = 0.0")], ids=["mha-d", "dan"])
def test_two_processes_train_the_model_of_one(toy_regions, tmp_path, text):
    text = text.replace("max_steps = 44", "max_steps = 20")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    torchrun = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    arguments = [toy_regions.captions, toy_regions.features, toy_regions.vocabulary, str(tmp_path / "two"), text]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, *arguments], env={**torchrun, "RANK": str(rank)}, cwd=Path(__file__).parents[2]
        )
        for rank in range(2)
    ]
    train(TrainJob(from_toml(text, "test"), toy_regions, str(tmp_path / "one"), device="cpu"))
    assert [process.wait(timeout=300) for process in processes] == [0, 0]
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")
    assert {line["step"] for line in events(tmp_path / "two", "step")} == {10, 20}
    for ours, theirs in zip(events(tmp_path / "two", "step"), events(tmp_path / "one", "step"), strict=True):
        assert ours["terms"] == {name: pytest.approx(value, rel=1e-3, abs=1e-4) for name, value in theirs["terms"].items()}
