import numpy as np
import pytest
import torch

from tests.train.models.equations import gradcheck_model
from train.models.memory_attention import AttentionSteps
from train.models.retrieval_model import Encoded


def parameters_of(module: torch.nn.Module) -> dict[str, np.ndarray]:
    return {name: value.detach().numpy() for name, value in module.named_parameters()}


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
    module = AttentionSteps(
        width, 4 if mapped else width, steps=steps, attention_dim=6, mapped=mapped, dropout=dropout
    ).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(spread)
    return module


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("mapped", [True, False])
def test_steps_are_those_of_the_equations(mapped, steps):
    module, items = attention(mapped=mapped, steps=steps), torch.randn(7, 6, 5, dtype=torch.float64)
    contexts, weights = module(Encoded(items)), module.weights(Encoded(items))
    assert weights.shape == (7, steps, 6)
    assert float((weights.max() - weights.min()).detach()) > 0.2  # It attends.
    for row, image in enumerate(items.numpy()):
        wanted, shares = steps_by_hand(image, parameters_of(module), steps)
        np.testing.assert_allclose(contexts[row].detach(), wanted.ravel(), rtol=0, atol=1e-12)
        np.testing.assert_allclose(weights[row].detach(), shares, rtol=0, atol=1e-12)


@pytest.mark.parametrize("seed", range(15))
@pytest.mark.parametrize("mapped", [True, False])
def test_what_is_absent_changes_nothing(mapped, seed):
    rng, module = np.random.default_rng(seed), attention(mapped=mapped)
    mask = torch.from_numpy(rng.random((7, 6)) < rng.choice([0.3, 0.8]))
    items = torch.from_numpy(rng.standard_normal((7, 6, 5)))
    items[~mask] = torch.tensor(rng.choice([np.nan, np.inf, 1e6, 0.5], (int((~mask).sum()), 5)))
    items.requires_grad_()
    together, weights = module(Encoded(items, mask)), module.weights(Encoded(items, mask))
    assert not weights.transpose(1, 2)[~mask].any()
    for row in range(7):
        if mask[row].any():
            alone = module(Encoded(items[row][mask[row]][None]))[0]
            torch.testing.assert_close(together[row], alone, rtol=0, atol=1e-12)
        else:
            assert not together[row].any()
    together.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in module.parameters())
    assert not items.grad[~mask].any()
    assert items.grad.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("mapped", [True, False])
def test_gradients(mapped):
    module, items = attention(mapped=mapped, spread=1.0), torch.randn(2, 4, 5, dtype=torch.float64, requires_grad=True)
    mask = torch.arange(4) < torch.tensor([[4], [2]])
    assert gradcheck_model(module, lambda items: module(Encoded(items, mask)), items)


def test_dropout_is_for_training_alone():
    module, items = attention(mapped=True, dropout=0.5), Encoded(torch.randn(7, 6, 5, dtype=torch.float64))
    first, second = module(items), module(items)
    assert not torch.equal(first, second)
    module.eval()
    assert torch.equal(module(items), module(items))
    assert torch.equal(module(items), attention(mapped=True)(items))
