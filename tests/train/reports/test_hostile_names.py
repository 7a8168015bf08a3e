"""Names that are equal after formatting, or hold separators: every number is still that of its own ranks."""

import json
from collections.abc import Mapping
from functools import partial
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from schemas.escapes import to_json
from schemas.storage.folder import Folder
from train.chance import DIRECTIONS, RECALLS
from train.data.splits import TEST_SPLITS
from train.evaluation.ranks import SCHEMA, write_ranks
from train.evaluation.statistics import (
    Interval,
    MetricIntervals,
    bootstrap_intervals,
    holm,
    paired_p_values,
)
from train.reports import significance
from train.reports.comparison import compare_runs
from train.reports.reproduce_report import RowMeasurement, read_report
from train.reports.row_results import write_result

Place = tuple[str, tuple[str, ...], int]
"""Split, portions and folds."""
Ranks = Mapping[str, np.ndarray]
"""Ranks by direction, each query of an image of its own."""

INTERVALS, P_VALUES = partial(bootstrap_intervals, resamples=200), partial(paired_p_values, draws=200)
IMAGES = 12
GROUPS = {
    "equal prefixes": (("job-1", "job-2"), ("job-3", "job-4"), ("job",)),
    "prefixes like other rows": (("job-1", "job-2"), ("job-3", "job-4"), ("job-1, …",), ("job (2 seeds)",)),
    "no prefixes": (("a", "b"), ("c", "d"), ("all",), ("a, …",)),
    "names of fields": (("language-1", "language-2"), ("split",), ("direction",), ("name",), ("portions",)),
    "control characters": (("x\t1", "x\t2"), ("x\\t3", "x\\t4"), ("x\n",), ("x\\n",)),
    "normalization": (("é-1", "é-2"), ("e\u0301-1", "e\u0301-2"), ("é",), ("e\u0301",)),
    "separators": (("a, b-1", "a, b-2"), ("a, b", "a, b0"), ("a - b",), ("deviation",)),
    "labels": (("a|1", "a|2"), ("a · 1", "a · 2"), ("a -> b",), ("a:",)),
}
PLACES = (
    *(
        ("test", ("a,b",), 1),
        ("test", ("a",), 1),
        ("test", ("b",), 1),
        ("test (5 folds)", ("a",), 1),
        ("test (hard)", ("a",), 1),
    ),
    *(("te", ("st a",), 1), ("a test", ("b",), 1), ("a", ("test b",), 1), ("direction", ("captions",), 1)),
)
FOLDED = (("test", ("a",), 5), ("test (hard)", ("a",), 5))  # Of one run, beside the split "test (5 folds)" of others.


@pytest.fixture(autouse=True)
def few_draws(monkeypatch):
    monkeypatch.setattr("train.evaluation.ranks.bootstrap_intervals", INTERVALS)
    monkeypatch.setattr(significance, "paired_p_values", P_VALUES)


def draw_ranks(rng: np.random.Generator) -> Ranks:
    return {direction: rng.geometric(rng.uniform(0.05, 0.6), IMAGES) for direction in DIRECTIONS}


def recall(ranks: np.ndarray, measure: str) -> float:
    return 100 * np.count_nonzero(ranks <= int(measure.removeprefix("recall_at_"))) / len(ranks)


def write_evaluation(folder: Path, ranks: Mapping[Place, Ranks]) -> list[dict]:
    """Write ranks, and return the scores of ``evaluation.json``."""
    rows, scores = [], []
    for (split, (portion,), folds), by_direction in ranks.items():
        place = {"split": split, "language": "en", "portion": portion}
        score = {**place, "chance": {}, **({"folds": folds} if folds > 1 else {})}
        for direction, values in by_direction.items():
            recalls = {name: recall(values, name) for name in RECALLS}
            score[direction] = {**recalls, "median_rank": float(np.median(values)), "queries": IMAGES}
            ids = [f"{index:02d}" if direction == DIRECTIONS[0] else f"{index:02d}/en/{portion}/0" for index in range(IMAGES)]
            rows += [
                {**place, "direction": direction, "query_id": query_id, "image_id": f"{index:02d}", "rank": rank}
                for index, (query_id, rank) in enumerate(zip(ids, values.tolist(), strict=True))
            ]
        score["sum_of_recalls"] = sum(score[direction][name] for direction, name in product(DIRECTIONS, RECALLS))
        scores.append(score)
    write_ranks(Folder(str(folder)), pa.Table.from_pylist(rows, schema=SCHEMA))
    return scores


