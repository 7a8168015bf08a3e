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
    found = embed_all(model, data, batch_size=batch_size)
    captions = data.captions
    assert sorted(np.concatenate(list(found.rows.values())).tolist()) == list(range(len(captions)))
    with torch.no_grad():
        for language, rows in found.rows.items():
            assert captions.language_names[captions.languages[rows[0]]] == language
            for row, embedding in zip(rows, found.captions[language], strict=True):
                alone = pack(captions.token_ids, captions.offsets, np.array([row]))
                torch.testing.assert_close(embedding, model.embed_captions(alone, language)[0], atol=1e-6, rtol=1e-5)
        expected = model.embed_images(torch.from_numpy(data.features.array))
    torch.testing.assert_close(found.images, expected, atol=1e-6, rtol=1e-5)
    assert not found.images.requires_grad


def test_each_language_is_scored_by_itself(model, data):
    found = evaluate(model, data)
    embeddings = embed_all(model, data)
    assert list(found) == list(data.captions.language_names)
    for language, result in found.items():
        owner = torch.from_numpy(data.captions.images[embeddings.rows[language]]).long()
        ranks = ranks_of(model.similarity, embeddings.images, embeddings.captions[language], owner)
        assert result.text_to_image.recall_at_1 == pytest.approx(100 * np.mean(ranks.text_to_image.numpy() == 1))
        assert result.text_to_image.queries == len(owner)
        assert result.image_to_text.queries == 9
        assert result.image_to_text.recall_at_5 == pytest.approx(100 * np.mean(ranks.image_to_text.numpy() <= 5))


def test_images_without_a_caption_of_the_language_take_no_part(model, data):
    captions = data.captions
    english = captions.language_names.index("en")
    # Of German and French all images, of English three.
    few = captions.select((captions.languages != english) | (captions.images < 3))
    found = evaluate(model, replace(data, captions=few))["en"]
    assert found.image_to_text.queries == 3
    assert found.text_to_image.queries == 12
    assert found.text_to_image.recall_at_5 == 100  # Three candidates only.


def test_a_language_without_captions_is_left_out(model, data):
    captions = data.captions
    german = captions.select(captions.languages == captions.language_names.index("de"))
    assert list(evaluate(model, replace(data, captions=german))) == ["de"]


def test_the_model_is_left_as_it_was(model, data):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for training in (True, False):
        model.train(training)
        evaluate(model, data)
        assert model.training is training
        assert torch.is_grad_enabled()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_recalls_of_all_languages_are_added_up(model, data):
    found = evaluate(model, data)
    assert all(isinstance(result, Retrieval) for result in found.values())
    assert sum_of_recalls(found) == pytest.approx(sum(result.sum_of_recalls for result in found.values()))


def test_chance_is_what_random_scores_reach(data):
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
            lambda images, found, scores=scores: scores[images[:, 0].long()][:, found[:, 0].long()],
            torch.arange(9.0)[:, None],
            torch.arange(float(len(rows)))[:, None],
            owner,
        )
        hits += (ranks.image_to_text <= 5).float().mean().item(), (ranks.text_to_image <= 5).float().mean().item()
    found = 100 * hits / rounds
    assert found[0] == pytest.approx(expected["image_to_text"][1], abs=2)
    assert found[1] == pytest.approx(expected["text_to_image"][1], abs=2)
    assert expected["text_to_image"] == pytest.approx((100 / 9, 500 / 9, 100))


def test_no_images_are_no_images_of_the_device(monkeypatch):
    monkeypatch.setattr("torch.autocast", lambda *_, **__: nullcontext())  # Which the device "meta" does not have.
    model = JointEmbedding(ModelConfig(("en",), 9, 8, embedding=6, words=2)).to("meta")
    found = embed_images(model, np.zeros((0, 8), np.float32))
    assert (found.shape, found.device.type) == ((0, 6), "meta")
