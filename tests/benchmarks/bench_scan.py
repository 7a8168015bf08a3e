"""Compare SCAN's scores, and a training step's, with their bare matrix products; and measure their memory.

The products of all regions with all words are what cannot be avoided: regions x words x width multiply-adds, at the rate of a large
matrix product in the same run. Ranking goes through `ranks_of`, as in ``evaluate``; images have 36 regions, captions the lengths of
Multi30K's (mean 14). A training step is that of the scores alone, without encoders: forward and backward, 128 images and captions.
Its yardstick is one product forward and three backward, for all pairs; the hardest negatives need fewer. Takes the number of images
to rank (1,000, five captions each) and of threads as arguments.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from aims import floor
from measuring import PeakMemory, machine, ratio
from torch.nn.functional import normalize

from train.config.models import ScanConfig
from train.evaluation.evaluation import scores_between
from train.evaluation.metrics import ranks_of
from train.losses import ranking_loss
from train.models.catalogue import build_model
from train.models.retrieval_model import Dimensions, Encoded, RetrievalModel

REGIONS, WIDTH, BATCH, MARGIN = 36, 1024, 128, 0.2
SETTINGS = {
    "t2i-avg": ScanConfig(attention="t2i", pooling="avg", lambda_softmax=9.0),
    "i2t-lse": ScanConfig(attention="i2t", pooling="lse", lambda_softmax=4.0, lambda_lse=5.0),
}


def encodings(images: int, captions: int) -> tuple[Encoded, Encoded]:
    """Draw regions and words: unit vectors that have something in common, as those of a trained model."""
    generator = np.random.default_rng(0)
    lengths = torch.from_numpy(2 + generator.gamma(7, 12 / 7, size=captions).astype(int))
    longest = int(lengths.max())
    regions, words = (
        normalize(torch.randn(*shape, WIDTH).add_(0.3), dim=2) for shape in ((images, REGIONS), (captions, longest))
    )
    return Encoded(regions), Encoded(words, torch.arange(longest) < lengths[:, None])


def multiply_adds(images: Encoded, captions: Encoded) -> float:
    """Return the multiply-adds of the products of all regions with all words."""
    return float(captions.present.sum()) * len(images) * REGIONS * WIDTH


def per_second(job: Callable[[], object]) -> Callable[[], float]:
    """Return the rate of a job."""

    def rate() -> float:
        started = time.perf_counter()
        job()
        return 1 / (time.perf_counter() - started)

    return rate


def products(multiply_adds: float) -> Callable[[], float]:
    """Return the rate of so many multiply-adds in large matrix products."""
    a, b = torch.rand(2048, WIDTH), torch.rand(WIDTH, 3 * WIDTH)

    def rate() -> float:
        seconds = []
        for _ in range(5):
            started = time.perf_counter()
            a @ b
            seconds.append(time.perf_counter() - started)
        return a.numel() * b.shape[1] / statistics.median(seconds) / multiply_adds

    return rate


def measured(what: str, job: Callable[[], object]) -> None:
    """Print the peak memory of a job above what is held before it."""
    with PeakMemory(os.getpid()) as before:
        time.sleep(0.2)
    with PeakMemory(os.getpid()) as during:
        job()
    print(
        f"{what}: {(during.peak - before.peak) / 1e6:,.0f} MB above the encodings (aim: at most {floor('memory of scan'):,})",
        flush=True,
    )


def ranking(model: RetrievalModel, images: Encoded, captions: Encoded) -> Callable[[], object]:
    """Return a job that ranks all captions and images."""
    owners = torch.arange(len(captions)) // 5
    return lambda: ranks_of(scores_between(model, images, captions), len(images), owners)


def step(model: RetrievalModel, images: Encoded, captions: Encoded, hinges: str) -> Callable[[], object]:
    """Return a job that scores a batch and computes the gradients."""
    numbers = torch.arange(BATCH)
    values = images.values.requires_grad_(), captions.values.requires_grad_()

    def job() -> None:
        for value in values:
            value.grad = None
        ranking_loss(model.scores(images, captions), numbers, numbers, margin=MARGIN, hinges=hinges).backward()

    return job


def main() -> None:
    """Print the ratios."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    if len(sys.argv) > 2:
        torch.set_num_threads(int(sys.argv[2]))
    torch.manual_seed(0)
    print(f"{machine()}, torch {torch.__version__} with {torch.get_num_threads()} threads")
    for name, config in SETTINGS.items():
        model = build_model(config, Dimensions(("en",), 10, (REGIONS, 8)), 0)
        images, captions = encodings(BATCH, BATCH)
        work = multiply_adds(images, captions)
        for hinges in ("max", "sum"):
            job = step(model, images, captions, hinges)
            what = f"{name}, training step with the {hinges} of hinges"
            measured(what, job)
            ratio(
                f"{what}, {4 * work / 1e9:,.0f} G multiply-adds", per_second(job), products(4 * work), unit="1/s", at_least=None
            )
        images, captions = encodings(count, 5 * count)
        job, work = ranking(model, images, captions), multiply_adds(images, captions)
        what = f"{name}, ranking {len(images):,} x {len(captions):,} pairs"
        measured(what, job)
        ratio(
            f"{what}, {work / 1e9:,.0f} G multiply-adds",
            per_second(job),
            products(work),
            unit="1/s",
            at_least=floor("ranking of scan"),
        )


if __name__ == "__main__":
    main()