def stored_interval(row: Mapping) -> MetricIntervals:
    return MetricIntervals(*(Interval(**row[name]) for name in (*RECALLS, "median_rank")))


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_compare_of_hostile_names_has_intervals_and_tests_of_its_own_ranks(groups, tmp_path):
    rng, own = np.random.default_rng(len(groups[0][0])), {}
    for number, names in enumerate(groups):
        places = FOLDED if number == len(groups) - 1 else PLACES
        for seed, name in enumerate(names):
            own[name] = {place: draw_ranks(rng) for place in places}
            scores = write_evaluation(tmp_path / name, own[name])
            run = {"settings": {"seed": seed, "loss.margin": number}}
            (tmp_path / name / "evaluation.json").write_text(to_json({"runs": [run], "scores": scores}))
    comparison = compare_runs([str(tmp_path / name) for name in own])
    assert {run.name: Path(run.folder).name for run in comparison.runs} == {name: name for name in own}
    rows = {row.name: tuple(run.name for run in row.runs) for row in comparison.rows}
    assert sorted(rows.values()) == sorted(groups)  # No two rows have one name.
    assert all(rows[name] == (name,) for name in own.keys() & rows.keys())
    plain = json.loads(json.dumps(comparison.to_dict()))

    def place_of(entry: Mapping) -> Place:
        return entry["split"], tuple(entry["portions"]), entry["folds"]

    def ranks_of(row: str, entry: Mapping) -> np.ndarray:
        return np.stack([own[name][place_of(entry)][entry["direction"]] for name in rows[row]])

    assert {place_of(gallery) for gallery in plain["galleries"]} == {*PLACES, *FOLDED}
    seen = []
    for entry in plain["intervals"]:
        for row in entry["rows"]:
            assert stored_interval(row) == INTERVALS(ranks_of(row["name"], entry), np.arange(IMAGES))
            seen.append((place_of(entry), entry["direction"], row["name"]))
    names = {runs: name for name, runs in rows.items()}
    *others, folded = [names[tuple(group)] for group in groups]
    expected = [*product(PLACES, DIRECTIONS, others), *product(FOLDED, DIRECTIONS, [folded])]
    assert sorted(seen) == sorted(expected)

    tests, p_values = plain["tests"], []
    for test in tests:
        first, second = (ranks_of(row, test) for row in test["rows"])
        recalls = [[recall(ranks, test["measure"]) for ranks in runs] for runs in (first, second)]
        assert test["difference"] == pytest.approx(np.mean(recalls[0]) - np.mean(recalls[1]))
        assert (test["seed_p_value"] is None) == (min(map(len, recalls)) == 1)
        p_values.append(P_VALUES(first, second, np.arange(IMAGES))[test["measure"]])
    assert [test["p_value"] for test in tests] == holm(p_values)
    tested = [(place_of(test), test["direction"], test["measure"], frozenset(test["rows"])) for test in tests]
    assert len(set(tested)) == len(tested)
    pairs = [frozenset(pair) for pair in combinations(others, 2)]
    assert set(tested) == set(product(PLACES, DIRECTIONS, RECALLS, pairs))

    differences, *_, scores, _ = comparison.to_tables()
    assert len(differences.headings) == 1 + len(rows)
    intervals = [row for row in scores.values if row[0] == "  95 % interval"]
    assert len(intervals) == len(seen) // 2


def test_reproduce_of_hostile_names_has_intervals_and_marks_of_its_own_ranks(tmp_path):
    """A portion in both test splits, and portions that differ by case or separators, are rows of their own."""
    rng, own, seeds = np.random.default_rng(0), {}, range(2)
    places: list[Place] = [(split, (portion,), 1) for split in TEST_SPLITS for portion in ("comparable", "A,b", "a,b", "a · b")]
    presets = ("gella2017/vse-en", "gella2017/oe-en")
    for preset, seed in product(presets, seeds):
        result = tmp_path / "results" / preset / f"seed-{seed}.json"
        own[preset, seed] = {place: draw_ranks(rng) for place in places}
        result.with_suffix("").mkdir(parents=True)
        scores = write_evaluation(result.with_suffix(""), own[preset, seed])
        write_result(result, {"feature": "x", "untrained": [], "overrides": [], "step": 4, "scores": scores})
    report = read_report(str(tmp_path), "gella2017")
    sections = [(section.title, line) for section in (*report.sections, *report.further) for line in section.lines if line.runs]
    assert len({title for title, _ in sections}) == len(places)
    seen = []
    for title, line in sections:
        place = line.row.split, (line.row.portion,), 1
        assert line.runs == len(seeds)
        for direction, measure in product(DIRECTIONS, RECALLS):
            ranks = {preset: [own[preset, seed][place][direction] for seed in seeds] for preset in presets}
            cell: RowMeasurement = line.cells[direction, measure]
            assert cell.values == tuple(recall(values, measure) for values in ranks[line.row.preset])
            intervals = INTERVALS(np.stack(ranks[line.row.preset]), np.arange(IMAGES))
            assert cell.interval == getattr(intervals, measure)
            assert cell.not_below_best  # Two seeds are never significantly worse.
            assert (cell.published is None) == (place != (TEST_SPLITS[0], ("comparable",), 1))
        seen.append((place, line.row.preset))
        assert line.row.portion in title
    assert sorted(seen) == sorted(product(places, presets))
