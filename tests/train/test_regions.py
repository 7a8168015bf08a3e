from dataclasses import replace

import numpy as np
import pytest
import torch

from schemas.dataset import open_dataset
from schemas.errors import DatasetError, UsageError
from tests.train.region_models import REGION_CONFIG
from tests.train.trainings import CONFIG, assert_equal, lasting_log, weights
from train.config.sections import from_toml
from train.data.features import read_features
from train.evaluation.embedding import embed
from train.evaluation.evaluation import embed_images
from train.evaluation.scores import evaluate
from train.evaluation.search import search
from train.jobs import EmbedJob, EvaluateJob, SearchJob, TrainJob
from train.loop.training import train
from train.models.retrieval_model import ImageBatch
from train.runs.run import open_run

WITHOUT = ("train-003", "train-011", "val-002", "test-004")


@pytest.fixture(scope="module")
def whole(regions, tmp_path_factory):
    """The run of an undisturbed training; read-only."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    train(TrainJob(from_toml(REGION_CONFIG, "test"), regions, str(folder), device="cpu", curves=False))
    return folder


@pytest.mark.slow
def test_images_without_regions_are_refused_or_excluded(train_toy, write_regions, tmp_path):
    empty, lacking = write_regions(tmp_path / "empty", without=WITHOUT), write_regions(tmp_path / "lacking", lacking=WITHOUT)
    message = r"lacks the features of 1 of 12 images of split 'val', counting images without regions, with .*: val-002"
    with pytest.raises(DatasetError, match=message):
        train_toy(REGION_CONFIG, corpus=empty)
    for name, corpus in (("one", empty), ("two", lacking)):
        result = train_toy(REGION_CONFIG, name, corpus=corpus, allow_missing_features=True)
        assert [(out.split, out.images, out.first) for out in result.missing_features] == [
            ("train", 2, ("train-003", "train-011")),
            ("val", 1, ("val-002",)),
        ]
    assert lasting_log(tmp_path / "one") == lasting_log(tmp_path / "two")
    assert_equal(weights(tmp_path / "one"), weights(tmp_path / "two"))
    job = EvaluateJob(str(tmp_path / "one"), empty.captions, empty.features, ("test",), device="cpu")
    with pytest.raises(DatasetError, match="1 of 9 images of split 'test', counting images without regions"):
        evaluate(job)
    assert {score.missing_features.first for score in evaluate(replace(job, allow_missing_features=True))} == {("test-004",)}


def test_vse_with_regions_is_refused(train_toy, regions, tmp_path):
    message = r"have the shape \[4, 8\], but a model of the kind 'vse' takes one vector per image"
    with pytest.raises(UsageError, match=message):
        train_toy(CONFIG, corpus=regions, memory_map=str(tmp_path / "cache"))
    assert not (tmp_path / "cache").exists()
    assert not (tmp_path / "run").exists()


def test_embedding_and_searching(whole, regions, write_regions, tmp_path):
    run = open_run(whole)
    remarks = []
    corpus = write_regions(tmp_path, np.nan, without=WITHOUT)
    job = EmbedJob(run.folder.location, str(tmp_path / "embedded"), features=corpus.features, captions=corpus.captions)
    manifests = embed(job, on_warning=remarks.append)
    assert remarks == [
        "not embedded, because no region was found in them: 4 of 61 images: test-004, train-003, train-011, val-002"
    ]
    assert manifests[0].statistics["images_left_out"] == 4
    written = open_dataset(tmp_path / "embedded" / "images")
    by_id = dict(zip(written.image_ids(), written.numpy(), strict=True))
    assert len(by_id) == 57
    for row in open_dataset(corpus.features):
        used = row["num_regions"]
        if used:
            values = torch.from_numpy(np.array(row["features"][:used], np.float32))[None]
            with torch.no_grad():
                expected = run.model.encode_images(ImageBatch(values, torch.ones(1, used, dtype=torch.bool))).values[0]
            np.testing.assert_allclose(by_id[row["image_id"]], expected, atol=1e-6)
    for images in ({"features": corpus.features}, {"embeddings": str(tmp_path / "embedded")}):
        hits = search(SearchJob(str(whole), "en1 en2", "en", tokenized=True, top=100, device="cpu", **images))
        assert {hit.image_id for hit in hits} == set(by_id)
    with pytest.raises(DatasetError, match="lacks the features of 1 of 9 images of split 'test': test-004"):
        embed(replace(job, output=str(tmp_path / "split"), splits=("test",)))


def test_embed_images_batches_are_bounded(whole, regions, monkeypatch):
    run = open_run(whole)
    sizes, encode = [], type(run.model).encode_images
    monkeypatch.setattr(
        type(run.model), "encode_images", lambda self, images: sizes.append(len(images)) or encode(self, images)
    )
    monkeypatch.setattr("train.evaluation.evaluation._MAX_BATCH_BYTES", 5 * 4 * 8 * 4)
    dataset = open_dataset(regions.features)
    read = read_features(dataset, dataset.image_ids()[:12])
    encoded = embed_images(run.model, read).values
    assert sizes == [5, 5, 2]
    with torch.no_grad():
        torch.testing.assert_close(encoded, encode(run.model, ImageBatch.of(read, slice(None), torch.device("cpu"))).values)
