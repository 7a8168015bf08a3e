import pytest
import torch

from train.models.dropout import Dropout


def drawn(ratio: float, seed: int = 0) -> Dropout:
    torch.manual_seed(seed)
    return Dropout(ratio)


@pytest.mark.parametrize("ratio", [0.2, 0.5, 0.9])
def test_so_many_numbers_become_zeros_and_the_mean_stays(ratio):
    values = drawn(ratio)(torch.ones(200, 1000, dtype=torch.float64))
    assert float((values == 0).double().mean()) == pytest.approx(ratio, abs=0.01)
    assert float(values.mean()) == pytest.approx(1, rel=0.02)
    assert sorted(values.unique().tolist()) == pytest.approx([0, 1 / (1 - ratio)])


def test_a_zero_has_no_gradient():
    values = torch.ones(100, requires_grad=True)
    dropped = drawn(0.5)(values)
    dropped.sum().backward()
    assert torch.equal(values.grad, dropped.detach())


def test_masks_go_on_from_a_state():
    values, module = torch.randn(50, 50), drawn(0.5)
    module(values)
    state = {name: value.clone() for name, value in module.state_dict().items()}
    following = [module(values) for _ in range(3)]
    assert not torch.equal(following[0], following[1])
    other = drawn(0.5, seed=1)
    assert not torch.equal(other(values), following[0])
    other.load_state_dict(state)
    torch.rand(7)  # The generator of the process is of no account.
    assert all(torch.equal(other(values), expected) for expected in following)


def test_nothing_is_drawn_in_evaluation_mode_or_without_a_ratio():
    values, module, none = torch.randn(50), drawn(0.5).eval(), drawn(0.0)
    before = module.state_dict()["next_seed"].clone()
    assert module(values) is values
    assert torch.equal(module.state_dict()["next_seed"], before)
    assert none(values) is values
    assert not none.state_dict()


def test_a_state_without_a_seed_and_one_too_many_are_refused():
    module, none = drawn(0.5), drawn(0.0)
    with pytest.raises(RuntimeError, match=r"Missing key.*next_seed"):
        module.load_state_dict({})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*next_seed"):
        none.load_state_dict(module.state_dict())


def test_the_seed_in_a_state_is_one_number():
    state = drawn(0.5).state_dict()
    assert list(state) == ["next_seed"]
    assert (state["next_seed"].dtype, state["next_seed"].shape) == (torch.int64, ())
