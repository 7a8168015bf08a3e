"""Samplers of captions and images for batches: shuffled, seeded and resumable.

A sampler has a position. The order of a pass is a function of the seed and the index of the pass. A restored
sampler returns the batches of an uninterrupted one.

Shapes: ``I`` images, ``L`` languages, ``B`` rows of a batch.
"""

import logging
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np

from schemas.errors import UsageError
from train.config.sections import LossConfig, ScheduleConfig
from train.data.captions import ByImage, Captions, caption_pairs

BUCKET_BATCHES = 32
"""Number of batches in a pool for bucketing by length."""

logger = logging.getLogger(__name__)

Position = Mapping[str, Any]

# Independent streams of random numbers from one seed.
_TASK, _ROWS, _PAIRS, _IMAGES = range(4)

_FIXED_SEED = 0  # Not the run's: validation losses of several runs are measured on the same batches.


@dataclass(frozen=True)
class Batch:
    """The rows of captions in a batch, and their images.

    Attributes:
        task: ``c2i``, images and their captions in one language; ``c2c``, captions of the same image in two
            languages; ``images``, distinct images with one caption in every language.
        captions: rows of `Captions`, int64 ``[B]``: one array for ``c2i``, two for ``c2c``, one per language for ``images``.
        images: int32 ``[B]``, positions in ``Captions.image_ids``.
        languages: language of each array in ``captions``; None for mixed languages.
    """

    task: Literal["c2i", "c2c", "images"]
    captions: tuple[np.ndarray, ...]
    images: np.ndarray
    languages: tuple[str | None, ...]

    @property
    def pairs(self) -> int:
        """Number of pairs of an image and a caption, or for ``c2c`` of two captions."""
        return len(self.images) * (1 if self.task == "c2c" else len(self.captions))


class _Passes:
    """Consecutive passes over shuffled batches."""

    def __init__(self) -> None:
        self._seek(0, 0)

    @property
    def epoch_steps(self) -> int:
        """Number of batches in a pass."""
        return len(self._batches)

    @property
    def epoch(self) -> int:
        """Number of complete passes."""
        return self._epoch + self._batch_index // len(self._batches)

    def position(self) -> dict[str, Any]:
        """Return the position in the pass."""
        return {"epoch": self._epoch, "position": self._batch_index}

    def restore(self, position: Position) -> None:
        """Restore a position."""
        self._seek(position["epoch"], position["position"])

    def next(self) -> Any:
        """Return the next batch."""
        if self._batch_index == len(self._batches):
            self._seek(self._epoch + 1, 0)
        self._batch_index += 1
        return self._batches[self._batch_index - 1]

    def _seek(self, epoch: int, position: int) -> None:
        self._batches = self._shuffle(epoch)
        if not 0 <= position <= len(self._batches):
            raise ValueError(f"position {position!r} is not in a pass of {len(self._batches):,} batches")
        self._epoch, self._batch_index = epoch, position

    @abstractmethod
    def _shuffle(self, epoch: int) -> list[Any]:
        """Return the batches of a pass."""


class EpochBatches(_Passes):
    """Batches of rows, reshuffled for each pass (Kádár et al. 2018, section 3).

    Every row occurs once per pass. The last batch of a pass may be shorter.

    Args:
        lengths: ``[count]``, number of tokens of each row, for bucketing: the rows of every `BUCKET_BATCHES`
            consecutive batches are sorted by length and split into batches, which are shuffled.
    """

    def __init__(self, count: int, batch_size: int, seed: tuple[int, ...], *, lengths: np.ndarray | None = None) -> None:
        self._count, self._batch_size, self._seed, self._lengths = count, batch_size, seed, lengths
        super().__init__()

    def _shuffle(self, epoch: int) -> list[np.ndarray]:
        rng = np.random.default_rng((*self._seed, epoch))
        order = rng.permutation(self._count)
        if self._lengths is None:
            return _batches_of(order, self._batch_size)
        shuffled: list[np.ndarray] = []
        for pool in _batches_of(order, BUCKET_BATCHES * self._batch_size):
            batches = _batches_of(pool[np.argsort(self._lengths[pool], kind="stable")], self._batch_size)
            shuffled += [batches[index] for index in rng.permutation(len(batches))]
        return shuffled


