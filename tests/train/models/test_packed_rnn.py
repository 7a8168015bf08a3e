"""Prefix trees against sets of prefixes, and the GRU and LSTM over them; test_encoders.py compares them with torch's own."""

import numpy as np
import pytest
import torch

from tests.threads import threads_of_torch
from tests.train.models.equations import both_ways
from train.data.batches import CaptionBatch
from train.models.packed_rnn import PrefixTrie, bilstm_over_trie, build_trie, gru_over_trie


def flat(captions: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Return token ids one after the other, and offsets."""
    token_ids = np.array([token for caption in captions for token in caption], dtype=np.int32)
    return token_ids, np.cumsum([0, *map(len, captions)], dtype=np.int64)


def unpacked(packed: PrefixTrie) -> list[list[int]]:
    """Rebuild the captions, walking each from its end to the root."""
    captions = []
    for number in packed.ends.tolist():
        caption = []
        while number:
            caption.append(int(packed.tokens[packed.last_tokens[number - 1]]))
            number = int(packed.parents[number - 1])
        captions.append(caption[::-1])
    return captions


def check(captions: list[list[int]], rows: list[int]) -> PrefixTrie:
    """Pack captions and compare with a plain set of prefixes."""
    packed = build_trie(CaptionBatch(*flat(captions), np.array(rows, dtype=np.int64)))
    chosen = [captions[row] for row in rows]
    prefixes = {tuple(caption[: end + 1]) for caption in chosen for end in range(len(caption))}
    longest = max(map(len, chosen), default=0)
    assert unpacked(packed) == chosen
    assert len(packed.ends) == len(rows)
    assert packed.level_sizes == tuple(sum(len(prefix) == step + 1 for prefix in prefixes) for step in range(longest))
    assert packed.tokens.tolist() == sorted({token for caption in chosen for token in caption})
    assert len(packed.parents) == len(packed.last_tokens) == len(prefixes)
    return packed


@pytest.mark.parametrize("seed", range(5))
def test_build_trie_random_captions(seed):
    generator = np.random.default_rng(seed)
    captions = [generator.integers(0, 4, size=generator.integers(1, 9)).tolist() for _ in range(40)]
    check(captions, generator.integers(0, 40, size=generator.integers(0, 60)).tolist())


def test_caption_without_tokens_is_refused():
    token_ids, offsets = flat([[1, 2], [], [1, 2]])
    with pytest.raises(ValueError, match="caption 1 has no tokens"):
        CaptionBatch(token_ids, offsets, np.array([0, 1, 2]))
    assert len(CaptionBatch(token_ids, offsets, np.array([0, 2]))) == 2


WORDS, UNITS, TOKENS = 7, 12, 9
# Number of occurrences of each token.
SKEWED = np.array([0, 0, 0, 0.5, 0.2, 0.1, 0.1, 0.05, 0.05])


def batch(seed: int, count: int, longest: int = 8) -> list[list[int]]:
    """Draw captions with few distinct tokens, so that many share prefixes and a few are equal."""
    generator = np.random.default_rng(seed)
    return [[1, *generator.choice(TOKENS, p=SKEWED, size=generator.integers(0, longest)).tolist(), 2] for _ in range(count)]


def packed(captions: list[list[int]]):
    return build_trie(CaptionBatch(*flat(captions), np.arange(len(captions))))


def test_gru_two_batches_in_one_graph():
    torch.manual_seed(0)
    gru = torch.nn.GRU(WORDS, UNITS)
    first, second = packed(batch(1, 9)), packed(batch(2, 5))
    table = torch.randn(TOKENS, WORDS)

    def gradient(*batches):
        gru.zero_grad()
        sum(gru_over_trie(gru, table[captions.tokens], captions).sum() for captions in batches).backward()
        return gru.weight_hh_l0.grad

    torch.testing.assert_close(gradient(first, second), gradient(first) + gradient(second), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("threads", [1, 2])
def test_gru_is_reproducible(threads):
    collected = packed(batch(5, 60))
    torch.manual_seed(0)
    gru = torch.nn.GRU(WORDS, 256)
    table = torch.randn(TOKENS, WORDS)

    def results() -> list[bytes]:
        gru.zero_grad()
        states = gru_over_trie(gru, table[collected.tokens], collected)
        states.square().sum().backward()
        return [tensor.detach().numpy().tobytes() for tensor in (states, *(p.grad for p in gru.parameters()))]

    with threads_of_torch(threads):
        assert results() == results()


def test_gru_under_autocast():
    captions = batch(7, 20)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.manual_seed(0)
        gru, collected = torch.nn.GRU(WORDS, UNITS), packed(captions)
        words = torch.randn(len(collected.tokens), WORDS, requires_grad=True)
        rounded = gru_over_trie(gru, words, collected)
        rounded.sum().backward()
    gradients = [parameter.grad.clone() for parameter in (words, *gru.parameters())]
    gru.zero_grad()
    words.grad = None
    exact = gru_over_trie(gru, words, collected)
    exact.sum().backward()
    assert {tensor.dtype for tensor in (rounded, *gradients)} == {torch.float32}
    assert 0 < (rounded - exact).abs().max() < 0.02
    for gradient, parameter in zip(gradients, (words, *gru.parameters()), strict=True):
        assert 0 < (gradient - parameter.grad).abs().max() < 0.01 * parameter.grad.abs().max()


def batch_of(captions: list[list[int]]) -> CaptionBatch:
    """Return captions as rows of a dataset with other captions before, between and after them."""
    others = [[7, 7, 8], *(caption for caption in captions for caption in (caption, [8]))]
    offsets = np.cumsum([0, *map(len, others)])
    return CaptionBatch(np.concatenate(others), offsets, np.arange(1, len(others), 2))


@pytest.mark.parametrize("captions", [[[1]], [[1, 4, 2], [1, 4, 5, 6, 2], [1, 2], [1, 4, 2]], batch(0, 9)])
def test_bilstm_equals_numpy(captions):
    torch.manual_seed(0)
    lstm, words = torch.nn.LSTM(WORDS, UNITS, bidirectional=True).double(), torch.nn.Embedding(TOKENS, WORDS).double()
    parameters = {name: value.detach().numpy() for name, value in lstm.named_parameters()}
    directions = bilstm_over_trie(lstm, words, batch_of(captions))
    longest = max(map(len, captions))
    for states in directions:
        assert states.shape == (len(captions), longest, UNITS)
    for row, caption in enumerate(captions):
        vectors = words.weight.detach().numpy()[caption]
        for states, wanted in zip(directions, both_ways(vectors, parameters), strict=True):
            np.testing.assert_allclose(states[row, : len(caption)].detach(), wanted, rtol=0, atol=1e-12)
            assert not states[row, len(caption) :].any()
