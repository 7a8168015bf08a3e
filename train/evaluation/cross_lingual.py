"""Cross-lingual retrieval: captions as queries for captions in other languages.

The image is the pivot between the languages (Gella et al. 2017; Kádár et al. 2018).

Letters: ``C`` captions.
"""

from dataclasses import asdict, dataclass, field
from itertools import combinations

import numpy as np
import pyarrow as pa
import torch

from train.chance import chance_measures
from train.evaluation.evaluation import Count, Members, embed_captions, mean_scores, no_progress, scores_between, take_rows
from train.evaluation.metrics import RecallMetrics, bidirectional_ranks
from train.evaluation.ranks import Queries, direction_table
from train.evaluation.statistics import MetricIntervals


@dataclass(frozen=True)
class CrossLingualRetrieval:
    """Metrics of captions as queries in another language, and those of chance.

    Attributes:
        ranks: ranks of the queries, see `train.evaluation.ranks`.
    """

    direction: RecallMetrics
    chance: tuple[float, ...]
    intervals: MetricIntervals
    ranks: pa.Table = field(repr=False, compare=False)

    def to_dict(self) -> dict[str, object]:
        """Return plain values, for JSON."""
        return {**asdict(self.direction), "chance": list(self.chance), "intervals": asdict(self.intervals)}


def evaluate_cross_lingual(
    members: Members, *, on_progress: Count = no_progress
) -> dict[tuple[str, str], CrossLingualRetrieval]:
    """Rank the captions in each language among those in each other language.

    All captions of the same image are right, and the best-ranked counts. Images without captions in both languages take no part, so
    that two languages are measured as if they were the only ones. Scores are computed once for both directions, in the order of the
    model's languages, as captions are trained against captions: the order similarity is not symmetric.

    Returns:
        Results by language of the queries and language of the candidates; pairs without a common image are left out.
    """
    captions = members[0][1].captions
    rows = {name: captions.rows_of(name) for name in members[0][0].languages}
    by_image = {name: indices[np.argsort(captions.images[indices], kind="stable")] for name, indices in rows.items()}
    rows = {name: indices for name, indices in by_image.items() if len(indices)}
    encoded = {
        name: [embed_captions(model, data.captions.batch(indices), name, on_progress=on_progress) for model, data in members]
        for name, indices in rows.items()
    }
    images_of = {name: captions.images[indices] for name, indices in rows.items()}
    results = {}
    for pair in combinations(rows, 2):
        common = np.intersect1d(*(images_of[name] for name in pair))
        if not len(common):
            continue
        candidates = {name: np.flatnonzero(np.isin(images_of[name], common)) for name in pair}
        images = [np.searchsorted(common, images_of[name][indices]) for name, indices in candidates.items()]
        sides = [[take_rows(item, indices) for item in encoded[name]] for name, indices in candidates.items()]
        sources = [scores_between(model, first, second) for (model, _), first, second in zip(members, *sides, strict=True)]
        scores, device = mean_scores(sources), members[0][0].device
        ranks, best_wrong = bidirectional_ranks(scores, *map(torch.from_numpy, images), device=device)
        ids = [captions.ids(rows[name][indices]) for name, indices in candidates.items()]
        for query, other in ((0, 1), (1, 0)):
            num_right = np.bincount(images[other])[images[query]]
            chance = chance_measures(num_right.tolist(), len(images[other]))
            query_images = np.array(captions.image_ids, object)[common[images[query]]]
            columns = ids[query], query_images, ranks[query], ids[other], best_wrong[query]
            table = direction_table(captions, pair[query], "text_to_text", *columns, candidates=pair[other])
            metrics, intervals = RecallMetrics.of(ranks[query]), Queries.of(table, direction="text_to_text").intervals
            results[pair[query], pair[other]] = CrossLingualRetrieval(metrics, chance, intervals, table)
    return results
