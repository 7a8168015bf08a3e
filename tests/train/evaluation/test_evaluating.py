from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.pretended_gpu import pretended_gpu
from train.config.models import VseConfig
from train.data.batches import CaptionBatch
from train.data.splits import open_data
from train.devices import computing
from train.evaluation.evaluating import chance, encode_captions, encode_images, evaluate, evaluate_together, sum_of_recalls
from train.evaluation.metrics import Retrieval, ranks_of
from train.models.retrieval_model import Dimensions, ImageBatch
from train.models.vse import JointEmbedding
from train.runs.run import open_run


@pytest.fixture
def model(write_run):
    return open_run(write_run(languages=("en", "de", "fr"))).model


@pytest.fixture
def data(toy):
    return open_data(toy.captions, toy.features, split="test")


def rows_of(data, language):
    captions = data.captions
    return CaptionBatch(captions.token_ids, captions.offsets, captions.rows_of(language))


@pytest.mark.parametrize("batch_size", [1, 4, 512])
def test_embeddings_are_those_of_each_caption_alone(model, data, batch_size):
    captions = data.captions
    for language in captions.language_names:
        batch = rows_of(data, language)
        together = encode_captions(model, batch, language, batch_size=batch_size).values
        assert len(together) == len(batch) > 0
        assert not together.requires_grad
        with torch.no_grad():
            for row, embedding in zip(batch.rows, together, strict=True):
                alone = replace(batch, rows=np.array([row]))
                expected = model.encode_captions(alone, language).values[0]
                torch.testing.assert_close(embedding, expected, atol=1e-6, rtol=1e-5)
    images = encode_images(model, data.features.array, batch_size=batch_size).values
    with torch.no_grad():
        expected = model.encode_images(ImageBatch(torch.from_numpy(data.features.array))).values
    torch.testing.assert_close(images, expected, atol=1e-6, rtol=1e-5)
    assert not images.requires_grad


def test_each_language_is_scored_by_itself(model, data):
    results = evaluate(model, data)
    images = encode_images(model, data.features.array)
    assert list(results) == list(data.captions.language_names)
    for language, result in results.items():
        batch = rows_of(data, language)
        owner = torch.from_numpy(data.captions.images[batch.rows]).long()
        scores = model.scores(images, encode_captions(model, batch, language))
        ranks = ranks_of(lambda rows, columns, scores=scores: scores[rows][:, columns], 9, owner)
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
        ranks = ranks_of(lambda rows, columns, scores=scores: scores[rows][:, columns], 9, owner)
        hits += (ranks.image_to_text <= 5).float().mean().item(), (ranks.text_to_image <= 5).float().mean().item()
    recalls = 100 * hits / rounds
    assert recalls[0] == pytest.approx(expected["image_to_text"][1], abs=2)
    assert recalls[1] == pytest.approx(expected["text_to_image"][1], abs=2)
    assert expected["text_to_image"] == pytest.approx((100 / 9, 500 / 9, 100))


def test_embeddings_of_no_images_are_on_the_device(monkeypatch):
    monkeypatch.setattr("torch.autocast", lambda *_, **__: nullcontext())  # The device "meta" does not support it.
    model = JointEmbedding(VseConfig(embed_dim=6, word_dim=2), Dimensions(("en",), 9, (8,))).to("meta")
    embeddings = encode_images(model, np.zeros((0, 8), np.float32)).values
    assert (embeddings.shape, embeddings.device.type) == ((0, 6), "meta")


def test_an_ensemble_ranks_by_the_mean_of_its_members_scores(write_run, data):
    models = [open_run(write_run(f"run-{seed}", languages=("en", "de", "fr"), seed=seed)).model for seed in range(3)]
    results = evaluate_together([(model, data) for model in models])
    for language, result in results.items():
        batch = rows_of(data, language)
        every = [
            model.scores(encode_images(model, data.features.array), encode_captions(model, batch, language)) for model in models
        ]
        mean = sum(every) / 3
        owner = torch.from_numpy(data.captions.images[batch.rows]).long()
        ranks = ranks_of(lambda rows, columns, mean=mean: mean[rows][:, columns], 9, owner)
        assert result.text_to_image.recall_at_1 == pytest.approx(100 * np.mean(ranks.text_to_image.numpy() == 1))
        assert result.image_to_text.recall_at_5 == pytest.approx(100 * np.mean(ranks.image_to_text.numpy() <= 5))
    assert results != evaluate(models[0], data)
    assert evaluate_together([(models[0], data)]) == evaluate(models[0], data)


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", None])
def test_a_gpu_evaluates_in_float32_whatever_it_trains_in(model, data, precision):
    """Without a training, too: by default torch lets cuDNN's recurrent networks round to TF32."""
    seen = []

    def look(*_):
        cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
        found = {owner.fp32_precision for owner in (cudnn.conv, cudnn.rnn, matmul)}
        seen.append((found, torch.is_autocast_enabled("cuda"), gpu.device))

    with pretended_gpu() as gpu:
        model = model.to("cuda:0")
        for module in model.modules():
            module.register_forward_pre_hook(look)
        scores = model.scores
        model.scores = lambda *args: (look(), scores(*args))[1]
        before = torch.backends.cudnn.rnn.fp32_precision
        with nullcontext() if precision is None else computing(precision, model.device):
            found = evaluate(model, data)
        assert torch.backends.cudnn.rnn.fp32_precision == before
    assert seen
    assert all(each == ({"ieee"}, False, 0) for each in seen)
    assert list(found) == list(data.captions.language_names)
