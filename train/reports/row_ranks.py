"""Ranks of the runs of rows: intervals, and recalls no lower than the best."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property, reduce
from itertools import product
from operator import and_
from typing import Any, TypeAlias

import numpy as np
import pyarrow.compute as pc

from train.evaluation.ranks import RANKS, read_ranks
from train.evaluation.statistics import CUTOFFS, MetricIntervals, bootstrap_intervals, holm, paired_p_values
from train.reports.row_results import results_folder

Key: TypeAlias = tuple[str, str, str, str]
"""Preset, language, portion and direction."""

_LEVEL = 0.05
_RESAMPLES = 2_000  # Tables have hundreds of cells.


@dataclass(frozen=True, eq=False)
class RowRanks:
    """Ranks ``[seeds, queries]``, from 1, and the image of each query ``[queries]``."""

    queries: tuple[str, ...]
    images: np.ndarray
    ranks: np.ndarray

    @cached_property
    def intervals(self) -> MetricIntervals:
        """Intervals of the means over seeds."""
        return bootstrap_intervals(self.ranks, self.images, resamples=_RESAMPLES)


def read_row_ranks(output: str, preset: str) -> dict[Key, RowRanks]:
    """Read the ranks of a row where all runs have the same queries.

    Raises:
        DatasetError: a file is damaged.
    """
    folders = [path.with_suffix("") for path in results_folder(output, preset).glob("seed-*.json")]
    if not folders or not all((folder / RANKS).exists() for folder in folders):  # Version 0.2 wrote no ranks.
        return {}
    tables, ranks = [read_ranks(folder).sort_by("query_id") for folder in folders], {}
    for group in tables[0].group_by(["language", "portion", "direction"]).aggregate([]).to_pylist():
        parts = [table.filter(reduce(and_, (pc.field(name) == value for name, value in group.items()))) for table in tables]
        queries = {tuple(part["query_id"].to_pylist()) for part in parts}
        if len(queries) == 1:
            images = parts[0]["image_id"].combine_chunks().dictionary_encode().indices.to_numpy()
            key = preset, group["language"], group["portion"], group["direction"]
            ranks[key] = RowRanks(queries.pop(), images, np.stack([part["rank"].to_numpy() for part in parts]))
    return ranks


def best_recalls(ranks: Mapping[Key, RowRanks]) -> set[tuple[Key, str]]:
    """Return keys and measures of the best recalls and of those that do not differ.

    Rows with the same queries are compared with the best: a paired randomization over images of means over seeds, at 5 % with
    Holm's correction over the rows.
    """

    @cache
    def p_values(best: Key, key: Key) -> Mapping[str, float]:
        return paired_p_values(ranks[best].ranks, ranks[key].ranks, ranks[key].images)

    groups: dict[tuple[Any, ...], list[Key]] = {}
    for key, row in ranks.items():
        groups.setdefault((key[1:], row.queries), []).append(key)
    results: set[tuple[Key, str]] = set()
    for keys, cutoff in product((keys for keys in groups.values() if len(keys) > 1), CUTOFFS):
        measure, means = f"recall_at_{cutoff}", [(ranks[key].ranks <= cutoff).mean() for key in keys]
        best = keys.pop(int(np.argmax(means)))
        adjusted = holm([p_values(best, key)[measure] for key in keys])
        keys.append(best)
        results |= {(key, measure) for key, p in zip(keys, (*adjusted, 1.0), strict=True) if p > _LEVEL}
    return results
