import pytest
import torch

from tests.train.models.equations import Sizes
from train.models import similarity
from train.models.similarity import l2_normalize, order


def brute_force(a: torch.Tensor, b: torch.Tensor) -> list[list[float]]:
    return [[-sum(max(0.0, y - x) ** 2 for x, y in zip(p, q, strict=True)) for q in b.tolist()] for p in a.tolist()]


def positive(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 7), (5, 3, 2), (4, 4, 0)])
@pytest.mark.parametrize("numbers", [1, 10, 25, 2**19])
def test_order_equals_brute_force(shape, numbers, monkeypatch):
    monkeypatch.setitem(similarity._TILE_ELEMENTS, "cpu", numbers)
    rows, columns, width = shape
    a, b = positive(rows, width), positive(columns, width, seed=1)
    torch.testing.assert_close(order(a, b), torch.tensor(brute_force(a, b), dtype=a.dtype), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("numbers", [1, 10, 25, 2**19])
def test_gradients_of_order_equal_finite_differences(numbers, monkeypatch):
    monkeypatch.setitem(similarity._TILE_ELEMENTS, "cpu", numbers)
    a, b = positive(4, 6).requires_grad_(), positive(5, 6, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(order, (a, b))


def test_order_equal_dimensions_have_no_gradient():
    a, b = torch.tensor([[0.5, 0.2]], requires_grad=True), torch.tensor([[0.5, 0.7]], requires_grad=True)
    order(a, b).sum().backward()
    torch.testing.assert_close((a.grad, b.grad), (torch.tensor([[0.0, 1.0]]), torch.tensor([[0.0, -1.0]])))


def test_order_memory_is_bounded_by_a_tile():
    a, b = positive(300, 64).requires_grad_(), positive(200, 64, seed=1).requires_grad_()
    with Sizes() as watch:
        order(a, b).sum().backward()
    assert max(watch.sizes) <= similarity._TILE_ELEMENTS["cpu"] < 300 * 200 * 64 / 7


def test_l2_normalize_has_the_bits_of_torch():
    vectors, weights = torch.randn(50, 33), torch.randn(50, 33)
    vectors[3] *= 1e-9
    vectors[4] *= 1e9
    results = []
    for function in (l2_normalize, torch.nn.functional.normalize):
        given = vectors.clone().requires_grad_()
        (function(given) * weights).sum().backward()
        results.append((function(given), given.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("value", [0.0, 1e-20])
def test_l2_normalize_zeros_have_no_gradient(value):
    vectors = torch.randn(4, 5)
    vectors[2] = value
    vectors.requires_grad_()
    units = l2_normalize(vectors)
    (units @ torch.randn(5, 6)).square().sum().backward()
    assert units[2].tolist() == [0] * 5
    assert vectors.grad[2].tolist() == [0] * 5
    assert 0 < vectors.grad[[0, 1, 3]].abs().max() < 100
