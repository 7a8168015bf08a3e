import numpy as np
import pytest
import torch

from tests.train.models.equations import attended, gradcheck_model
from train.models.multi_head_attention import MultiHeadAttention, where_present
from train.models.retrieval_model import Encoded


def attention_of(heads=3, *, width=4, seed=0) -> MultiHeadAttention:
    torch.manual_seed(seed)
    attention = MultiHeadAttention(width, num_heads=heads, attention_dim=5, context_dim=6).double()
    with torch.no_grad():
        attention.contexts.mul_(20)  # As initialized, all attend nearly to the mean.
    return attention


def expected(attention: MultiHeadAttention, items: torch.Tensor) -> np.ndarray:
    parameters = (getattr(attention, name).detach().numpy() for name in ("contexts", "of_contexts", "of_items"))
    return attended(items.numpy(), *parameters).ravel()


def garbage(items: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the items with something else where there are none."""
    return torch.where(mask[..., None], items, torch.tensor([np.nan, np.inf, -1e9, 3.0], dtype=items.dtype))


@pytest.mark.parametrize("heads", [1, 3])
def test_equations_1_and_2(heads):
    attention = attention_of(heads)
    items = torch.randn(5, 7, 4, dtype=torch.float64)
    result = attention(Encoded(items))
    assert result.shape == (5, heads * 4)
    for row, of_one in enumerate(items):
        np.testing.assert_allclose(result[row].detach(), expected(attention, of_one), rtol=0, atol=1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_absent_changes_nothing(seed):
    rng = np.random.default_rng(seed)
    attention = attention_of(seed=seed)
    items = torch.from_numpy(rng.standard_normal((4, rng.integers(1, 9), 4)))
    mask = torch.from_numpy(rng.random(items.shape[:2]) < rng.choice([0.2, 0.5, 0.9]))
    mask[0] = True
    items.requires_grad_()
    result = attention(Encoded(where_present(lambda rows: rows, garbage(items, mask), mask), mask))
    for row in range(4):
        there = items.detach()[row][mask[row]]
        wanted = expected(attention, there) if len(there) else np.zeros(12)
        np.testing.assert_allclose(result[row].detach(), wanted, rtol=0, atol=1e-12)
    result.sum().backward()
    assert items.grad.isfinite().all()
    assert not items.grad[~mask].any()
    weights = attention.weights(Encoded(items.detach(), mask))
    assert weights.shape == (4, 3, items.shape[1])
    assert not weights.transpose(1, 2)[~mask].any()
    torch.testing.assert_close(weights.sum(2), mask.any(1, keepdim=True).double().expand(4, 3))
    for parameter in attention.parameters():
        assert parameter.grad.isfinite().all()


@pytest.mark.parametrize("masked", [False, True])
def test_gradients(masked):
    attention = attention_of()
    mask = torch.tensor([[True, False, True], [True, True, True]]) if masked else None
    items = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    assert gradcheck_model(attention, lambda items: attention(Encoded(items, mask)), items)


def test_it_begins_near_the_mean_with_heads_that_differ():
    torch.manual_seed(0)
    attention = MultiHeadAttention(512, num_heads=3, attention_dim=512, context_dim=512)
    assert 0.099 < attention.contexts.abs().max() <= 0.1
    bound = (6 / 1024) ** 0.5
    for matrices in (attention.of_contexts, attention.of_items):
        assert 0.99 * bound < matrices.abs().max() <= bound
    weights = attention.weights(Encoded(torch.randn(9, 36, 512)))
    assert weights.max() < 0.5
    assert (weights[:, 0] - weights[:, 1]).abs().max() > 0.01


def test_nothing_there_at_all():
    attention = attention_of()
    assert not attention(Encoded(torch.ones(2, 3, 4, dtype=torch.float64), torch.zeros(2, 3, dtype=torch.bool))).any()
    assert attention(Encoded(torch.ones(0, 3, 4, dtype=torch.float64))).shape == (0, 12)
    assert attention(Encoded(torch.ones(0, 3, 4, dtype=torch.float64), torch.ones(0, 3, dtype=torch.bool))).shape == (0, 12)
