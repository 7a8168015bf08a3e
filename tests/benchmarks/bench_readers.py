"""Compare our GRU and LSTM with torch's, which on a GPU are cuDNN's: batches of 128 captions, words 300, 1024 units.

Both read the same captions with the same parameters, forward and backward, in turn. The captions are those of Multi30K, if its text
is available, and synthetic ones that share no prefix but ``<start>``. `train.models.encoders.uses_packed_rnn` chooses by these
ratios. Takes a device and the number of threads as arguments; without a GPU the rates are of processor time, which other processes
disturb less. Our LSTM is for CPUs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from aims import floor
from bench_training import BATCH, VOCABULARY, WIDTH, WORDS, Captions, multi30k, synthetic
from measuring import machine, ratio
from torch import Tensor, nn

from train.data.batches import CaptionBatch
from train.models.encoders import WordEmbedding, read_last_with_torch, read_with_torch
from train.models.packed_rnn import bilstm_over_trie, build_trie, gru_over_trie

STEPS = 3  # Per measurement, each on another batch; the same ones for both.

Read = Callable[[CaptionBatch], tuple[Tensor, ...]]


def reading(read: Read, captions: Captions, device: torch.device) -> Callable[[], float]:
    """Return a function that measures batches per second, forward and backward; a first batch warms up."""

    def step(number: int) -> None:
        rows = np.random.default_rng(number).choice(len(captions.offsets) - 1, BATCH, replace=False)
        torch.stack(read(CaptionBatch(captions.token_ids, captions.offsets, rows))).sum().backward()

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            return time.perf_counter()
        return time.process_time()

    def rate() -> float:
        started = now()
        for number in range(STEPS):
            step(number)
        return STEPS / (now() - started)

    step(STEPS)
    return rate


def main() -> None:
    """Print the ratios."""
    device = torch.device(sys.argv[1] if len(sys.argv) > 1 else "cuda" if torch.cuda.is_available() else "cpu")
    if len(sys.argv) > 2:
        torch.set_num_threads(int(sys.argv[2]))
    torch.manual_seed(0)
    print(f"{machine()}, torch {torch.__version__} with {torch.get_num_threads()} threads, {device}")
    table = WordEmbedding(VOCABULARY, WORDS).to(device)
    gru = nn.GRU(WORDS, WIDTH, batch_first=True).to(device)
    lstm = nn.LSTM(WORDS, WIDTH, batch_first=True, bidirectional=True).to(device)

    def read_by_itself(captions: CaptionBatch) -> tuple[Tensor, ...]:
        packed = build_trie(captions).to(device)
        return (gru_over_trie(gru, table(packed.tokens), packed),)

    readers: dict[str, tuple[Read, Read]] = {
        "GRU": (read_by_itself, lambda captions: (read_last_with_torch(gru, table, captions),))
    }
    if device.type == "cpu":
        readers["bidirectional LSTM"] = (
            lambda captions: bilstm_over_trie(lstm, table, captions),
            lambda captions: read_with_torch(lstm, table, captions),
        )
    for case, captions in (("Multi30K", multi30k()), ("nothing shared", synthetic())):
        if captions is None:
            print(f"{case}: needs the Multi30K text: set IMAGEPIVOT_TEST_DATA")
            continue
        for name, (ours, theirs) in readers.items():
            rates = (reading(read, captions, device) for read in (ours, theirs))
            ratio(
                f"{name}, {case}, against torch's",
                *rates,
                unit="batches/s",
                at_least=floor("readers of tokens") if device.type == "cpu" else None,
            )


if __name__ == "__main__":
    main()
