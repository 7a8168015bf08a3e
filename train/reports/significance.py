"""Tests between compared rows, from ranks of queries."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from typing import Any

import numpy as np

from train.chance import RECALLS
from train.evaluation.ranks import Queries
from train.evaluation.statistics import holm, paired_p_values, seed_p_value

LEVEL = 0.05
"""Level below which a p-value is significant."""


@dataclass(frozen=True)
class Difference:
    """Difference of a recall between two rows.

    Attributes:
        place: where the rows were measured.
        rows: the two rows, keys in the argument of `compare_rows`.
        difference: difference of the first row to the second, in percentage points.
        p_value: two-sided, over images, adjusted for all differences of a comparison.
        seed_p_value: two-sided, over seeds, adjusted likewise; None without two runs of each row.
    """

    place: Any
    measure: str
    rows: tuple[Any, Any]
    difference: float
    p_value: float
    seed_p_value: float | None = None

    @property
    def is_significant(self) -> bool:
        """Whether rows differ: over seeds if both have several, else over images."""
        return (self.p_value if self.seed_p_value is None else self.seed_p_value) < LEVEL

    def to_dict(self) -> dict[str, Any]:
        """Return plain values without the place, for JSON; rows by name."""
        return {name: value for name, value in vars(self).items() if name != "place"} | {
            "rows": [row.name for row in self.rows]
        }


def compare_rows(place: Any, rows: Mapping[Any, Queries], *, max_rows_of_all_pairs: int = 4) -> Iterator[Difference]:
    """Test rows of the same queries by key, without adjustment, see `adjust`.

    A few rows are tested in all pairs, more rows each against the best of a recall.
    """

    @cache
    def p_values(first: Any, second: Any) -> dict[str, float]:
        return paired_p_values(rows[first].ranks, rows[second].ranks, rows[first].images)

    for measure in RECALLS:
        ordered = sorted(rows, key=lambda name: -np.mean(rows[name].recall(measure)))
        firsts = ordered if len(rows) <= max_rows_of_all_pairs else ordered[:1]
        for pair in (pair for pair in combinations(ordered, 2) if pair[0] in firsts):
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


def not_worse(tests: Iterable[Difference]) -> set[tuple[Any, str, Any]]:
    """Return place, recall and row of recalls not significantly below the best."""
    tests = list(tests)
    seconds = {(test.place, test.measure, test.rows[1]) for test in tests}
    best = [test for test in tests if (test.place, test.measure, test.rows[0]) not in seconds]
    return {(test.place, test.measure, test.rows[1]) for test in best if not test.is_significant}


def best_rows(place: Any, rows: Mapping[Any, Queries]) -> set[tuple[Any, str, Any]]:
    """Return place, recall and row of the best recalls and of those not below them.

    Each row is tested against the best, with Holm's correction over the rows of a recall.
    """
    results, tests = set(), list(compare_rows(place, rows, max_rows_of_all_pairs=0))
    for measure in RECALLS:
        adjusted = adjust([test for test in tests if test.measure == measure])
        results |= not_worse(adjusted) | {(place, measure, test.rows[0]) for test in adjusted}
    return results
