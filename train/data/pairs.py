"""Captions of the same image, by language and in pairs of two languages.

Letters in shapes: ``N`` captions, ``I`` images, ``L`` languages, ``P`` pairs of captions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from train.data.captions import Captions


@dataclass(frozen=True)
class ByImage:
    """Captions grouped by image and language.

    Attributes:
        rows: int32 ``[N]``, rows of `Captions`, group by group.
        starts: int64 ``[I, L]``, position in ``rows`` at which each group begins.
        counts: int64 ``[I, L]``, number of captions in each group.
    """

    rows: np.ndarray
    starts: np.ndarray
    counts: np.ndarray

    @classmethod
    def of(cls, captions: Captions) -> ByImage:
        """Group captions; within a group they keep their order."""
        shape = len(captions.image_ids), len(captions.language_names)
        groups = captions.images.astype(np.int64) * shape[1] + captions.languages
        counts = np.bincount(groups, minlength=shape[0] * shape[1])
        rows = np.argsort(groups, kind="stable").astype(np.int32)
        return cls(rows, (np.cumsum(counts) - counts).reshape(shape), counts.reshape(shape))


@dataclass(frozen=True)
class CaptionPairs:
    """All pairs of captions of the same image in different languages.

    Attributes:
        first: int32 ``[P]``, rows of `Captions` in the language that comes first in ``language_names``.
        second: int32 ``[P]``, rows in the other language.
    """

    first: np.ndarray
    second: np.ndarray

    def __len__(self) -> int:
        return len(self.first)


def caption_pairs(captions: Captions) -> CaptionPairs:
    """Enumerate the caption pairs of every image, over all pairs of languages (Kádár et al. 2018, section 3).

    Captions in the same language form no pair. With five English and five German captions an image has 25 pairs; with one French
    and one Czech caption added it has 46 (section 6.2): 5 x 5, four times 5 x 1, and 1.
    """
    by_image = ByImage.of(captions)
    firsts, seconds = [np.zeros(0, np.int32)], [np.zeros(0, np.int32)]
    for a in range(len(captions.language_names)):
        for b in range(a + 1, len(captions.language_names)):
            counts = by_image.counts[:, a] * by_image.counts[:, b]  # [I]
            image = np.repeat(np.arange(len(counts)), counts)  # [P]
            number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)  # [P], from 0 in each image
            row, column = np.divmod(number, by_image.counts[image, b])
            firsts.append(by_image.rows[by_image.starts[image, a] + row])
            seconds.append(by_image.rows[by_image.starts[image, b] + column])
    return CaptionPairs(np.concatenate(firsts), np.concatenate(seconds))
