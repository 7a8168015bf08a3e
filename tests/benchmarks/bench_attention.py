"""Compare a training step of MHA-D (batch 128, 36 regions, Huang et al. 2019) with its matrix products.

Yardstick: all products of the step with the shapes that they have, forward and backward, and nothing else, in the same run: of
every unpadded token, as if no caption shared words or prefixes with another, so that sharing may go below it. The captions are
synthetic ones that share no prefix but ``<start>``, and those of Multi30K in English and German, if its text is available. Takes
the number of threads as an argument.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from aims import floor
from bench_training import CLIP, RATE, VOCABULARY, Captions, multi30k, synthetic
from measuring import machine, ratio
from torch import Tensor

from train.config.models import MhaDConfig
from train.config.sections import LossConfig
from train.data.batches import CaptionBatch
from train.losses import Inputs, Objective, terms_of
from train.models.mha_d import MhaD
from train.models.retrieval_model import Dimensions, ImageBatch

BATCH, REGIONS, FEATURES = 128, 36, 2048
CONFIG = MhaDConfig()
LOSS = LossConfig(hinges="max", caption_weight=0.6, diversity_weight=1.0)
STEPS = 2  # Per measurement, each on another batch; the same ones for all.


def timed(step: Callable[[int], None]) -> Callable[[], float]:
    """Return a function that measures steps per second over the next `STEPS` batches; a first step warms up."""
    number = 0
    step(number)

    def rate() -> float:
        nonlocal number
        started = time.perf_counter()
        for _ in range(STEPS):
            number += 1
            step(number)
        return STEPS / (time.perf_counter() - started)

    return rate


def batches_of(captions: tuple[Captions, ...], number: int) -> tuple[CaptionBatch, ...]:
    """Return a batch of captions in each language."""
    rng = np.random.default_rng(number)
    return tuple(
        CaptionBatch(one.token_ids, one.offsets, rng.choice(len(one.offsets) - 1, BATCH, replace=False)) for one in captions
    )


def model_steps(captions: tuple[Captions, ...]) -> Callable[[], float]:
    """Return the rate of whole steps: forward, losses, backward, clipping, Adam."""
    languages = ("en", "de")
    model = MhaD(CONFIG, Dimensions(languages, VOCABULARY, (REGIONS, FEATURES)))
    objective = Objective(model, terms_of(LOSS, model), whole=lambda part, count: part)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=1e-6, fused=True)
    images, numbers = ImageBatch(torch.rand(BATCH, REGIONS, FEATURES)), torch.arange(BATCH)

    def step(number: int) -> None:
        optimizer.zero_grad()
        objective(Inputs("images", numbers, images, batches_of(captions, number), languages), "max")[0].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()

    return timed(step)


def product_steps(captions: tuple[Captions, ...]) -> Callable[[], float]:
    """Return the rate of the products alone."""
    units, words, attended = CONFIG.embed_dim, CONFIG.word_dim, CONFIG.num_heads * CONFIG.attention_dim
    features, regions = torch.rand(BATCH * REGIONS, FEATURES), torch.rand(BATCH, REGIONS, units)
    of_regions, keys = torch.rand(units, FEATURES), torch.rand(attended, units)
    of_words, recurrent = torch.rand(4 * units, words), torch.rand(4 * units, units)
    weights = torch.rand(BATCH, CONFIG.num_heads, REGIONS)

    def attend(items: Tensor) -> None:
        after = items @ keys.T
        after @ keys, after.T @ items

    def pool(items: Tensor, weights: Tensor) -> None:
        pooled = torch.bmm(weights, items)
        torch.bmm(pooled, items.transpose(1, 2)), torch.bmm(weights.transpose(1, 2), pooled)

    def step(number: int) -> None:
        after = features @ of_regions.T
        after.T @ features  # The features have no gradient.
        attend(after)
        pool(regions, weights)
        for batch in batches_of(captions, number):
            sizes = [int((batch.lengths > step).sum()) for step in range(batch.lengths.max())]
            vectors, states = torch.rand(sum(sizes), words), torch.rand(sum(sizes), units)
            gates = torch.rand(sum(sizes), 4 * units)
            for _ in range(2):  # Directions.
                vectors @ of_words.T, gates @ of_words, gates.T @ vectors
                for before in states.split(sizes):
                    before @ recurrent.T
                for after in gates.split(sizes):
                    after @ recurrent
                gates.T @ states
            attend(states)
            pool(torch.rand(BATCH, len(sizes), units), torch.rand(BATCH, CONFIG.num_heads, len(sizes)))

    return timed(step)


def main() -> None:
    """Print the ratios."""
    if len(sys.argv) > 1:
        torch.set_num_threads(int(sys.argv[1]))
    torch.manual_seed(0)
    print(f"{machine()}, torch {torch.__version__} with {torch.get_num_threads()} threads")
    english, german = multi30k("en"), multi30k("de")
    cases = {"nothing shared": (synthetic(), synthetic())}
    if english is None or german is None:
        print("Multi30K: needs its text: set IMAGEPIVOT_TEST_DATA")
    else:
        cases["Multi30K"] = (english, german)
    for case, captions in cases.items():
        ours = model_steps(captions)
        ratio(
            f"training step of mha-d, {case}, against its products",
            ours,
            product_steps(captions),
            unit="steps/s",
            at_least=floor("training step of mha-d"),
        )


if __name__ == "__main__":
    main()