def _batches_of(order: np.ndarray, batch_size: int) -> list[np.ndarray]:
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


class TaskSampler:
    """Sampler of the training procedure of Kádár et al. 2018, figure 2.

    Each batch is c2c with some probability, otherwise c2i. A c2i batch is the next one of a random language; all languages are
    equally likely, and each is reshuffled after a pass. A c2c batch is drawn from all `caption_pairs`, and may mix languages.

    An epoch covers every image-caption pair once on average; with one language and without c2c, exactly once.

    Args:
        c2c_probability: 1 - p in figure 2, where p is the probability of c2i.
        bucket_by_length: batch captions of similar length, see `EpochBatches`. Faster, but negatives are then
            of similar length, unlike in the papers.

    Raises:
        UsageError: a language has no captions, or no image has captions in two languages for c2c.
    """

    def __init__(
        self, captions: Captions, batch_size: int, *, seed: int, c2c_probability: float = 0.0, bucket_by_length: bool = False
    ) -> None:
        self._captions = captions
        self._seed = seed
        self._c2c_probability = c2c_probability
        self._step = 0
        self._rows = {name: captions.rows_of(name) for name in captions.language_names}
        for name, rows in self._rows.items():
            if not len(rows):
                raise UsageError(f"the training split has no captions in language {name!r}")
        lengths = captions.lengths
        self._languages = {
            name: EpochBatches(len(rows), batch_size, (seed, _ROWS, index), lengths=lengths[rows] if bucket_by_length else None)
            for index, (name, rows) in enumerate(self._rows.items())
        }
        self._pairs = caption_pairs(captions) if c2c_probability > 0 else None
        if self._pairs is not None:
            if not len(self._pairs):
                raise UsageError("loss.c2c_probability is not 0, but no image has captions in two languages: set it to 0")
            # The longer caption of a pair determines the number of time steps.
            longer = lengths[self._pairs].max(axis=1) if bucket_by_length else None
            self._shuffled_pairs = EpochBatches(len(self._pairs), batch_size, (seed, _PAIRS), lengths=longer)

    @property
    def epoch_steps(self) -> int:
        """Number of batches that cover the image-caption pairs once on average."""
        if self._c2c_probability == 1:
            return self._shuffled_pairs.epoch_steps
        return round(sum(rows.epoch_steps for rows in self._languages.values()) / (1 - self._c2c_probability))

    @property
    def epoch(self) -> int:
        """Number of complete epochs."""
        return self._step // self.epoch_steps

    def next(self) -> Batch:
        """Return the next batch."""
        rng = np.random.default_rng((self._seed, _TASK, self._step))
        self._step += 1
        if self._pairs is not None and rng.random() < self._c2c_probability:
            sides = tuple(self._pairs[self._shuffled_pairs.next()].T.astype(np.int64))
            return Batch("c2c", sides, self._captions.images[sides[0]], tuple(map(self._captions.language_of, sides)))
        name = self._captions.language_names[rng.integers(len(self._languages))]
        rows = self._rows[name][self._languages[name].next()]
        return Batch("c2i", (rows,), self._captions.images[rows], (name,))

    def position(self) -> dict[str, Any]:
        """Return the step, and the position in each language and in the caption pairs."""
        languages = {name: rows.position() for name, rows in self._languages.items()}
        position: dict[str, Any] = {"step": self._step, "languages": languages}
        return position if self._pairs is None else {**position, "pairs": self._shuffled_pairs.position()}

    def restore(self, position: Position) -> None:
        """Restore a position."""
        self._step = position["step"]
        for name, rows in self._languages.items():
            rows.restore(position["languages"][name])
        if self._pairs is not None:
            self._shuffled_pairs.restore(position["pairs"])


