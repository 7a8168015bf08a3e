"""Dropout with a state, attention in steps, and dual attention networks, against the equations and step by step."""

import numpy as np
import pytest
import torch

from tests.train.models.equations import batch_of, both_ways, drawn, parameters_of
from train.config.models import DanConfig
from train.models.catalogue import build_model
from train.models.dan import AttentionSteps, Dan, Dropout
from train.models.retrieval_model import Dimensions, Encoded, ImageBatch


def dropout(ratio: float, seed: int = 0) -> Dropout:
    torch.manual_seed(seed)
    return Dropout(ratio)


@pytest.mark.parametrize("ratio", [0.2, 0.5, 0.9])
def test_dropout_ratio_mean_and_gradient(ratio):
    ones = torch.ones(200, 1000, dtype=torch.float64, requires_grad=True)
    values = dropout(ratio)(ones)
    assert float((values == 0).double().mean()) == pytest.approx(ratio, abs=0.01)
    assert float(values.detach().mean()) == pytest.approx(1, rel=0.02)
    assert sorted(values.unique().tolist()) == pytest.approx([0, 1 / (1 - ratio)])
    values.sum().backward()
    assert torch.equal(ones.grad, values.detach())


def test_dropout_resumes_from_state():
    values, module, none = torch.randn(50, 50), dropout(0.5), dropout(0.0)
    module(values)
    state = {name: value.clone() for name, value in module.state_dict().items()}
    following = [module(values) for _ in range(3)]
    assert not torch.equal(following[0], following[1])
    other = dropout(0.5, seed=1)
    assert not torch.equal(other(values), following[0])
    other.load_state_dict(state)
    torch.rand(7)  # The generator of the process is of no account.
    assert other.eval()(values) is none(values) is values
    other.train()
    assert all(torch.equal(other(values), expected) for expected in following)
    assert not none.state_dict()
    with pytest.raises(RuntimeError, match=r"Missing key.*next_seed"):
        module.load_state_dict({})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*next_seed"):
        none.load_state_dict(state)


