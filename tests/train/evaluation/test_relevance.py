import json
import math
from collections.abc import Sequence
from itertools import combinations

import numpy as np
import pytest
import torch

from schemas.escapes import to_json
from train.chance import chance_recall
from train.evaluation.metrics import RelevanceMetrics, bidirectional_ranks
from train.evaluation.relevance import RelevanceCollector
from train.evaluation.scores import evaluate
from train.runs.run import open_run

NAMES = ("recall_at_1", "recall_at_5", "recall_at_10", "ndcg_at_10", "r_precision", "map_at_r")


def plain_measures(order: list[bool], listed: int | None = None) -> list[float]:
    """Compute the measures of a query by their definitions, from the relevance of its items in order and its correct items."""
    right = sum(order) if listed is None else listed
    gain = sum(relevant / math.log2(place + 2) for place, relevant in enumerate(order[:10]))
    ideal = sum(1 / math.log2(place + 2) for place in range(min(right, 10)))
    precisions = [sum(order[:place]) / place if order[place - 1] else 0 for place in range(1, min(right, len(order)) + 1)]
    return [
        *(float(any(order[:cutoff])) for cutoff in (1, 5, 10)),
        gain / ideal,
        sum(order[:right]) / right,
        sum(precisions) / right,
    ]


def plain_order(scores: list[float], right: set[int]) -> list[bool]:
    """Return the relevance of items in order; wrong items precede right ones with an equal score."""
    ranking = sorted(range(len(scores)), key=lambda item: (-scores[item], item in right))
    return [item in right for item in ranking]


def plain_relevance(scores: np.ndarray, pairs: tuple[np.ndarray, np.ndarray]) -> list[float]:
    by_query: dict[int, set[int]] = {}
    for query, item in zip(*(indices.tolist() for indices in pairs), strict=True):
        by_query.setdefault(query, set()).add(item)
    rows = [plain_measures(plain_order(scores[query].tolist(), items)) for query, items in by_query.items()]
    return [100 * sum(column) / len(column) for column in zip(*rows, strict=True)]


def relevance_of(scores: torch.Tensor, row_pairs, column_pairs, owners: np.ndarray):
    definitions = {"own": (row_pairs, column_pairs)}
    collector = RelevanceCollector(
        lambda rows, columns: scores[rows][:, columns], definitions, tuple(scores.shape), scores.device
    )
    ranks, _ = bidirectional_ranks(collector, torch.arange(len(scores)), torch.from_numpy(owners))
    return collector.summarize()["own"], ranks


