import numpy as np
import pyarrow as pa
import pytest

from schemas.storage.folder import Folder
from train.evaluation.ranks import SCHEMA, write_ranks
from train.reports import row_ranks
from train.reports.row_ranks import RowRanks, best_recalls, read_row_ranks
from train.reports.row_results import write_result

KEYS = [(f"preset-{name}", "en", "comparable", "text_to_image") for name in "abc"]
QUERIES = tuple(f"{image:03d}/en/comparable/{index}" for image in range(200) for index in range(5))
IMAGES = np.repeat(np.arange(200), 5)
MEASURES = ("recall_at_1", "recall_at_5", "recall_at_10")


def row_of(*ranks: np.ndarray, queries: tuple[str, ...] = QUERIES) -> RowRanks:
    return RowRanks(queries, IMAGES, np.stack(ranks))


@pytest.fixture
def write_seed(tmp_path):
    """Write a result and its ranks: image and rank of each query, in any order."""

    def write(seed: int, ranks: dict[str, tuple[str, int]] | None, language: str = "en") -> None:
        folder = tmp_path / "results" / "p" / f"seed-{seed}"
        write_result(folder.with_suffix(".json"), {"scores": []})
        rows = [
            {"split": "s", "language": language, "portion": "comparable", "direction": "text_to_image", "query_id": query}
            | {"image_id": image, "rank": rank}
            for query, (image, rank) in (ranks or {}).items()
        ]
        if ranks is not None:
            write_ranks(Folder(str(folder)), pa.Table.from_pylist(rows, schema=SCHEMA))

    return write


def test_ranks_of_seeds_have_one_order_of_queries(write_seed, tmp_path):
    write_seed(0, {"b": ("y", 2), "a": ("x", 1), "c": ("x", 3)})
    write_seed(1, {"c": ("x", 6), "b": ("y", 5), "a": ("x", 4)})
    ((key, row),) = read_row_ranks(str(tmp_path), "p").items()
    assert (key, row.queries) == (("p", "en", "comparable", "text_to_image"), ("a", "b", "c"))
    assert sorted(row.ranks.tolist()) == [[1, 2, 3], [4, 5, 6]]
    assert row.images[0] == row.images[2] != row.images[1]


@pytest.mark.parametrize("second", [{"a": ("x", 1)}, {"a": ("x", 1), "z": ("y", 1)}, {}, None])
def test_runs_with_other_queries_or_without_ranks_have_none(write_seed, tmp_path, second):
    write_seed(0, {"a": ("x", 1), "b": ("y", 2)})
    write_seed(1, second)
    assert read_row_ranks(str(tmp_path), "p") == {}


def test_row_without_results_has_no_ranks(tmp_path):
    assert read_row_ranks(str(tmp_path), "p") == {}


def test_best_rows_are_those_without_a_difference():
    rng = np.random.default_rng(0)
    best = rng.geometric(0.2, (2, 1000))
    near = best.copy()
    near[:, :4] += 20  # Of one image.
    worse = best + rng.integers(0, 3, 1000)
    ranks = {key: row_of(*rows) for key, rows in zip(KEYS, (best, near, worse), strict=True)}
    assert {key for key, measure in best_recalls(ranks) if measure == "recall_at_1"} == {KEYS[0], KEYS[1]}


@pytest.mark.parametrize(("p_values", "best"), [((0.02, 0.03), {0}), ((0.03, 0.04), {0, 1, 2}), ((0.02, 0.06), {0, 2})])
def test_p_values_are_corrected_over_the_rows(monkeypatch, p_values, best):
    by_seeds = dict(enumerate(p_values, start=2))  # The number of seeds tells the rows apart.
    monkeypatch.setattr(row_ranks, "paired_p_values", lambda a, b, images: dict.fromkeys(MEASURES, by_seeds[len(b)]))
    rows = (row_of(*[np.full(1000, rank)] * seeds) for seeds, rank in ((1, 1), (2, 11), (3, 11)))
    found = best_recalls(dict(zip(KEYS, rows, strict=True)))
    assert found == {(KEYS[index], measure) for index in best for measure in MEASURES}


def test_rows_on_other_queries_are_not_compared():
    other = tuple(f"{query}-other" for query in QUERIES)
    ranks = {KEYS[0]: row_of(np.full(1000, 1)), KEYS[1]: row_of(np.full(1000, 1), queries=other)}
    assert best_recalls(ranks) == set()


def test_interval_is_that_of_a_bootstrap_over_images():
    rng = np.random.default_rng(1)
    ranks = rng.geometric(0.1, (3, 200)).repeat(5, axis=1)  # All captions of an image have its rank.
    interval = row_of(*ranks).intervals.recall_at_5
    resampled = [100 * (ranks[:, ::5] <= 5)[:, rng.integers(0, 200, 200)].mean() for _ in range(4000)]
    low, high = np.percentile(resampled, [2.5, 97.5])
    assert (interval.low, interval.high) == (pytest.approx(low, abs=1), pytest.approx(high, abs=1))
