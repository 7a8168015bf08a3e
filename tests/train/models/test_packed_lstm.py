import numpy as np
import pytest
import torch

from tests.train.models.equations import both_ways, gradcheck_model
from train.data.batches import CaptionBatch
from train.models.encoders import BidirectionalLSTM, WordTable, read_with_torch
from train.models.packed_lstm import read_both_ways

WORDS, WIDTH, UNITS = 9, 3, 4


def batch_of(captions: list[list[int]]) -> CaptionBatch:
    """Return captions as rows of a dataset that holds others before, between and after them."""
    others = [[7, 7, 8], *(caption for caption in captions for caption in (caption, [8]))]
    offsets = np.cumsum([0, *map(len, others)])
    return CaptionBatch(np.concatenate(others), offsets, np.arange(1, len(others), 2))


def reader(dtype=torch.float64) -> tuple[torch.nn.LSTM, torch.nn.Embedding]:
    torch.manual_seed(0)
    return torch.nn.LSTM(WIDTH, UNITS, bidirectional=True).to(dtype), torch.nn.Embedding(WORDS, WIDTH).to(dtype)


def drawn(seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [[1, *rng.integers(3, 6, rng.integers(0, 7)).tolist(), 2] for _ in range(rng.integers(1, 9))]


@pytest.mark.parametrize("captions", [[[1]], [[1, 4, 2], [1, 4, 5, 6, 2], [1, 2], [1, 4, 2]], *map(drawn, range(12))])
def test_each_caption_is_read_as_if_it_were_alone(captions):
    lstm, words = reader()
    parameters = {name: value.detach().numpy() for name, value in lstm.named_parameters()}
    directions = read_both_ways(lstm, words, batch_of(captions))
    longest = max(map(len, captions))
    for states in directions:
        assert states.shape == (len(captions), longest, UNITS)
    for row, caption in enumerate(captions):
        vectors = words.weight.detach().numpy()[caption]
        for states, wanted in zip(directions, both_ways(vectors, parameters), strict=True):
            np.testing.assert_allclose(states[row, : len(caption)].detach(), wanted, rtol=0, atol=1e-12)
            assert not states[row, len(caption) :].any()


@pytest.mark.slow
def test_gradients():
    lstm, words = reader()
    captions = batch_of([[1, 4, 2], [1, 4, 5, 2], [1, 2], [1, 4, 2]])

    def states(table):
        return torch.stack(read_both_ways(lstm, lambda ids: torch.nn.functional.embedding(ids, table), captions))

    assert gradcheck_model(lstm, states, words.weight)


@pytest.mark.parametrize("seed", range(4))
def test_torch_reads_and_learns_the_same(seed):
    """A reader on a GPU leaves it to torch."""
    torch.manual_seed(seed)
    words, module = WordTable(WORDS, WIDTH), BidirectionalLSTM(WIDTH, UNITS)
    captions, results = batch_of(drawn(seed)), []
    for read in (read_with_torch, read_both_ways):
        words.zero_grad()
        module.zero_grad()
        states = torch.stack(read(module.lstm, words, captions))
        (states * torch.linspace(-1, 1, states.numel()).view_as(states)).sum().backward()
        results.append([states, words.weight.grad.clone(), *(parameter.grad.clone() for parameter in module.parameters())])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_products_are_computed_in_bfloat16_under_autocast():
    lstm, words = reader(torch.float32)
    captions = batch_of([[1, 4, 2], [1, 4, 5, 6, 2]])
    full = torch.stack(read_both_ways(lstm, words, captions))
    with torch.autocast("cpu", torch.bfloat16):
        low = torch.stack(read_both_ways(lstm, words, captions))
        low.sum().backward()
    assert low.dtype == torch.float32
    assert not torch.equal(low, full)
    torch.testing.assert_close(low, full, rtol=0, atol=0.01)
    assert all(parameter.grad.isfinite().all() for parameter in lstm.parameters())


def test_nothing_is_kept_without_gradients():
    lstm, words = reader()
    with torch.no_grad():
        states = read_both_ways(lstm, words, batch_of([[1, 4, 2]]))
    assert all(not direction.requires_grad for direction in states)
