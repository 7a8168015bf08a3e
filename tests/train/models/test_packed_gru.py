import weakref

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from tests.threads import threads_of_torch
from tests.train.models.equations import gradcheck_model
from train.data.batches import CaptionBatch
from train.data.packing import pack
from train.models import packed_gru as gru_module
from train.models.packed_gru import read_prefixes

WORDS, UNITS, TOKENS = 7, 12, 9
# Number of occurrences of each token.
SKEWED = np.array([0, 0, 0, 0.5, 0.2, 0.1, 0.1, 0.05, 0.05])


def batch(seed: int, count: int, longest: int = 8) -> list[list[int]]:
    """Draw captions with few distinct tokens, so that many share prefixes and a few are equal."""
    generator = np.random.default_rng(seed)
    return [[1, *generator.choice(TOKENS, p=SKEWED, size=generator.integers(0, longest)).tolist(), 2] for _ in range(count)]


def packed(captions: list[list[int]]):
    return pack(CaptionBatch(np.concatenate(captions), np.cumsum([0, *map(len, captions)]), np.arange(len(captions))))


def run(captions: list[list[int]], *, dtype: torch.dtype, words: int = WORDS, units: int = UNITS):
    """Return final states and gradients of both GRUs, with the same parameters and upstream gradient."""
    generator = torch.Generator().manual_seed(len(captions))
    theirs = torch.nn.GRU(words, units).to(dtype)
    ours = torch.nn.GRU(words, units).to(dtype)
    ours.load_state_dict(theirs.state_dict())
    upstream = torch.randn(len(captions), units, generator=generator, dtype=dtype)
    results = []
    for gru in (theirs, ours):
        table = torch.randn(TOKENS, words, generator=torch.Generator().manual_seed(1), dtype=dtype, requires_grad=True)
        if gru is theirs:
            sequences = [table[torch.tensor(caption)] for caption in captions]
            states = gru(pack_sequence(sequences, enforce_sorted=False))[1][0]
        else:
            collected = packed(captions)
            states = read_prefixes(gru, table[collected.tokens], collected)
        states.backward(upstream)
        gradients = {name: parameter.grad for name, parameter in gru.named_parameters()}
        results.append({"states": states.detach(), "table": table.grad, **gradients})
    return results


@pytest.mark.parametrize("count", [1, 2, 33])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-6)])
def test_states_and_gradients_equal_torchs(count, dtype, tolerance):
    theirs, ours = run(batch(count, count), dtype=dtype)
    assert list(ours) == list(theirs)
    for name, expected in theirs.items():
        assert (ours[name] - expected).abs().max() <= tolerance * expected.abs().max(), name


@pytest.mark.slow
def test_states_and_gradients_equal_torchs_at_the_size_of_the_papers():
    theirs, ours = run(batch(0, 40), dtype=torch.float32, words=300, units=1024)
    for name, expected in theirs.items():
        assert (ours[name] - expected).abs().max() <= 1e-6 * expected.abs().max(), name


def test_captions_of_one_token():
    theirs, ours = run([[3], [4], [3]], dtype=torch.float64)
    assert torch.equal(ours["states"][0], ours["states"][2])
    assert ours["weight_hh_l0"].abs().max() == 0
    for name, expected in theirs.items():
        torch.testing.assert_close(ours[name], expected, rtol=0, atol=1e-14, msg=name)


def test_no_captions():
    gru = torch.nn.GRU(WORDS, UNITS)
    empty = pack(CaptionBatch(np.array([1, 2]), np.array([0, 2]), np.zeros(0, dtype=np.int64)))
    states = read_prefixes(gru, torch.zeros(0, WORDS), empty)
    assert states.shape == (0, UNITS)
    states.sum().backward()
    assert all(parameter.grad.abs().sum() == 0 for parameter in gru.parameters())


def test_gradients_equal_finite_differences():
    torch.manual_seed(0)
    gru = torch.nn.GRU(3, 4).double()
    collected = packed(batch(3, 5, longest=4))
    words = torch.randn(len(collected.tokens), 3, dtype=torch.float64, requires_grad=True)
    assert gradcheck_model(gru, lambda words: read_prefixes(gru, words, collected), words)


