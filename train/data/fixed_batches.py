"""Batches of a split that are the same every time: what a loss on the validation split is measured on."""

from __future__ import annotations

import numpy as np

from train.config.sections import LossConfig, ScheduleConfig
from train.data.captions import Captions
from train.data.pairs import ByImage, caption_pairs
from train.data.sampling import Batch, ImageSampler, ShuffledRows

_SEED = 0  # Not the run's: the losses of several runs are measured on the same batches.


def fixed_batches(captions: Captions, schedule: ScheduleConfig, loss: LossConfig) -> list[Batch]:
    """Return batches composed as those that a configuration trains on, in an order that depends on the captions alone.

    Each caption takes part once: for ``tasks`` in a batch of its language, beside which as many batches of caption pairs are drawn
    as a training would draw on average; for ``images`` in the passes of `train.data.ImageSampler`.

    Args:
        captions: captions of the split.
        schedule: kind and size of the batches.
        loss: probability of caption pairs.

    Returns:
        The batches; none for ``images`` if no image has captions in every language.
    """
    if schedule.batches == "images":
        complete = np.flatnonzero((ByImage.of(captions).counts > 0).all(1))
        if not len(complete):
            return []
        sampler = ImageSampler(captions.select(np.isin(captions.images, complete)), schedule.batch_size, seed=_SEED)
        rows_of = np.flatnonzero(np.isin(captions.images, complete))
        batches = [sampler.next() for _ in range(sampler.epoch_steps)]
        return [
            Batch("images", tuple(rows_of[rows] for rows in batch.captions), batch.images, batch.languages) for batch in batches
        ]
    batches = []
    for number, language in enumerate(captions.language_names):
        rows = captions.rows_of(language)
        for chosen in _pass(len(rows), schedule.batch_size, number) if loss.c2c_probability < 1 else ():
            batches.append(Batch("c2i", (rows[chosen],), captions.images[rows[chosen]], (language,)))
    if loss.c2c_probability > 0:
        pairs = caption_pairs(captions)
        share = loss.c2c_probability / (1 - loss.c2c_probability) if loss.c2c_probability < 1 else 1.0
        drawn = np.random.default_rng(_SEED).permutation(len(pairs))[: round(share * len(captions))]
        for chosen in _pass(len(drawn), schedule.batch_size, len(captions.language_names)):
            sides = tuple(side[drawn[chosen]].astype(np.int64) for side in (pairs.first, pairs.second))
            batches.append(Batch("c2c", sides, captions.images[sides[0]], tuple(map(captions.language_of, sides))))
    return batches


def _pass(count: int, batch_size: int, number: int) -> list[np.ndarray]:
    """Return all of so many rows, shuffled, in batches."""
    if not count:
        return []
    rows = ShuffledRows(count, batch_size, (_SEED, number))
    return [rows.next() for _ in range(rows.epoch_steps)]
