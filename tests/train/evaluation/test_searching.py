from __future__ import annotations

import numpy as np
import pytest
import torch

from schemas.dataset import open_dataset
from schemas.errors import DatasetError, UsageError
from train.data.packing import pack
from train.evaluation.embedding import EmbedJob, embed
from train.evaluation.searching import Gallery, embedded_gallery, gallery_of, search
from train.runs.run import open_run


@pytest.fixture
def run(write_run):
    return open_run(write_run())


@pytest.fixture
def gallery(run, toy):
    return gallery_of(run, toy.features)


@pytest.mark.parametrize("similarity", ["cosine", "order"])
def test_the_best_images_are_those_of_a_full_sort(write_run, toy, similarity):
    run = open_run(write_run(similarity=similarity))
    features = open_dataset(toy.features)
    ids = np.array(run.vocabulary.encode(["en1", "en2", "nothing"]))
    with torch.no_grad():
        query = run.model.embed_captions(pack(ids, np.array([0, 5]), np.array([0])), "en")
        scores = run.model.similarity(run.model.embed_images(torch.from_numpy(features.numpy())), query)[:, 0].numpy()
    expected = [features.image_ids()[row] for row in np.argsort(-scores)[:7]]
    hits = search(run, ["en1", "en2", "nothing"], "en", gallery_of(run, toy.features), top=7)
    assert [hit.image_id for hit in hits] == expected
    np.testing.assert_allclose([hit.score for hit in hits], np.sort(scores)[::-1][:7], atol=1e-6)


def test_equal_scores_keep_the_order_of_the_gallery(run):
    gallery = Gallery(["b", "a", "c"], torch.eye(6)[[0, 0, 0]])
    assert [hit.image_id for hit in search(run, ["en1"], "en", gallery)] == ["b", "a", "c"]


def test_embeddings_that_were_written_give_the_same(run, gallery, toy, tmp_path):
    embed(run, EmbedJob(output=str(tmp_path / "out"), name="run", features=toy.features, captions=toy.captions))
    expected = search(run, ["de3"], "de", gallery)
    for folder in ("out", "out/images"):
        found = search(run, ["de3"], "de", embedded_gallery(run, str(tmp_path / folder)))
        assert [hit.image_id for hit in found] == [hit.image_id for hit in expected]


def test_images_of_another_model_are_refused(run, write_run, toy, other_toy, tmp_path):
    other = open_run(write_run("other", seed=1))
    embed(other, EmbedJob(output=str(tmp_path / "out"), name="run", features=toy.features))
    with pytest.raises(DatasetError, match="another model's"):
        embedded_gallery(run, str(tmp_path / "out"))
    with pytest.raises(DatasetError, match="features that no model has seen"):
        embedded_gallery(run, toy.features)
    with pytest.raises(DatasetError, match="made by another extractor"):
        gallery_of(run, other_toy.features)
    with pytest.raises(DatasetError, match="is not a dataset"):
        embedded_gallery(run, str(tmp_path / "nothing"))


def test_a_query_that_cannot_be_answered(run, gallery):
    with pytest.raises(UsageError, match="--language is 'fr', this run knows en, de"):
        search(run, ["fr1"], "fr", gallery)
    with pytest.raises(UsageError, match="knows no word of 'cats and dogs'"):
        search(run, ["cats", "and", "dogs"], "en", gallery)
    with pytest.raises(UsageError, match="knows no word of ''"):
        search(run, [], "en", gallery)
    with pytest.raises(UsageError, match="--top is 0"):
        search(run, ["en1"], "en", gallery, top=0)