def test_two_batches_in_one_graph_do_not_disturb_each_other():
    torch.manual_seed(0)
    gru = torch.nn.GRU(WORDS, UNITS)
    first, second = packed(batch(1, 9)), packed(batch(2, 5))
    table = torch.randn(TOKENS, WORDS)

    def gradient(*batches):
        gru.zero_grad()
        sum(read_prefixes(gru, table[captions.tokens], captions).sum() for captions in batches).backward()
        return gru.weight_hh_l0.grad

    torch.testing.assert_close(gradient(first, second), gradient(first) + gradient(second), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("threads", [1, 2])
def test_the_same_bytes_from_run_to_run(threads):
    collected = packed(batch(5, 60))
    torch.manual_seed(0)
    gru = torch.nn.GRU(WORDS, 256)
    table = torch.randn(TOKENS, WORDS)

    def results() -> list[bytes]:
        gru.zero_grad()
        states = read_prefixes(gru, table[collected.tokens], collected)
        states.square().sum().backward()
        return [tensor.detach().numpy().tobytes() for tensor in (states, *(p.grad for p in gru.parameters()))]

    with threads_of_torch(threads):
        assert results() == results()


def test_without_gradients_the_states_are_the_same():
    collected = packed(batch(5, 30))
    torch.manual_seed(0)
    gru = torch.nn.GRU(WORDS, UNITS)
    words = torch.randn(len(collected.tokens), WORDS)
    with torch.no_grad():
        states = read_prefixes(gru, words, collected)
    assert not states.requires_grad
    assert torch.equal(states, read_prefixes(gru, words, collected))


def test_without_gradients_no_step_is_kept(monkeypatch):
    made, alive = [], []
    advance = gru_module._advance

    def watched(*args, **kwargs):
        alive.append(sum(reference() is not None for reference in made))
        step = advance(*args, **kwargs)
        made.append(weakref.ref(step.before))
        return step

    monkeypatch.setattr(gru_module, "_advance", watched)
    collected = packed([[1, 3, 4, 5, 6, 2]])
    gru = torch.nn.GRU(WORDS, UNITS)
    read_prefixes(gru, torch.randn(6, WORDS), collected)
    assert alive == [0, 1, 2, 3, 4, 5]
    made.clear()
    alive.clear()
    with torch.no_grad():
        read_prefixes(gru, torch.randn(6, WORDS), collected)
    assert max(alive) <= 1


@pytest.mark.slow
def test_a_compiled_caller_does_not_compile_it():
    collected = packed(batch(5, 30))
    gru = torch.nn.GRU(WORDS, UNITS)
    words = torch.randn(len(collected.tokens), WORDS)
    compiled = torch.compile(lambda words: read_prefixes(gru, words * 2, collected) + 1, backend="eager")
    assert torch.equal(compiled(words), read_prefixes(gru, words * 2, collected) + 1)


def test_autocast_multiplies_in_bfloat16_and_keeps_the_rest():
    captions = batch(7, 20)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.manual_seed(0)
        gru, collected = torch.nn.GRU(WORDS, UNITS), packed(captions)
        words = torch.randn(len(collected.tokens), WORDS, requires_grad=True)
        rounded = read_prefixes(gru, words, collected)
        rounded.sum().backward()
    gradients = [parameter.grad.clone() for parameter in (words, *gru.parameters())]
    gru.zero_grad()
    words.grad = None
    exact = read_prefixes(gru, words, collected)
    exact.sum().backward()
    assert {tensor.dtype for tensor in (rounded, *gradients)} == {torch.float32}
    assert 0 < (rounded - exact).abs().max() < 0.02
    for gradient, parameter in zip(gradients, (words, *gru.parameters()), strict=True):
        assert 0 < (gradient - parameter.grad).abs().max() < 0.05 * parameter.grad.abs().max()
