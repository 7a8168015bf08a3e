from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch

from train.data.packing import pack
from train.data.splits import open_data
from train.evaluation.evaluating import chance, embed_all, embed_images, evaluate, sum_of_recalls
from train.evaluation.metrics import Retrieval, ranks_of
from train.models.joint_embedding import JointEmbedding, ModelConfig
from train.runs.run import open_run


@pytest.fixture
def model(write_run):
    return open_run(write_run(languages=("en", "de", "fr"))).model


@pytest.fixture
def data(toy):
    return open_data(toy.captions, toy.features, split="test")


@pytest.mark.parametrize("batch_size", [1, 4, 512])
def test_embeddings_are_those_of_each_caption_alone(model, data, batch_size):
    embeddings = embed_all(model, data, batch_size=batch_size)
    captions = data.captions
    assert sorted(np.concatenate(list(embeddings.rows.values())).tolist()) == list(range(len(captions)))
    with torch.no_grad():
        for language, rows in embeddings.rows.items():
            assert captions.language_names[captions.languages[rows[0]]] == language
            for row, embedding in zip(rows, embeddings.captions[language], strict=True):
                alone = pack(captions.token_ids, captions.offsets, np.array([row]))
                torch.testing.assert_close(embedding, model.embed_captions(alone, language)[0], atol=1e-6, rtol=1e-5)
        expected = model.embed_images(torch.from_numpy(data.features.array))
    torch.testing.assert_close(embeddings.images, expected, atol=1e-6, rtol=1e-5)
    assert not embeddings.images.requires_grad


def test_each_language_is_scored_by_itself(model, data):
    results = evaluate(model, data)
    embeddings = embed_all(model, data)
    assert list(results) == list(data.captions.language_names)
    for language, result in results.items():
        owner = torch.from_numpy(data.captions.images[embeddings.rows[language]]).long()
        ranks = ranks_of(model.similarity, embeddings.images, embeddings.captions[language], owner)
        assert result.text_to_image.recall_at_1 == pytest.approx(100 * np.mean(ranks.text_to_image.numpy() == 1))
        assert result.text_to_image.queries == len(owner)
        assert result.image_to_text.queries == 9
        assert result.image_to_text.recall_at_5 == pytest.approx(100 * np.mean(ranks.image_to_text.numpy() <= 5))


def test_images_without_a_caption_in_the_language_take_no_part(model, data):
    captions = data.captions
    english = captions.language_names.index("en")
    # All images have German and French captions, three have English ones.
    few = captions.select((captions.languages != english) | (captions.images < 3))
    english_result = evaluate(model, replace(data, captions=few))["en"]
    assert english_result.image_to_text.queries == 3
    assert english_result.text_to_image.queries == 12
    assert english_result.text_to_image.recall_at_5 == 100  # Three candidates only.


def test_a_language_without_captions_is_left_out(model, data):
    captions = data.captions
    german = captions.select(captions.languages == captions.language_names.index("de"))
    assert list(evaluate(model, replace(data, captions=german))) == ["de"]


def test_the_model_is_left_unchanged(model, data):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for training in (True, False):
        model.train(training)
        evaluate(model, data)
        assert model.training is training
        assert torch.is_grad_enabled()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_recalls_of_all_languages_add_up(model, data):
    results = evaluate(model, data)
    assert all(isinstance(result, Retrieval) for result in results.values())
    assert sum_of_recalls(results) == pytest.approx(sum(result.sum_of_recalls for result in results.values()))


def test_chance_equals_random_scores(data):
    captions = data.captions
    rows = captions.rows_of("en")
    owner = torch.from_numpy(captions.images[rows]).long()
    expected = chance(captions, "en")
    generator = torch.Generator().manual_seed(0)
    hits = np.zeros(2)
    rounds = 400
    for _ in range(rounds):
        scores = torch.rand(9, len(rows), generator=generator)
        ranks = ranks_of(
            lambda images, captions, scores=scores: scores[images[:, 0].long()][:, captions[:, 0].long()],
            torch.arange(9.0)[:, None],
            torch.arange(float(len(rows)))[:, None],
            owner,
        )
        hits += (ranks.image_to_text <= 5).float().mean().item(), (ranks.text_to_image <= 5).float().mean().item()
    recalls = 100 * hits / rounds
    assert recalls[0] == pytest.approx(expected["image_to_text"][1], abs=2)
    assert recalls[1] == pytest.approx(expected["text_to_image"][1], abs=2)
    assert expected["text_to_image"] == pytest.approx((100 / 9, 500 / 9, 100))


def test_embeddings_of_no_images_are_on_the_device(monkeypatch):
    monkeypatch.setattr("torch.autocast", lambda *_, **__: nullcontext())  # The device "meta" does not support it.
    model = JointEmbedding(ModelConfig(("en",), 9, 8, embedding=6, words=2)).to("meta")
    embeddings = embed_images(model, np.zeros((0, 8), np.float32))
    assert (embeddings.shape, embeddings.device.type) == ((0, 6), "meta")
