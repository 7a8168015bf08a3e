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
def test_dropout_ratio_and_mean(ratio):
    values = dropout(ratio)(torch.ones(200, 1000, dtype=torch.float64))
    assert float((values == 0).double().mean()) == pytest.approx(ratio, abs=0.01)
    assert float(values.mean()) == pytest.approx(1, rel=0.02)
    assert sorted(values.unique().tolist()) == pytest.approx([0, 1 / (1 - ratio)])


def test_dropout_gradient():
    values = torch.ones(100, requires_grad=True)
    dropped = dropout(0.5)(values)
    dropped.sum().backward()
    assert torch.equal(values.grad, dropped.detach())


def test_dropout_resumes_from_state():
    values, module = torch.randn(50, 50), dropout(0.5)
    module(values)
    state = {name: value.clone() for name, value in module.state_dict().items()}
    following = [module(values) for _ in range(3)]
    assert not torch.equal(following[0], following[1])
    other = dropout(0.5, seed=1)
    assert not torch.equal(other(values), following[0])
    other.load_state_dict(state)
    torch.rand(7)  # The generator of the process is of no account.
    assert all(torch.equal(other(values), expected) for expected in following)


def test_dropout_in_evaluation_mode_or_without_ratio():
    values, module, none = torch.randn(50), dropout(0.5).eval(), dropout(0.0)
    before = module.state_dict()["next_seed"].clone()
    assert module(values) is values
    assert torch.equal(module.state_dict()["next_seed"], before)
    assert none(values) is values
    assert not none.state_dict()


def test_dropout_wrong_state_keys_are_refused():
    module, none = dropout(0.5), dropout(0.0)
    with pytest.raises(RuntimeError, match=r"Missing key.*next_seed"):
        module.load_state_dict({})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*next_seed"):
        none.load_state_dict(module.state_dict())


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


def attention(*, mapped: bool, steps: int = 2, width: int = 5, dropout: float = 0.0, spread: float = 3.0) -> AttentionSteps:
    torch.manual_seed(0)
    config = DanConfig(embed_dim=4 if mapped else width, attention_steps=steps, attention_dim=6, dropout=dropout)
    module = AttentionSteps(width, config, mapped=mapped).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(spread)
    return module


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("mapped", [True, False])
def test_attention_steps_equal_equations(mapped, steps):
    module, items = attention(mapped=mapped, steps=steps), torch.randn(7, 6, 5, dtype=torch.float64)
    contexts, weights = module(Encoded(items)), module.weights(Encoded(items))
    assert weights.shape == (7, steps, 6)
    assert float((weights.max() - weights.min()).detach()) > 0.2  # It attends.
    for row, image in enumerate(items.numpy()):
        wanted, shares = steps_by_hand(image, parameters_of(module), steps)
        np.testing.assert_allclose(contexts[row].detach(), wanted.ravel(), rtol=0, atol=1e-12)
        np.testing.assert_allclose(weights[row].detach(), shares, rtol=0, atol=1e-12)


def test_attention_steps_dropout_in_training_only():
    module, items = attention(mapped=True, dropout=0.5), Encoded(torch.randn(7, 6, 5, dtype=torch.float64))
    first, second = module(items), module(items)
    assert not torch.equal(first, second)
    module.eval()
    assert torch.equal(module(items), module(items))
    assert torch.equal(module(items), attention(mapped=True)(items))


CONFIG = DanConfig(embed_dim=4, word_dim=3, attention_steps=2, attention_dim=5, dropout=0.0)
DIMENSIONS = Dimensions(("en", "de"), 9, (6, 8), {"de": (0, 1, 2, 3, 5, 7)})


@pytest.fixture
def model() -> Dan:
    model = build_model(CONFIG, DIMENSIONS, seed=0).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    return model


def test_dan_image_embedding_equals_equations(model):
    features = torch.randn(5, 6, 8, dtype=torch.float64)
    encoded = model.encode_images(ImageBatch(features))
    assert (encoded.mask, encoded.values.shape, model.width, model.heads) == (None, (5, 12), 12, 1)
    for row, image in enumerate(features.numpy()):
        wanted, _ = steps_by_hand(image, parameters_of(model.attention), 2)
        np.testing.assert_allclose(encoded.values[row].detach(), wanted.ravel(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("language", ["en", "de"])
def test_dan_caption_embedding_equals_equations(model, language):
    encoder, captions = model.sentences.of(language), drawn(np.random.default_rng(0), 8)
    encoded = model.encode_captions(batch_of(captions), language)
    table, parameters = encoder.words.weight.detach().numpy(), parameters_of(encoder.reader.lstm)
    for row, caption in enumerate(captions):
        # In German ids without a vector of their own are read as <unk>.
        rows = caption if language == "en" else [{0: 0, 1: 1, 2: 2, 3: 3, 5: 4, 7: 5}.get(token, 3) for token in caption]
        words = sum(both_ways(table[rows], parameters))  # The sum of both directions.
        wanted, _ = steps_by_hand(words, parameters_of(encoder.pooling), 2)
        np.testing.assert_allclose(encoded.values[row].detach(), wanted.ravel(), rtol=0, atol=1e-12)


def test_dan_score_is_sum_over_steps(model):
    images = model.encode_images(ImageBatch(torch.randn(5, 6, 8, dtype=torch.float64)))
    captions = model.encode_captions(batch_of(drawn(np.random.default_rng(1), 3)), "en")
    scores = model.scores(images, captions)
    assert scores.shape == (5, 3)
    for row, image in enumerate(images.values.detach().numpy().reshape(5, 3, 4)):
        for column, caption in enumerate(captions.values.detach().numpy().reshape(3, 3, 4)):
            wanted = sum(image[step] @ caption[step] for step in range(3))
            np.testing.assert_allclose(scores[row, column].detach(), wanted, rtol=0, atol=1e-12)
    assert (model.similarity, model.vectors) == ("inner-product", True)


def test_dan_attention_weights_reproduce_embeddings(model):
    features = torch.randn(1, 6, 8, dtype=torch.float64)
    images = ImageBatch(features, torch.tensor([[True, True, False, True, True, False]]))
    captions = batch_of([[1, 5, 4, 6, 2]])
    found = model.attention_weights(images, captions, "de")
    assert (found.regions.shape, found.words.shape, found.pairs) == ((2, 4), (2, 5), None)
    for weights in (found.regions, found.words):
        np.testing.assert_allclose(weights.detach().sum(1), 1, atol=1e-12)
        assert float(weights.detach().max() - weights.detach().min()) > 0.01
    words = 2 * model.sentences[1].states(captions).values[0]
    contexts = model.encode_captions(captions, "de").values[0].view(3, 4)
    torch.testing.assert_close(contexts, torch.cat([words.mean(0, keepdim=True), found.words @ words]), rtol=0, atol=1e-12)
    contexts = model.encode_images(images).values[0].view(3, 4)
    pooled = found.regions @ features[0][images.mask[0]]
    for step in range(2):
        torch.testing.assert_close(
            contexts[step + 1], (model.attention.maps[step + 1].weight @ pooled[step]).tanh(), rtol=0, atol=1e-12
        )
