"""The images that single captions find, and the rank of the right one.

Letters: ``I`` images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from train.data.captions import Captions
from train.evaluation.evaluating import Count, count_nothing, encode_captions, scores_between
from train.evaluation.searching import Hit
from train.models.retrieval_model import Encoded, RetrievalModel
from train.reports.figure_examples import Example, ShownCaption


@dataclass(frozen=True)
class Ranking:
    """What a caption finds.

    Attributes:
        example: number of the example that the caption belongs to.
        caption: the caption.
        hits: the best images, best first.
        rank: rank of the right image, from 1; equal scores count against it.
        right: the right image with its score.
        images: number of images that were ranked.
    """

    example: int
    caption: ShownCaption
    hits: tuple[Hit, ...]
    rank: int
    right: Hit
    images: int

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        hits = [{"image_id": hit.image_id, "score": hit.score} for hit in self.hits]
        return {"example": self.example, **self.caption.to_dict(), "rank": self.rank, "images": self.images, "hits": hits}


def rank_examples(
    model: RetrievalModel,
    captions: Captions,
    images: Encoded,
    examples: Sequence[Example],
    *,
    top: int,
    count: Count = count_nothing,
) -> tuple[Ranking, ...]:
    """Rank, for each caption of the examples, the images that have a caption in its language, as an evaluation does.

    Args:
        model: the model.
        captions: captions of the split.
        images: its images, as the model encodes them.
        examples: the examples.
        top: number of images to keep.
        count: counts the captions that are encoded.

    Returns:
        A ranking for each caption, in the order of the examples.
    """
    rankings = {}
    shown = [(example, caption) for example in examples for caption in example.captions]
    for language in captions.language_names:
        queries = [(example, caption) for example, caption in shown if caption.key.language == language]
        if not queries:
            continue
        chosen = np.unique(captions.images[captions.rows_of(language)])
        rows = np.array([caption.row for _, caption in queries])
        encoded = encode_captions(model, captions.batch(rows), language, count=count)
        candidates = images[torch.from_numpy(chosen).long().to(model.device)]
        columns = torch.arange(len(rows), device=model.device)
        scores = scores_between(model, candidates, encoded)(slice(None), columns).cpu().numpy()  # [I, captions]
        for (example, caption), of_caption in zip(queries, scores.T, strict=True):
            right = int(np.searchsorted(chosen, example.image))
            order = ranked(of_caption, right)
            hits = [Hit(captions.image_ids[chosen[place]], float(of_caption[place])) for place in order.tolist()]
            rank = order.tolist().index(right) + 1
            rankings[caption.row] = Ranking(example.number, caption, tuple(hits[:top]), rank, hits[rank - 1], len(order))
    return tuple(rankings[caption.row] for _, caption in shown)


def ranked(scores: np.ndarray, right: int) -> np.ndarray:
    """Return the positions of scores ``[I]``, best first; what equals the right one, or is no number, comes before it."""
    wrong = np.arange(len(scores)) != right
    values = np.where(np.isnan(scores), np.where(wrong, np.inf, -np.inf), scores)
    return np.lexsort((np.arange(len(scores)), ~wrong, -values))
