"""Texts and images to vectors, against `embed`, the scores of `search`, and the model itself."""

import pickle

import numpy as np
import pytest
import torch

import imagepivot
from schemas.dataset import open_dataset
from train.evaluation.embedding import embed
from train.evaluation.encoding import EncodingRun
from train.evaluation.search import search
from train.jobs import EmbedJob, SearchJob
from train.runs.run import open_run


def tokenize(text, language, recipe, truecaser):
    return f"{text}{truecaser}".split()


@pytest.fixture(scope="module")
def run(finished_run):
    return EncodingRun(**vars(open_run(finished_run[0])), tokenize=tokenize)


def test_vectors_are_those_of_embed(run, toy, tmp_path):
    inputs = {"captions": toy.captions, "features": toy.features}
    embed(EmbedJob(run.folder.location, output=str(tmp_path / "e"), device="cpu", **inputs))
    features, images = open_dataset(toy.features), open_dataset(tmp_path / "e" / "images")
    vectors = run.encode_images(features.numpy())
    assert (vectors.dtype, vectors.shape) == (np.float32, (len(features), run.model.width))
    np.testing.assert_allclose(vectors, images.take(features.image_ids())["feature"], atol=1e-6)
    captions, checked = open_dataset(tmp_path / "e" / "captions"), 0
    tokens = run.vocabulary.tokens
    for row in [row for row in open_dataset(toy.captions) if row["language"] in run.model.languages][::11]:
        text = " ".join(tokens[token_id] for token_id in row["token_ids"][1:-1])
        of_image = captions.rows(row["image_id"]).to_pylist()
        (stored,) = (each for each in of_image if all(each[key] == row[key] for key in ("language", "portion", "index")))
        (vector,) = run.encode_text([text], language=row["language"])
        if "<unk>" not in text:
            np.testing.assert_allclose(vector, stored["embedding"], atol=1e-6)
            checked += 1
    assert checked > 9


def test_similarity_is_the_score_of_search(run, toy):
    features = open_dataset(toy.features)
    word = next(token for token in run.vocabulary.tokens if token.startswith("de"))
    job = SearchJob(run.folder.location, word, language="de", features=toy.features, tokenized=True, top=9, device="cpu")
    scores = run.similarity(run.encode_images(features.numpy()), run.encode_text([word], language="de"))[:, 0]
    assert scores.dtype == np.float32
    by_id = dict(zip(features.image_ids(), scores.tolist(), strict=True))
    hits = search(job)
    assert [hit.image_id for hit in hits] == sorted(by_id, key=by_id.__getitem__, reverse=True)[:9]
    assert [hit.score for hit in hits] == pytest.approx([by_id[hit.image_id] for hit in hits], abs=1e-6)


def test_encoding_keeps_mode_and_gradients(run):
    run.model.train()
    vectors = run.encode_text(["de1", "", "de2 de3"], language="de")
    assert run.model.training
    assert all(parameter.requires_grad and parameter.grad is None for parameter in run.model.parameters())
    run.model.eval()
    np.testing.assert_array_equal(vectors, run.encode_text(["de1", "", "de2 de3"], language="de"))
    assert run.encode_text([], language="de").shape == run.encode_images(np.zeros((0, 8))).shape == (0, run.model.width)
    tensors = torch.from_numpy(vectors)
    np.testing.assert_array_equal(run.similarity(tensors, tensors), run.similarity(vectors, vectors))


def test_open_run_tokenizes_by_the_recipe_of_the_run(finished_run, monkeypatch):
    run = imagepivot.open_run(finished_run[0])
    assert isinstance(run, imagepivot.Run)
    asked = []
    monkeypatch.setattr(imagepivot, "tokenize_query", None, raising=False)  # Restored, since a loaded name is kept.
    monkeypatch.setattr("pipelines.text.queries.tokenize_query", lambda *given: asked.append(given) or ["de1"])
    vectors = run.encode_text(["Ein Hund."], language="de", truecaser="t")
    assert asked == [("Ein Hund.", "de", run.text, "t")]
    again = pickle.loads(pickle.dumps(run))
    np.testing.assert_array_equal(again.encode_text(["Ein Hund."], language="de", truecaser="t"), vectors)
