"""SCAN as a model: its vectors, its scores in both directions, precisions, languages, and whole trainings."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from schemas.errors import UsageError
from tests.train.trainings import assert_equal, weights
from train.config.models import ScanConfig
from train.data.batches import CaptionBatch
from train.evaluation import embed_run, evaluate_run, evaluating, search
from train.jobs import EvaluateJob, SearchJob
from train.models.catalogue import build_model
from train.models.cross_attention import CrossAttention, cross_attention
from train.models.dimensions import Dimensions
from train.models.retrieval_model import Encoded, ImageBatch
from train.models.scan import Scan
from train.objectives.ranking import ranking_loss
from train.runs import open_run

CAPTIONS = [[1, 4, 2], [1, 4, 5, 6, 2], [1, 2], [1, 7, 2]]

TOY = """
[data]
portions = { en = ["comparable"], de = ["comparable"] }
[model]
kind = "scan"
embed_dim = 16
word_dim = 8
attention = "t2i"
pooling = "lse"
[loss]
hinges = "max"
[optimizer]
learning_rate = 0.01
[schedule]
batch_size = 9
eval_every_steps = 17
patience = 0
max_steps = 44
"""


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


def test_absent_regions_change_nothing(images):
    model = build()
    words = model.encode_captions(batch(), "en")
    expected = model.scores(model.encode_images(images), words)
    filled = images.features.masked_fill(~images.mask[..., None], torch.nan)
    torch.testing.assert_close(model.scores(model.encode_images(ImageBatch(filled, images.mask)), words), expected)
    alone = model.scores(model.encode_images(ImageBatch(images.features[1:2, :1])), words)
    torch.testing.assert_close(alone[0], expected[1])


def test_captions_come_in_the_order_of_the_request(images):
    model = build()
    regions = model.encode_images(images)
    together, other = (model.scores(regions, model.encode_captions(batch(rows), "en")) for rows in (range(4), [3, 1, 0, 2]))
    torch.testing.assert_close(other, together[:, [3, 1, 0, 2]])


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


def test_one_reader_for_all_languages_or_one_each():
    shared, own = build(), build(shared_encoder=False)
    assert shared.modules_by_language() == {"sentences.0": ("en", "de")}
    assert own.modules_by_language() == {"sentences.0": ("en",), "sentences.1": ("de",)}
    assert torch.equal(shared.encode_captions(batch(), "en").values, shared.encode_captions(batch(), "de").values)
    assert not torch.equal(own.encode_captions(batch(), "en").values, own.encode_captions(batch(), "de").values)
    with pytest.raises(ValueError, match="language is 'fr', expected one of"):
        own.encode_captions(batch(), "fr")


def test_one_feature_of_an_image_is_refused():
    with pytest.raises(UsageError, match=r"the shape \[2048\], but a model of the kind 'scan' attends to several features"):
        build(feature_shape=(2048,))


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


@pytest.mark.slow
def test_a_compiled_loss_is_that_of_the_plain_one(images):
    model = build()

    def loss(features: torch.Tensor) -> torch.Tensor:
        scores = model.scores(model.encode_images(ImageBatch(features, images.mask)), model.encode_captions(batch(), "en"))
        return ranking_loss(scores, torch.arange(4), torch.arange(4), margin=0.2, hinges="max")

    gradients = []
    for function in (loss, torch.compile(loss, backend="eager")):
        model.zero_grad()
        function(images.features).backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    torch.testing.assert_close(*gradients)


# --- trainings -------------------------------------------------------------------------------------------------------


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.parametrize("attention", ["t2i", "i2t"])
def test_it_learns_and_is_resumed_bit_for_bit(attention, train_toy, four_languages_regions, tmp_path):
    text = TOY.replace("t2i", attention)
    fields = {"corpus": four_languages_regions}
    train_toy(text, "whole", **fields)
    train_toy(text.replace("44", "20"), "parts", **fields)
    train_toy(text, "parts", resume=True, **fields)
    assert_equal(weights(tmp_path / "whole"), weights(tmp_path / "parts"))
    untrained = train_toy(text.replace("0.01", "1e-9"), "untrained", **fields)

    def sum_of_recalls(*runs: str) -> float:
        job = EvaluateJob(runs, four_languages_regions.captions, four_languages_regions.features, splits=("train",))
        return sum(score.retrieval.sum_of_recalls for score in evaluate_run(job))

    whole = str(tmp_path / "whole")
    assert sum_of_recalls(whole) > sum_of_recalls(untrained.folder) + 60  # Of 600; it is some 80 here.
    assert sum_of_recalls(whole, untrained.folder) != sum_of_recalls(whole)
    for use in (
        lambda: embed_run(open_run(whole), str(tmp_path / "embedded"), name="run", features=four_languages_regions.features),
        lambda: search(SearchJob(whole, "a", "en", four_languages_regions.features, tokenized=True)),
    ):
        with pytest.raises(UsageError, match=r"a model of the kind 'scan', .* imagepivot evaluate scores it"):
            use()


@pytest.mark.slow
def test_it_trains_in_bfloat16(train_toy, four_languages_regions, tmp_path):
    train_toy(TOY, "plain", corpus=four_languages_regions)
    result = train_toy(TOY, "rounded", corpus=four_languages_regions, precision="bf16")
    assert result.progress.step == 44
    assert all(value.isfinite().all() for value in weights(tmp_path / "rounded").values())


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
