"""Intervals of compared rows, and tests between them, from ranks of queries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from typing import Any

import numpy as np
import pyarrow as pa

from train.evaluation.statistics import MetricIntervals, bootstrap_intervals, holm, paired_p_values, seed_p_value

RECALLS = ("recall_at_1", "recall_at_5", "recall_at_10")
LEVEL = 0.05
"""Level below which a p-value is significant."""

_MAX_ROWS_OF_ALL_PAIRS = 4


@dataclass(frozen=True)
class Queries:
    """Queries of one direction, sorted by id.

    Attributes:
        ids: query ids ``[Q]``.
        images: image ids ``[Q]``.
        ranks: ranks ``[Q]`` from 1; ``[S, Q]`` of several runs.
    """

    ids: np.ndarray
    images: np.ndarray
    ranks: np.ndarray

    @classmethod
    def of(cls, table: pa.Table) -> Queries:
        """Read the rows of `train.evaluation.ranks`."""
        table = table.sort_by("query_id")
        ids, images, ranks = (table[name].to_numpy() for name in ("query_id", "image_id", "rank"))
        return cls(ids, images, ranks)

    def recall(self, measure: str) -> list[float]:
        """Return a recall in percent, of each run."""
        return (100 * (np.atleast_2d(self.ranks) <= int(measure.rpartition("_")[2])).mean(1)).tolist()


@dataclass(frozen=True)
class Difference:
    """Difference of a recall between two rows.

    Attributes:
        place: where the rows were measured.
        rows: names of the rows.
        difference: difference of the first row to the second, in percentage points.
        p_value: two-sided, over images, adjusted for all differences of a comparison.
        seed_p_value: two-sided, over seeds, adjusted likewise; None without two runs of each row.
    """

    place: Any
    measure: str
    rows: tuple[str, str]
    difference: float
    p_value: float
    seed_p_value: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values without the place, for JSON."""
        return {name: value for name, value in vars(self).items() if name != "place"} | {"rows": list(self.rows)}


def intervals_of(rows: Mapping[str, Queries]) -> dict[str, MetricIntervals]:
    """Return the confidence intervals of each row."""
    return {name: bootstrap_intervals(queries.ranks, queries.images) for name, queries in rows.items()}


def differences(place: Any, rows: Mapping[str, Queries]) -> Iterator[Difference]:
    """Test rows of the same queries, without adjustment, see `adjust`.

    Up to four rows are tested in all pairs, more rows each against the best of a recall.
    """

    @cache
    def p_values(first: str, second: str) -> dict[str, float]:
        return paired_p_values(rows[first].ranks, rows[second].ranks, rows[first].images)

    for measure in RECALLS:
        ordered = sorted(rows, key=lambda name: -np.mean(rows[name].recall(measure)))
        pairs = (
            combinations(ordered, 2) if len(rows) <= _MAX_ROWS_OF_ALL_PAIRS else ((ordered[0], name) for name in ordered[1:])
        )
        for pair in pairs:
            recalls = [rows[name].recall(measure) for name in pair]
            seeds = seed_p_value(*recalls) if min(map(len, recalls)) > 1 else None
            difference = float(np.mean(recalls[0]) - np.mean(recalls[1]))
            yield Difference(place, measure, pair, difference, p_values(*pair)[measure], seeds)


def adjust(tests: Sequence[Difference]) -> list[Difference]:
    """Adjust the p-values of a comparison, over images and over seeds (Holm)."""
    seeds = iter(holm([test.seed_p_value for test in tests if test.seed_p_value is not None]))
    return [
        replace(test, p_value=p_value, seed_p_value=None if test.seed_p_value is None else next(seeds))
        for test, p_value in zip(tests, holm([test.p_value for test in tests]), strict=True)
    ]
