"""Confidence intervals of recalls and median rank against the draws and the matrix products that they cannot do without."""

import numpy as np
from measuring import rate_of, ratio
from processor import machine
from targets import floor

from train.evaluation.statistics import bootstrap_intervals

IMAGES, CAPTIONS, RESAMPLES = 31_000, 5, 10_000
YARDSTICK_RESAMPLES = 500


def yardstick() -> None:
    """Draw images, count them, and multiply the counts by the hits, by one resample at a time."""
    generator, hits = np.random.default_rng(0), np.ones((IMAGES, 4))
    for _ in range(YARDSTICK_RESAMPLES):
        np.bincount(generator.integers(IMAGES, size=IMAGES), minlength=IMAGES) @ hits


def main() -> None:
    """Print the ratio and the seconds of both directions."""
    print(machine())
    images = np.repeat(np.arange(IMAGES), CAPTIONS)
    ranks = 1 + np.random.default_rng(0).geometric(0.02, size=len(images))
    directions = {"text to image": (ranks, images), "image to text": (ranks[:IMAGES], images[::CAPTIONS])}
    for name, direction in directions.items():
        seconds = []

        def ours(direction: tuple[np.ndarray, np.ndarray] = direction, seconds: list[float] = seconds) -> float:
            rate = rate_of(lambda: bootstrap_intervals(*direction, resamples=RESAMPLES), RESAMPLES)
            seconds.append(RESAMPLES / rate)
            return rate

        ratio(
            f"intervals, {name}",
            ours,
            lambda: rate_of(yardstick, YARDSTICK_RESAMPLES),
            unit="resamples/s",
            at_least=floor("intervals"),
        )
        print(f"intervals, {name}: {min(seconds):.1f} s for {RESAMPLES:,} resamples of {IMAGES:,} images")


if __name__ == "__main__":
    main()