def pairs_of(rng: np.random.Generator, queries: int, items: int, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw 1 to ``most`` correct items for about two thirds of the queries."""
    chosen = [
        (query, item)
        for query in range(queries)
        if rng.random() < 0.7
        for item in rng.choice(items, rng.integers(1, most + 1), False)
    ]
    return tuple(rng.permutation(chosen).T)


@pytest.mark.parametrize("values", [3, 10**6], ids=["ties", "no ties"])
@pytest.mark.parametrize("scores_at_once", [1, 60, 10**6])
def test_measures_equal_the_definitions(values, scores_at_once, monkeypatch):
    monkeypatch.setattr("train.evaluation.metrics._SCORES_AT_ONCE", scores_at_once)
    rng = np.random.default_rng(values)
    scores = rng.permutation(10**6)[: 20 * 60].reshape(20, 60) % values / values
    tensor = torch.from_numpy(scores).float()
    row_pairs, column_pairs = pairs_of(rng, 20, 60, 25), pairs_of(rng, 60, 20, 12)
    relevance, ranks = relevance_of(tensor, row_pairs, column_pairs, np.repeat(np.arange(20), 3))
    for name, found, pairs, matrix in (
        ("rows", relevance["image_to_text"], row_pairs, scores),
        ("columns", relevance["text_to_image"], column_pairs, scores.T),
    ):
        assert found.values == pytest.approx(plain_relevance(matrix, pairs), abs=1e-12), name
        assert found.queries == len(set(pairs[0].tolist()))
    plain, _ = bidirectional_ranks(lambda rows, columns: tensor[rows][:, columns], torch.arange(20), torch.arange(60) // 3)
    assert all(map(torch.equal, ranks, plain))
    assert torch.equal(tensor, torch.from_numpy(scores).float())


def test_right_items_without_a_number_are_last():
    scores = torch.tensor([[torch.nan, 0.5, torch.nan], [0.1, 0.2, torch.nan]])
    pairs = (np.array([0, 1]), np.array([0, 1]))
    relevance, _ = relevance_of(scores, pairs, pairs, np.array([0, 1, 1]))
    # Row 0: place 3 of 3. Row 1: after the NaN of column 2. Columns 0 and 1: place 2 and, behind 0.5, place 2 of 2.
    assert relevance["image_to_text"].ndcg_at_10 == pytest.approx(100 * (1 / math.log2(4) + 1 / math.log2(3)) / 2)
    assert relevance["text_to_image"].ndcg_at_10 == pytest.approx(100 / math.log2(3))
    assert relevance["image_to_text"].recall_at_5 == 100


def chance_of(right: int, absent: int, items: int) -> tuple[float, ...]:
    """Return the chance of a query with correct items among the ranked ones, and of others that the data lack."""
    places = np.concatenate([np.arange(right), np.full(absent, 1 << 40)])
    wrong = np.where(places < 1 << 40, 0, places)
    return RelevanceMetrics.of(np.zeros(len(places), int), wrong, items, places < 1 << 40).chance


@pytest.mark.parametrize(
    ("right", "absent", "items"), [(1, 0, 1), (1, 0, 7), (3, 0, 7), (7, 0, 7), (2, 3, 7), (3, 9, 6), (0, 2, 6), (1, 12, 5)]
)
def test_chance_is_the_mean_over_all_orders(right, absent, items):
    """Listed items that the data lack are never found, and none of the orders has them."""
    orders = [[place in places for place in range(items)] for places in combinations(range(items), right)]
    means = 100 * np.mean([plain_measures(order, right + absent) for order in orders], axis=0)
    assert chance_of(right, absent, items) == pytest.approx(means, abs=1e-9)


def test_chance_is_the_mean_over_queries():
    chance = RelevanceMetrics.of(np.repeat([0, 1], [1, 4]), np.zeros(5, int), 15, np.ones(5, bool)).chance
    assert chance == pytest.approx(np.mean([chance_of(1, 0, 15), chance_of(4, 0, 15)], axis=0))
    assert chance[1] == pytest.approx(np.mean([chance_recall(5, right, 15) for right in (1, 4)]))


@pytest.mark.parametrize("folds", [1, 5])
def test_score_states_measures_over_the_captions_of_each_image(folds, write_run, toy):
    run = open_run(write_run(languages=("en", "de", "fr")))
    scores = evaluate(run, captions=toy.captions, features=toy.features, splits=["test"], folds=folds)
    for score in scores:
        relevance = score.relevance["captions"]
        assert relevance["image_to_text"].values[:3] == pytest.approx(score.retrieval.image_to_text.recalls)
        assert relevance["text_to_image"].values[:3] == pytest.approx(score.retrieval.text_to_image.recalls)
        assert relevance["image_to_text"].queries == score.retrieval.image_to_text.queries
        for direction, measures in relevance.items():  # Of the smaller galleries of folds.
            assert measures.chance[:3] == pytest.approx(score.chance[direction][:3])
    stored = json.loads(to_json(scores[0].to_dict()))["relevance"]["captions"]["image_to_text"]
    assert set(stored) == {*NAMES, "queries", "chance"}


def plain_best_wrong(scores: list[list[float]], queries: Sequence[int], items: Sequence[int]) -> list[int]:
    """Find the best wrong item of each query, the first of equal ones; -1 without one."""
    found = []
    for query, row in zip(queries, scores, strict=True):
        wrong = [item for item, image in enumerate(items) if image != query and row[item] > -float("inf")]
        found.append(max(wrong, key=row.__getitem__, default=-1))
    return found


@pytest.mark.parametrize("scores_at_once", [1, 7, 40, 10**6])
@pytest.mark.parametrize(("rows", "columns", "images"), [(1, 1, 1), (12, 9, 4), (9, 2, 3), (20, 31, 9)])
def test_best_wrong_items_equal_the_definition(scores_at_once, rows, columns, images, monkeypatch):
    monkeypatch.setattr("train.evaluation.metrics._SCORES_AT_ONCE", scores_at_once)
    generator = torch.Generator().manual_seed(rows)
    scores = torch.randint(5, (rows, columns), generator=generator).float()
    scores[torch.rand(rows, columns, generator=generator) < 0.1] = torch.nan
    scores[torch.rand(rows, columns, generator=generator) < 0.1] = -torch.inf
    of_rows, of_columns = (torch.randint(images, (size,), generator=generator).sort().values for size in (rows, columns))

    def source(chosen: slice, others: torch.Tensor) -> torch.Tensor:
        return scores[chosen][:, others]

    _, (row_wrong, column_wrong) = bidirectional_ranks(source, of_rows, of_columns)
    assert row_wrong.tolist() == plain_best_wrong(scores.tolist(), of_rows.tolist(), of_columns.tolist())
    assert column_wrong.tolist() == plain_best_wrong(scores.T.tolist(), of_columns.tolist(), of_rows.tolist())
