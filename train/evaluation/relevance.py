"""Measures over all correct items of queries, from the best scores of a ranking.

Scores are equal as in `train.evaluation.metrics`, and ties are pessimistic: a wrong item precedes right ones
with an equal score. Only the first positions count, so that the best scores of each query are enough.

Letters: ``P`` pairs of a query and a correct item, ``Q`` queries, ``K`` scores that are kept.
"""

from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from train.chance import DIRECTIONS
from train.data.captions import Captions
from train.evaluation.metrics import GAIN_CUTOFF, RelevanceMetrics, Scores, least_equal

OWN_CAPTIONS = "captions"
"""Name of the definition `captions_of_images`."""

_NEVER = 1 << 40  # Position beyond all.

Pairs: TypeAlias = tuple[np.ndarray, np.ndarray]
"""Query and correct item of each pair, int64 ``[P]``; -1 for a correct item that is no candidate. No other pair is repeated."""

RightItems: TypeAlias = Callable[[Captions, np.ndarray, np.ndarray], tuple[Pairs, Pairs] | None]
"""Definition of correct items: from captions, the rows of candidates and the images of candidates to pairs of both directions.

Pairs are positions in ``rows`` and ``images``, from images to captions, then from captions to images. None
for other captions than those that the definition is about.
"""


def captions_of_images(captions: Captions, rows: np.ndarray, images: np.ndarray) -> tuple[Pairs, Pairs]:
    """Pair each image with its captions; ``images`` ascend."""
    pairs = np.searchsorted(images, captions.images[rows]), np.arange(len(rows))
    return pairs, pairs[::-1]


class RelevanceCollector:
    """Source of scores that keeps the best of each row and column of another source.

    Args:
        definitions: pairs of both directions by name.
        shape: numbers of rows and columns.
    """

    def __init__(
        self,
        scores: Scores,
        definitions: Mapping[str, tuple[Pairs, Pairs]],
        shape: tuple[int, int],
        device: torch.device,
    ) -> None:
        self._scores, self._definitions, self._shape = scores, definitions, shape
        self._best = []  # Scores and items, float64 [2, Q, K].
        for side, (num_queries, num_items) in enumerate((shape, shape[::-1])):
            most_right = max(int(np.bincount(pairs[side][0]).max()) for pairs in definitions.values())
            depth = min(num_items, max(GAIN_CUTOFF, most_right) + most_right)  # At least as many wrong as may count.
            self._best.append(torch.full((2, num_queries, depth), -torch.inf, dtype=torch.float64, device=device))

    def __call__(self, rows: slice, columns: Tensor) -> Tensor:
        """Return a tile of scores."""
        tile = self._scores(rows, columns)
        if tile.numel():
            row_indices = torch.arange(rows.start, rows.stop, device=tile.device)
            _keep_best_scores(self._best[0], tile, row_indices, columns)
            _keep_best_scores(self._best[1], tile.T, columns, row_indices)
        return tile

    def summarize(self) -> dict[str, dict[str, RelevanceMetrics]]:
        """Return the measures by definition and direction."""
        measures: dict[str, dict[str, RelevanceMetrics]] = {name: {} for name in self._definitions}
        for side, direction in enumerate(DIRECTIONS):
            best, num_items = self._best[side].cpu(), self._shape[1 - side]
            for name, pairs in self._definitions.items():
                measures[name][direction] = _measure_direction(best, pairs[side], num_items)
        return measures


def _keep_best_scores(best: Tensor, tile: Tensor, queries: Tensor, items: Tensor) -> None:
    """Keep the best scores of the queries of a tile; NaN is the greatest."""
    scores, positions = tile.topk(min(best.shape[2], len(items)))
    scores = scores.clamp(min=torch.finfo(scores.dtype).min)  # Greater than that of no item.
    found = torch.cat([best[:, queries], torch.stack([scores.double(), items[positions].double()])], 2)
    order = found[0].topk(best.shape[2]).indices
    best[:, queries] = found.gather(2, order.expand(2, -1, -1))


def _measure_direction(best: Tensor, pairs: Pairs, num_items: int) -> RelevanceMetrics:
    """Measure a direction from the best scores and items of its queries."""
    (queries, right), scores = pairs, best[0].float()  # As computed: the least equal score is rounded to float32.
    keys = queries * (num_items + 1) + right
    kept = np.arange(len(scores))[:, None] * (num_items + 1) + best[1].long().numpy()
    is_right = np.isin(kept, keys)
    found, columns = is_right.nonzero()
    bounds = least_equal(scores[found, columns].nan_to_num(-torch.inf, torch.inf, -torch.inf))
    num_wrong = ((~(scores[found] < bounds[:, None])).numpy() & ~is_right[found]).sum(1)
    is_missing = ~np.isin(keys, kept)
    missing, is_item = queries[is_missing], np.concatenate([np.ones(len(found), bool), right[is_missing] >= 0])
    counts = np.concatenate([num_wrong, np.full(len(missing), _NEVER)])
    return RelevanceMetrics.of(np.concatenate([found, missing]), counts, num_items, is_item)