def steps_by_hand(items: np.ndarray, parameters: dict[str, np.ndarray], steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Return contexts ``[K + 1, E]`` and weights ``[K, M]`` of items ``[M, W]``, in loops over single items."""

    def context(number, pooled):
        name = f"maps.{number}.weight"
        return np.tanh(parameters[name] @ pooled) if name in parameters else pooled

    contexts = [context(0, sum(items) / len(items))]
    memory, weights = contexts[0], []
    for step in range(steps):
        of_item, of_memory, of_hidden = (
            parameters[f"{name}.{step}.weight"] for name in ("of_items", "of_memories", "of_hidden")
        )
        hidden = [np.tanh(of_item @ item) * np.tanh(of_memory @ memory) for item in items]
        exponentials = [np.exp((of_hidden @ each).item()) for each in hidden]
        weights.append(np.array(exponentials) / sum(exponentials))
        pooled = np.zeros(items.shape[1])
        for weight, item in zip(weights[-1], items, strict=True):
            pooled = pooled + weight * item
        contexts.append(context(step + 1, pooled))
        memory = memory + contexts[-1]
    return np.stack(contexts), np.stack(weights)


@pytest.mark.parametrize(("mapped", "masks"), [(True, 3 + 2), (False, 1 + 2)])
def test_attention_steps_dropout_in_training_only(mapped, masks):
    """Masks of the inputs of P_k, or of the words, and of h in each step."""
    config = DanConfig(embed_dim=5, attention_steps=2, attention_dim=6, dropout=0.5)
    module, items = AttentionSteps(5, config, mapped=mapped), Encoded(torch.randn(7, 6, 5))
    seed = int(module.dropout.next_seed)
    assert not torch.equal(module(items), module(items))
    assert int(module.dropout.next_seed) == seed + 2 * masks
    module.eval()
    assert torch.equal(module(items), module(items))


@pytest.fixture(params=[1, 2, 3], ids=lambda steps: f"{steps} steps")
def model(request) -> Dan:
    config = DanConfig(embed_dim=4, word_dim=3, attention_steps=request.param, attention_dim=5, dropout=0.0)
    model = build_model(config, Dimensions(("en", "de"), 9, (6, 8), {"de": (0, 1, 2, 3, 5, 7)}), seed=0).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    return model


def test_dan_image_embedding_equals_equations(model):
    features, steps = torch.randn(5, 6, 8, dtype=torch.float64), len(model.attention.of_items)
    encoded, weights = model.encode_images(ImageBatch(features)), model.attention.weights(Encoded(features))
    assert (encoded.mask, encoded.values.shape, model.heads) == (None, (5, model.width), 1)
    assert float((weights.max() - weights.min()).detach()) > 0.2  # It attends.
    for row, image in enumerate(features.numpy()):
        wanted, shares = steps_by_hand(image, parameters_of(model.attention), steps)
        np.testing.assert_allclose(encoded.values[row].detach(), wanted.ravel(), rtol=0, atol=1e-12)
        np.testing.assert_allclose(weights[row].detach(), shares, rtol=0, atol=1e-12)


@pytest.mark.parametrize("language", ["en", "de"])
def test_dan_caption_embedding_equals_equations(model, language):
    encoder, captions = model.sentences.of(language), drawn(np.random.default_rng(0), 8)
    encoded = model.encode_captions(batch_of(captions), language)
    table, parameters = encoder.words.weight.detach().numpy(), parameters_of(encoder.reader.lstm)
    for row, caption in enumerate(captions):
        # In German ids without a vector of their own are read as <unk>.
        rows = caption if language == "en" else [{0: 0, 1: 1, 2: 2, 3: 3, 5: 4, 7: 5}.get(token, 3) for token in caption]
        words = sum(both_ways(table[rows], parameters))  # The sum of both directions.
        wanted, _ = steps_by_hand(words, parameters_of(encoder.pooling), len(encoder.pooling.of_items))
        np.testing.assert_allclose(encoded.values[row].detach(), wanted.ravel(), rtol=0, atol=1e-12)


def test_dan_score_is_sum_over_steps(model):
    images = model.encode_images(ImageBatch(torch.randn(5, 6, 8, dtype=torch.float64)))
    captions = model.encode_captions(batch_of(drawn(np.random.default_rng(1), 3)), "en")
    a, b = (encoded.values.detach().numpy().reshape(len(encoded), -1, 4) for encoded in (images, captions))
    wanted = [[sum(x @ y for x, y in zip(image, caption, strict=True)) for caption in b] for image in a]
    np.testing.assert_allclose(model.scores(images, captions).detach(), wanted, rtol=0, atol=1e-12)
    assert (model.similarity, model.vectors) == ("inner-product", True)


def test_dan_attention_weights_reproduce_embeddings(model):
    features = torch.randn(1, 6, 8, dtype=torch.float64)
    images = ImageBatch(features, torch.tensor([[True, True, False, True, True, False]]))
    captions = batch_of([[1, 5, 4, 6, 2]])
    found = model.attention_weights(images, captions, "de")
    steps = len(model.attention.of_items)
    assert (found.regions.shape, found.words.shape, found.pairs) == ((steps, 4), (steps, 5), None)
    for weights in (found.regions, found.words):
        np.testing.assert_allclose(weights.detach().sum(1), 1, atol=1e-12)
        assert float(weights.detach().max() - weights.detach().min()) > 0.01
    words = 2 * model.sentences[1].states(captions).values[0]
    contexts = model.encode_captions(captions, "de").values[0].view(steps + 1, 4)
    torch.testing.assert_close(contexts, torch.cat([words.mean(0, keepdim=True), found.words @ words]), rtol=0, atol=1e-12)
    contexts = model.encode_images(images).values[0].view(steps + 1, 4)
    pooled = found.regions @ features[0][images.mask[0]]
    for step in range(steps):
        torch.testing.assert_close(
            contexts[step + 1], (model.attention.maps[step + 1].weight @ pooled[step]).tanh(), rtol=0, atol=1e-12
        )
