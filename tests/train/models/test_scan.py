"""SCAN as a model: its vectors, its scores in both directions, precisions, languages, and whole trainings."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.train.trainings import assert_equal
from train.config.models import ScanConfig
from train.data.batches import CaptionBatch
from train.evaluation import evaluating
from train.models.catalogue import build_model
from train.models.cross_attention import CrossAttention, cross_attention
from train.models.dimensions import Dimensions
from train.models.retrieval_model import Encoded, ImageBatch
from train.models.scan import Scan
from train.objectives.ranking import ranking_loss

CAPTIONS = [[1, 4, 2], [1, 4, 5, 6, 2], [1, 2], [1, 7, 2]]


def build(*, languages=("en", "de"), feature_shape=(3, 7), **choices) -> Scan:
    model = build_model(ScanConfig(**{"embed_dim": 6, "word_dim": 5} | choices), Dimensions(languages, 9, feature_shape), 0)
    assert isinstance(model, Scan)
    return model


def batch(rows=range(4)) -> CaptionBatch:
    return CaptionBatch(np.concatenate(CAPTIONS), np.cumsum([0, *map(len, CAPTIONS)]), np.array(rows, dtype=np.int64))


@pytest.fixture
def images() -> ImageBatch:
    """Four images, some of whose regions are not there."""
    torch.manual_seed(1)
    return ImageBatch(torch.randn(4, 3, 7), torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1]]).bool())


def test_regions_and_words_are_unit_vectors(images):
    model = build()
    regions, words = model.encode_images(images), model.encode_captions(batch(), "de")
    assert (regions.values.shape, words.values.shape) == ((4, 3, 6), (4, 5, 6))
    assert torch.equal(regions.mask, images.mask)
    assert words.mask.sum(1).tolist() == [3, 5, 2, 3]
    for encoded in (regions, words):
        lengths = encoded.values.norm(dim=2)[encoded.mask]
        torch.testing.assert_close(lengths, torch.ones_like(lengths))
    mapped = images.features @ model.images.weight.T + model.images.bias
    torch.testing.assert_close(regions.values[0], torch.nn.functional.normalize(mapped[0], dim=1))
    assert not model.vectors


@pytest.mark.parametrize("attention", ["t2i", "i2t"])
@pytest.mark.parametrize("pooling", ["lse", "avg"])
def test_either_attends_to_the_other(attention, pooling, images):
    model = build(attention=attention, pooling=pooling, lambda_softmax=7.0, lambda_lse=3.0, negative_slope=0.2)
    regions, words = model.encode_images(images), model.encode_captions(batch([1, 2, 0]), "en")
    scores = model.scores(regions, words)
    choices = CrossAttention(7.0, 3.0 if pooling == "lse" else None, 0.2)
    expected = cross_attention(words, regions, choices).T if attention == "t2i" else cross_attention(regions, words, choices)
    assert torch.equal(scores, expected)
    assert scores.shape == (4, 3)
    assert model.similarity == f"{attention}-{pooling}"


def test_evaluation_copies_a_part_of_the_captions_at_a_time(images, monkeypatch):
    model = build()
    regions, words = model.encode_images(images), model.encode_captions(batch(), "en")
    expected, seen = model.scores(regions, words)[1:, [2, 0, 3]], []
    monkeypatch.setattr(evaluating, "_COPIED_AT_ONCE", 2)
    monkeypatch.setattr(model, "scores", lambda a, b, whole=model.scores: seen.append(len(b)) or whole(a, b))
    scores = evaluating.scores_between(model, regions, words)
    torch.testing.assert_close(scores(slice(1, 4), torch.tensor([2, 0, 3])), expected)
    assert seen == [2, 1]
    assert scores(slice(0, 4), torch.zeros(0, dtype=torch.int64)).shape == (4, 0)


@pytest.mark.parametrize("attention", ["t2i", "i2t"])
def test_scores_and_their_gradients_are_float32_under_autocast(attention, images):
    """With vectors of its own width, the products of the backward pass are not rounded either."""
    model = build(attention=attention)
    regions, words = model.encode_images(images), model.encode_captions(batch(), "en")
    results = []
    for enabled in (False, True):
        values = [encoded.values.detach().requires_grad_() for encoded in (regions, words)]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            scores = model.scores(*(Encoded(v, each.mask) for v, each in zip(values, (regions, words), strict=True)))
            ranking_loss(scores, torch.arange(4), torch.arange(4), margin=0.2, hinges="max").backward()
        results.append((scores.detach(), *(value.grad for value in values)))
    assert_equal(*results)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = model.scores(model.encode_images(images), model.encode_captions(batch(), "en"))
        rounded.sum().backward()
    assert rounded.dtype == torch.float32
    assert 0 < (rounded - results[0][0]).abs().max() < 0.05
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("attention", ["t2i", "i2t"])
def test_attention_weights_make_the_score(attention):
    """The mean cosine of what attends with what it attends to, under the weights that are shown, is the score of the pair."""
    model = build(attention=attention, pooling="avg", lambda_softmax=7.0, negative_slope=0.2)
    torch.manual_seed(1)
    images = ImageBatch(torch.randn(1, 3, 7), torch.tensor([[True, False, True]]))
    regions, words = model.encode_images(images), model.encode_captions(batch([1]), "de")
    pairs = model.attention_weights(images, batch([1]), "de").pairs.detach()
    assert pairs.shape == (5, 2)  # Words, and the regions that are there.
    attended, others = words.values[0].detach(), regions.values[0][images.mask[0]].detach()
    if attention == "i2t":
        pairs, attended, others = pairs.T, others, attended
    torch.testing.assert_close(pairs.sum(1), torch.ones(len(pairs)))
    assert float(pairs.max() - pairs.min()) > 0.01
    score = torch.nn.functional.cosine_similarity(attended, pairs @ others).mean()
    torch.testing.assert_close(score, model.scores(regions, words)[0, 0].detach())
