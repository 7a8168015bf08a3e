"""Multi-head attention and its kind of model against the equations."""

import numpy as np
import pytest
import torch

from tests.train.models.equations import attended, batch_of, both_ways, drawn, parameters_of
from train.config.models import MhaDConfig
from train.models.catalogue import build_model
from train.models.mha_d import MhaD, MultiHeadAttention
from train.models.retrieval_model import Dimensions, Encoded, ImageBatch


def test_initial_attention_is_near_uniform_with_different_heads():
    torch.manual_seed(0)
    attention = MultiHeadAttention(MhaDConfig())
    assert 0.099 < attention.contexts.abs().max() <= 0.1
    bound = (6 / 1024) ** 0.5
    for matrices in (attention.of_contexts, attention.of_items):
        assert 0.99 * bound < matrices.abs().max() <= bound
    weights = attention.weights(Encoded(torch.randn(9, 36, 512)))
    assert weights.max() < 0.5
    assert (weights[:, 0] - weights[:, 1]).abs().max() > 0.01


DIMENSIONS = Dimensions(("en", "de", "fr"), 9, (6, 8), {"de": (0, 1, 2, 3, 5, 7)})


@pytest.fixture(params=[1, 3], ids=lambda heads: f"{heads} heads")
def model(request) -> MhaD:
    config = MhaDConfig(embed_dim=4, word_dim=3, num_heads=request.param, attention_dim=5, context_dim=6)
    model = build_model(config, DIMENSIONS, seed=0).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "contexts" in name or "words" in name:
                parameter.mul_(10)
    return model


def heads_of(items: np.ndarray, attention: torch.nn.Module) -> np.ndarray:
    values = parameters_of(attention)
    return attended(items, values["contexts"], values["of_contexts"], values["of_items"])


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.sqrt((vector**2).sum())


def test_image_embedding_equals_equations(model):
    features = torch.randn(5, 6, 8, dtype=torch.float64)
    encoded = model.encode_images(ImageBatch(features))
    assert (encoded.mask, encoded.values.shape, model.width) == (None, (5, model.width), 4 * model.heads)
    weight, bias = (parameter.detach().numpy() for parameter in model.regions.parameters())
    for row, image in enumerate(features.numpy()):
        regions = np.stack([weight @ region + bias for region in image])
        wanted = unit(heads_of(regions, model.attention).ravel())
        np.testing.assert_allclose(encoded.values[row].detach(), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("language", ["en", "de"])
def test_caption_embedding_equals_equations(model, language):
    encoder = model.sentences[model.languages.index(language)]
    captions = drawn(np.random.default_rng(0), 8)
    encoded = model.encode_captions(batch_of(captions), language)
    table, parameters = encoder.words.weight.detach().numpy(), parameters_of(encoder.reader.lstm)
    for row, caption in enumerate(captions):
        # In German ids without a vector of their own are read as <unk>.
        rows = caption if language == "en" else [{0: 0, 1: 1, 2: 2, 3: 3, 5: 4, 7: 5}.get(token, 3) for token in caption]
        words = sum(both_ways(table[rows], parameters)) / 2
        wanted = unit(heads_of(words, encoder.pooling).ravel())
        np.testing.assert_allclose(encoded.values[row].detach(), wanted, rtol=0, atol=1e-12)


def test_attention_weights_reproduce_embeddings(model):
    features = torch.randn(1, 6, 8, dtype=torch.float64)
    images = ImageBatch(features, torch.tensor([[True, True, False, True, True, False]]))
    captions = batch_of([[1, 5, 4, 6, 2]])
    found = model.attention_weights(images, captions, "de")
    assert (found.regions.shape, found.words.shape, found.pairs) == ((model.heads, 4), (model.heads, 5), None)
    regions = (model.regions(features[0])[images.mask[0]]).detach().numpy()
    states = model.sentences[1].states(captions).values[0].detach().numpy()
    for weights, items, encoded in (
        (found.regions, regions, model.encode_images(images)),
        (found.words, states, model.encode_captions(captions, "de")),
    ):
        np.testing.assert_allclose(weights.detach().sum(1), 1, atol=1e-12)
        assert float(weights.detach().max() - weights.detach().min()) > 0.01
        wanted = unit((weights.detach().numpy() @ items).ravel())
        np.testing.assert_allclose(encoded.values[0].detach(), wanted, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="language is 'it'"):
        model.attention_weights(images, captions, "it")
