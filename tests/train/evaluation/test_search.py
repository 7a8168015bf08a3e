from dataclasses import replace

import numpy as np
import pytest
import torch

from schemas.dataset import open_dataset
from schemas.errors import DatasetError, UsageError
from train.data.batches import CaptionBatch
from train.evaluation.embedding import embed
from train.evaluation.search import Gallery, embed_gallery, read_gallery, search, search_gallery
from train.jobs import EmbedJob, SearchJob
from train.models.retrieval_model import ImageBatch
from train.runs.run import open_run


@pytest.fixture
def run(write_run):
    return open_run(write_run())


@pytest.fixture
def gallery(run, toy):
    return embed_gallery(run, toy.features)


@pytest.mark.parametrize("similarity", ["cosine", "order"])
def test_best_images_equal_those_of_a_full_sort(write_run, toy, similarity):
    run = open_run(write_run(similarity=similarity))
    features = open_dataset(toy.features)
    ids = np.array(run.vocabulary.encode(["en1", "en2", "nothing"]))
    with torch.no_grad():
        query = run.model.encode_captions(CaptionBatch(ids, np.array([0, 5]), np.array([0])), "en")
        scores = run.model.scores(run.model.encode_images(ImageBatch(torch.from_numpy(features.numpy()))), query)[:, 0].numpy()
    expected = [features.image_ids()[row] for row in np.argsort(-scores)[:7]]
    hits = search_gallery(run, ["en1", "en2", "nothing"], "en", embed_gallery(run, toy.features), top=7)
    assert [hit.image_id for hit in hits] == expected
    np.testing.assert_allclose([hit.score for hit in hits], np.sort(scores)[::-1][:7], atol=1e-6)


def test_equal_scores_keep_the_order_of_the_gallery(run):
    gallery = Gallery(["b", "a", "c"], torch.eye(6)[[0, 0, 0]])
    assert [hit.image_id for hit in search_gallery(run, ["en1"], "en", gallery)] == ["b", "a", "c"]


def test_written_embeddings_give_the_same_hits(run, gallery, toy, tmp_path):
    embed(EmbedJob(run.folder.location, str(tmp_path / "out"), features=toy.features, captions=toy.captions))
    expected = search_gallery(run, ["de3"], "de", gallery)
    for folder in ("out", "out/images"):
        hits = search_gallery(run, ["de3"], "de", read_gallery(run, str(tmp_path / folder)))
        assert [hit.image_id for hit in hits] == [hit.image_id for hit in expected]


def test_images_of_another_model_are_refused(run, write_run, toy, other_toy, tmp_path):
    other = open_run(write_run("other", seed=1))
    embed(EmbedJob(other.folder.location, str(tmp_path / "out"), features=toy.features))
    with pytest.raises(DatasetError, match="another model's"):
        read_gallery(run, str(tmp_path / "out"))
    with pytest.raises(DatasetError, match="features that no model has seen"):
        read_gallery(run, toy.features)
    with pytest.raises(DatasetError, match="comes from another extractor"):
        embed_gallery(run, other_toy.features)
    with pytest.raises(DatasetError, match="is not a dataset"):
        read_gallery(run, str(tmp_path / "nothing"))


def test_query_without_an_answer_is_refused(run, gallery):
    with pytest.raises(UsageError, match="--language is 'fr', expected a language of the run: en, de"):
        search_gallery(run, ["fr1"], "fr", gallery)
    with pytest.raises(UsageError, match="knows no word of 'cats and dogs'"):
        search_gallery(run, ["cats", "and", "dogs"], "en", gallery)


def test_job_tokenizes_and_searches(write_run, toy):
    folder = write_run()
    run, asked, unknown = open_run(folder), [], []

    def tokenize(text, language, recipe, truecaser):
        asked.append((text, language, recipe, truecaser))
        return [*text.split(), "nothing"]

    job = SearchJob(folder, "en1 en2", "en", features=toy.features, top=3, truecaser="models", device="cpu")
    expected = search_gallery(run, ["en1", "en2", "nothing"], "en", embed_gallery(run, toy.features), top=3)
    assert search(job, tokenize, unknown.extend) == expected
    assert asked == [("en1 en2", "en", run.text, "models")]
    assert unknown == ["nothing"]
    tokens = replace(job, query="en1 en2 nothing", tokenized=True)
    assert search(tokens) == expected
    with pytest.raises(UsageError, match=r"'en1 en2' is text.*pip install 'imagepivot\[text\]'.*--tokenized"):
        search(job)