class ImageSampler(_Passes):
    """Sampler of images with one caption per language (Gella et al. 2017, section 4).

    An epoch covers every caption once, in passes over the images. Pass n uses the n-th caption of each image in each language, in
    an order that is shuffled in each epoch. An image with fewer captions in one language than in another repeats them in turn; with
    fewer in all languages, it occurs in fewer passes. The last batch of a pass may be shorter.

    Images without captions in some language are excluded with a warning.

    Raises:
        UsageError: no image has captions in every language.
    """

    def __init__(self, captions: Captions, batch_size: int, *, seed: int) -> None:
        self._captions, self._batch_size, self._seed = captions, batch_size, seed
        by_image = ByImage.of(captions)
        self._images = np.flatnonzero((by_image.counts > 0).all(1))
        if not len(self._images):
            raise UsageError(f"no image has captions in every one of {', '.join(captions.language_names)}: nothing to train on")
        left_out = int((by_image.counts > 0).any(1).sum()) - len(self._images)
        if left_out:
            logger.warning("%d images lack captions in some language; training continues with %d", left_out, len(self._images))
        self._counts = by_image.counts[self._images]  # [I, L]
        self._starts = by_image.starts[self._images]  # [I, L]
        self._groups = np.repeat(np.arange(by_image.counts.size), by_image.counts.ravel())  # [N], group of each of `_rows`.
        self._rows = by_image.rows.astype(np.int64)
        super().__init__()

    def next(self) -> Batch:
        """Return the next batch."""
        pass_index, chosen = super().next()
        starts, counts = self._starts[chosen], self._counts[chosen]  # [B, L]
        rows = self._order[starts + pass_index % counts]  # [B, L]
        images = self._images[chosen].astype(np.int32)
        return Batch("images", tuple(rows.T), images, self._captions.language_names)

    def _shuffle(self, epoch: int) -> list[tuple[int, np.ndarray]]:
        rng = np.random.default_rng((self._seed, _IMAGES, epoch))
        # A random order within each image and language.
        self._order = self._rows[np.lexsort((rng.random(len(self._rows)), self._groups))]
        max_captions = self._counts.max(1)
        return [
            (pass_index, batch)
            for pass_index in range(int(max_captions.max()))
            for batch in _batches_of(rng.permutation(np.flatnonzero(max_captions > pass_index)), self._batch_size)
        ]


Sampler: TypeAlias = TaskSampler | ImageSampler
"""Endless source of batches; a position is restored by a sampler with the same arguments."""


def fixed_batches(captions: Captions, schedule: ScheduleConfig, loss: LossConfig) -> list[Batch]:
    """Return validation batches, composed like training batches, in a fixed order.

    Each caption occurs once: for ``tasks`` in a batch of its language, with as many c2c batches as training
    has on average; for ``images`` in the passes of `ImageSampler`.

    Returns:
        The batches; none for ``images`` if no image has captions in every language.
    """
    if schedule.batches == "images":
        complete = np.flatnonzero((ByImage.of(captions).counts > 0).all(1))
        if not len(complete):
            return []
        rows = np.flatnonzero(np.isin(captions.images, complete))
        sampler = ImageSampler(captions.select(rows), schedule.batch_size, seed=_FIXED_SEED)
        batches = [sampler.next() for _ in range(sampler.epoch_steps)]
        return [replace(batch, captions=tuple(rows[chosen] for chosen in batch.captions)) for batch in batches]
    batches = []
    for index, language in enumerate(captions.language_names if loss.c2c_probability < 1 else ()):
        rows = captions.rows_of(language)
        for chosen in _shuffled_batches(len(rows), schedule.batch_size, index):
            batches.append(Batch("c2i", (rows[chosen],), captions.images[rows[chosen]], (language,)))
    if loss.c2c_probability > 0:
        pairs = caption_pairs(captions)
        share = loss.c2c_probability / (1 - loss.c2c_probability) if loss.c2c_probability < 1 else 1.0
        sample = np.random.default_rng(_FIXED_SEED).permutation(len(pairs))[: round(share * len(captions))]
        for chosen in _shuffled_batches(len(sample), schedule.batch_size, len(captions.language_names)):
            sides = tuple(pairs[sample[chosen]].T.astype(np.int64))
            batches.append(Batch("c2c", sides, captions.images[sides[0]], tuple(map(captions.language_of, sides))))
    return batches


def _shuffled_batches(count: int, batch_size: int, stream: int) -> list[np.ndarray]:
    rows = EpochBatches(count, batch_size, (_FIXED_SEED, stream))
    return [rows.next() for _ in range(rows.epoch_steps)]
