"""Captions ranked among those of the same images in another language: what a pivot is for (Gella et al. 2017; Kádár et al. 2018).

Letters: ``C`` captions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations

import numpy as np
import torch

from train.data.captions import Captions
from train.data.splits import SplitData
from train.devices import upload
from train.evaluation.evaluation import Count, count_nothing, encode_captions, mean_scores, scores_between
from train.evaluation.metrics import CUTOFFS, Direction, chance_recall, ranks_between
from train.models.retrieval_model import RetrievalModel


@dataclass(frozen=True)
class CrossLingual:
    """How well captions find those of their images in another language; ``chance`` are those of a random order."""

    direction: Direction
    chance: tuple[float, ...]

    def to_dict(self) -> dict[str, object]:
        """Return plain values, for JSON."""
        return {**asdict(self.direction), "chance": list(self.chance)}


def evaluate_cross_lingual(
    members: Sequence[tuple[RetrievalModel, SplitData]], *, count: Count = count_nothing
) -> dict[tuple[str, str], CrossLingual]:
    """Rank the captions in each language among those in each other language.

    Right are all captions of the same image, of which the best-ranked counts. Images without captions in both languages take no
    part, so that two languages are measured as if there were no others. Scores are computed once for both directions, in the order
    of the model's languages, as where captions are trained against captions: the order similarity is not symmetric.

    Members are as `train.evaluation.evaluate_together` takes them.

    Returns:
        Results by language of the queries and language of those that they are ranked among; languages without a common image are
        left out.
    """
    captions = members[0][1].captions
    spoken = [name for name in members[0][0].languages if len(captions.rows_of(name))]
    rows = {name: _by_image(captions, captions.rows_of(name)) for name in spoken}
    encoded = {
        name: [encode_captions(model, data.captions.batch(rows[name]), name, count=count) for model, data in members]
        for name in spoken
    }
    device = members[0][0].device
    results = {}
    for pair in combinations(spoken, 2):
        common = np.intersect1d(*(captions.images[rows[name]] for name in pair))
        if not len(common):
            continue
        chosen = [np.flatnonzero(np.isin(captions.images[rows[name]], common)) for name in pair]
        images = [np.searchsorted(common, captions.images[rows[name][of]]) for name, of in zip(pair, chosen, strict=True)]
        sources = [
            scores_between(
                model,
                *(encoded[name][n][upload(torch.from_numpy(of), model.device)] for name, of in zip(pair, chosen, strict=True)),
            )
            for n, (model, _) in enumerate(members)
        ]
        numbers = (torch.from_numpy(of).long() for of in images)
        ranks = ranks_between(mean_scores(sources), *numbers, device=device)
        for turn in (1, -1):
            (query, other), (of_queries, of_others) = pair[::turn], images[::turn]
            results[query, other] = CrossLingual(Direction.of(ranks[pair.index(query)]), _chance(of_queries, of_others))
    return results


def _by_image(captions: Captions, rows: np.ndarray) -> np.ndarray:
    return rows[np.argsort(captions.images[rows], kind="stable")]


def _chance(of_queries: np.ndarray, of_others: np.ndarray) -> tuple[float, ...]:
    """Return the recalls of a random order; the arguments are the image of each caption."""
    right, queries = np.bincount(of_others), np.bincount(of_queries)
    return tuple(
        float(np.average([chance_recall(cutoff, int(n), len(of_others)) for n in right], weights=queries)) for cutoff in CUTOFFS
    )
