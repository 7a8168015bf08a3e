import numpy as np
import pytest
import torch

from tests.train.models.equations import diversity
from train.objectives.diversity import diversity_loss


def heads(seed: int, count: int = 3) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((5, count, 4)))


@pytest.mark.parametrize("margin", [0.1, 0.6, 1.0, 2.0])
@pytest.mark.parametrize(("a", "b"), [(0, 0), (0, 1)])
def test_equation_5(a, b, margin):
    expected = diversity(heads(a).numpy(), heads(b).numpy(), margin)
    assert diversity_loss(heads(a), heads(b), margin=margin).item() == pytest.approx(expected, abs=1e-12)
    assert diversity_loss(3 * heads(a), 0.01 * heads(b), margin=margin).item() == pytest.approx(expected, abs=1e-12)


def test_heads_are_drawn_apart_up_to_the_margin():
    """As printed, with the cosine in place of the distance, the equation would draw them together."""
    torch.manual_seed(0)
    parameter = (torch.ones(1, 3, 4) + 0.1 * torch.randn(1, 3, 4)).requires_grad_()
    optimizer = torch.optim.SGD([parameter], lr=0.05)
    distances = []
    for _ in range(400):
        loss = diversity_loss(parameter, parameter, margin=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        unit = torch.nn.functional.normalize(parameter.detach()[0], dim=1)
        distances.append(float((1 - unit @ unit.T)[~torch.eye(3, dtype=torch.bool)].min()))
    assert distances[0] < 0.02
    assert distances[-1] == pytest.approx(0.1, abs=0.01)


def test_gradients():
    a, b = (heads(seed).requires_grad_() for seed in (0, 1))
    assert torch.autograd.gradcheck(lambda a, b: diversity_loss(a, b, margin=1.1), (a, b))
    assert torch.autograd.gradcheck(lambda a: diversity_loss(a, a, margin=1.1), (a,))


def test_a_single_head_and_heads_of_zeros():
    assert diversity_loss(heads(0, 1), heads(0, 1), margin=2.0).item() == 0
    empty = torch.zeros(2, 3, 4, requires_grad=True)
    loss = diversity_loss(empty, empty, margin=1.5)
    assert loss.item() == pytest.approx(2 * 6 * 0.5)
    loss.backward()
    assert not empty.grad.any()


def test_heads_are_compared_in_full_precision():
    a = heads(0).float()
    with torch.autocast("cpu", torch.bfloat16):
        found = diversity_loss(a, a, margin=1.0)
    assert torch.equal(found, diversity_loss(a, a, margin=1.0))
