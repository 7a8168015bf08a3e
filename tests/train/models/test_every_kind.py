"""The contract of every kind of model: masks, gradients, precisions and languages."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from tests.train.models.equations import batch_of, drawn, gradcheck_model
from train.config.models import DanConfig, MhaDConfig, MlmmeConfig, ScanConfig, VseConfig, model_kinds
from train.models.catalogue import build_model
from train.models.retrieval_model import Dimensions, ImageBatch, RetrievalModel

SIZES = {"embed_dim": 4, "word_dim": 3}
CONFIGS = {
    "vse": VseConfig(**SIZES, shared_encoder=False),
    "vse-order": VseConfig(**SIZES, shared_encoder=False, similarity="order", text_encoder="bilstm", pooling="max"),
    "vse-mean": VseConfig(**SIZES, shared_encoder=False, text_encoder="bigru", pooling="mean"),
    "scan-t2i": ScanConfig(**SIZES, shared_encoder=False, attention="t2i"),
    "scan-i2t": ScanConfig(**SIZES, shared_encoder=False, attention="i2t"),
    "mha-d": MhaDConfig(**SIZES, num_heads=3, attention_dim=5, context_dim=6),
    "dan": DanConfig(**SIZES, attention_steps=2, attention_dim=5, dropout=0.5),
    "mlmme": MlmmeConfig(**SIZES, hidden_size=5, scoring="dot"),
    "mlmme-general": MlmmeConfig(**SIZES, hidden_size=5, scoring="general"),
}
SEVERAL = ("scan", "mha-d", "dan")
LANGUAGES = ("en", "de")
every_kind = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def build(config, **changes) -> RetrievalModel:
    """Build a model in evaluation mode, whose scores differ from pair to pair."""
    shape = (6, 8) if config.kind in SEVERAL else (8,)
    model = build_model(config, replace(Dimensions(LANGUAGES, 9, shape, {"de": (0, 1, 2, 3, 5, 7)}), **changes), seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(10 if "contexts" in name or "words" in name else 1)
    return model.eval()


def images_of(config, count: int, dtype=torch.float32, width: int = 8) -> ImageBatch:
    """Draw images, of which those of several features have one to six."""
    if config.kind not in SEVERAL:
        return ImageBatch(torch.randn(count, width, dtype=dtype))
    return ImageBatch(torch.randn(count, 6, width, dtype=dtype), torch.arange(6) < torch.tensor([[6], [2], [4], [1]])[:count])


def test_configs_cover_the_catalogue():
    assert {config.kind for config in CONFIGS.values()} == set(model_kinds()) - {"toy-regions"}


@every_kind
@pytest.mark.parametrize("seed", range(10))
def test_padding_and_order_change_nothing(config, seed):
    rng, model, mask = np.random.default_rng(seed), build(config).double(), None
    features = torch.from_numpy(rng.standard_normal((7, 6, 8) if config.kind in SEVERAL else (7, 8)))
    if config.kind in SEVERAL:
        mask = torch.from_numpy(rng.random((7, 6)) < rng.choice([0.3, 0.8]))
        mask[:, 0] |= config.kind == "scan"
        features[~mask] = torch.tensor(rng.choice([np.nan, np.inf, 1e6, 0.5], (int((~mask).sum()), 8)))
    captions = drawn(rng, 7)
    features.requires_grad_()
    images, sentences = model.encode_images(ImageBatch(features, mask)), model.encode_captions(batch_of(captions), "de")
    scores = model.scores(images, sentences)
    assert_close = partial(torch.testing.assert_close, rtol=0, atol=1e-6 if config.kind in ("vse", "scan") else 1e-12)
    for row in range(7):
        only = features[row : row + 1] if mask is None else features[row][mask[row]][None]
        image = model.encode_images(ImageBatch(only)) if only.numel() else None
        sentence = model.encode_captions(batch_of([captions[row]]), "de")
        for encoded, whole in ((image, images), (sentence, sentences)):
            if model.vectors:
                values = whole.values[row]
                assert_close(values, torch.zeros_like(values) if encoded is None else encoded.values[0])
        if image is not None:
            assert_close(model.scores(image, sentences)[0], scores[row])
        assert_close(model.scores(images, sentence)[:, 0], scores[:, row])
    order = rng.permutation(7)
    other = model.scores(images, model.encode_captions(batch_of(captions, order), "de"))
    assert_close(other, scores[:, order])
    scores.sum().backward()
    assert all(values.grad is None or values.grad.isfinite().all() for values in (features, *model.parameters()))
    assert mask is None or not features.grad[~mask].any()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mha-d", "dan", "mlmme", "mlmme-general"])  # The others compute their scores in float32.
def test_gradients_equal_finite_differences(name):
    config = replace(CONFIGS[name], embed_dim=2, word_dim=2)
    shape = (6, 3) if config.kind in SEVERAL else (3,)
    model = build(config, vocabulary_size=6, language_ids={}, feature_shape=shape).double()
    images = images_of(config, 3, torch.float64, width=3)
    captions = batch_of([[1, 4, 2], [1, 4, 5, 2], [1, 3, 2]])

    def scores() -> torch.Tensor:
        pictures, english = model.encode_images(images), model.encode_captions(captions, "en")
        if config.kind != "mlmme":
            return model.scores(pictures, english)
        german = model.encode_captions(captions, "de")
        pairs = ((pictures, english), (pictures, german), (english, german))
        return torch.cat([model.scores(*pair).flatten() for pair in pairs])

    assert gradcheck_model(model, scores)


@every_kind
def test_scores_are_float32_under_autocast(config):
    model, images = build(config), images_of(config, 4)
    captions = batch_of(drawn(np.random.default_rng(0), 4))
    exact = model.scores(model.encode_images(images), model.encode_captions(captions, "en"))
    with torch.autocast("cpu", torch.bfloat16):
        encoded = model.encode_images(images), model.encode_captions(captions, "en")
        rounded = model.scores(*encoded)
        rounded.sum().backward()
    assert {rounded.dtype, *(each.values.dtype for each in encoded)} == {torch.float32}
    assert torch.equal(rounded, model.scores(*encoded))
    assert 0 < (rounded - exact).abs().max() < (0.05 if config.kind == "scan" else 0.02) * max(1, exact.abs().max())
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in model.parameters())


@every_kind
def test_languages_have_separate_encoders(config):
    model, captions = build(config, language_ids={}), batch_of([[1, 4, 2]])
    assert model.modules_by_language() == {"sentences.0": ("en",), "sentences.1": ("de",)}
    english, german = (model.encode_captions(captions, language).values for language in LANGUAGES)
    assert not torch.equal(english, german)
    german.sum().backward()
    moved = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert {name for name in moved if not name.startswith(("projection", "mappings"))} == {
        name for name, _ in model.named_parameters() if name.startswith("sentences.1.")
    }
    assert config.kind == "mlmme" or all(name.startswith("sentences") for name in moved)


@pytest.mark.parametrize("kind", ["vse", "scan-t2i"])
def test_shared_encoder_serves_all_languages(kind):
    model = build(replace(CONFIGS[kind], shared_encoder=True))
    assert model.modules_by_language() == {"sentences.0": ("en", "de")}
    english, german = (model.encode_captions(batch_of([[1, 4, 2]]), language).values for language in LANGUAGES)
    assert torch.equal(english, german)
