import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from schemas.errors import DatasetError, UsageError
from schemas.storage.folder import Folder
from tests.train.runs.test_history import HISTORY, retrieval
from tests.train.trainings import ENGLISH, events
from train.chance import DIRECTIONS, MEASURES, RECALLS
from train.evaluation.ranks import Queries
from train.evaluation.statistics import Interval, MetricIntervals
from train.reports.compared_runs import Measurement, logged_scores
from train.reports.comparison import (
    SCORES,
    SUM,
    ComparedRow,
    ComparedRun,
    Comparison,
    RankedGallery,
    _comparison_notes,
    _group_by_seeds,
    compare_runs,
    with_tests,
)
from train.reports.comparison_plot import plot_comparison
from train.reports.significance import not_worse
from train.runs.checkpoints import read_checkpoint, write_checkpoint
from train.runs.history import History


@pytest.fixture
def runs(train_toy, finished_run, tmp_path):
    """A run, the same with another seed, and one with another configuration and one language."""
    shutil.copytree(finished_run[0], tmp_path / "both" / "seed-0")
    train_toy(name="both/seed-1", seed=1)
    train_toy(ENGLISH.replace("0.01", "0.02"), name="english")
    return [str(tmp_path / name) for name in ("both/seed-0", "both/seed-1", "english")]


ENGLISH_VAL = RankedGallery("en", ("comparable",), "val", images=12, captions=36)
GERMAN_VAL = RankedGallery("de", ("comparable",), "val", images=12, captions=24)


@pytest.mark.slow
def test_scores_are_those_of_the_best_step(runs, tmp_path):
    comparison = compare_runs(runs)
    assert comparison.galleries == (ENGLISH_VAL, GERMAN_VAL)
    for run in comparison.runs:
        best = max(events(tmp_path / run.name, "evaluation"), key=lambda line: line["score"])
        scores = run.measured[ENGLISH_VAL].scores
        assert set(scores) == {*SCORES, SUM}
        assert scores["text_to_image", "recall_at_5"] == best["en"]["text_to_image"]["recall_at_5"]
        assert scores[SUM] == best["en"]["sum_of_recalls"]
        assert run.history.speed["steps_per_second"] > 0
    assert GERMAN_VAL not in comparison.runs[2].measured
    chance = comparison.chance(GERMAN_VAL)
    assert chance["text_to_image", "recall_at_5"] == pytest.approx(500 / 12)
    assert chance["text_to_image", "median_rank"] == 6
    assert chance[SUM] == pytest.approx(sum(value for pair, value in chance.items() if pair[1] in RECALLS))


@pytest.mark.slow
def test_tables(runs):
    comparison = compare_runs(runs)
    differences, _, scores, _ = comparison.to_tables()
    assert differences.headings == ["", "both (2 seeds)", "english"]
    assert ("optimizer.learning_rate", "0.01", "0.02") in differences.rows
    interval = "  95 % interval"
    assert [row[0] for row in scores.values] == [
        *(("en comparable val", "12 images, 36 captions"), " both/seed-0", " both/seed-1", " english", interval),
        *(" both, mean of 2", interval, "   deviation", " chance"),
        *(("de comparable val", "12 images, 24 captions"), " both/seed-0", " both/seed-1", " both, mean of 2", interval),
        *("   deviation", " chance"),
    ]
    found = comparison.runs[2].measured[ENGLISH_VAL].scores
    expected = [f"{found[pair]:.{0 if pair[1] == 'median_rank' else 1}f}" for pair in (*SCORES, SUM)]
    assert [text.rstrip("≈ ") for text in scores.values[3][1:]] == expected
    assert [text.strip() for text in scores.values[8][1:]] == ["8.3", "37.0", "63.6", "8", "8.3", "41.7", "83.3", "6", "242.3"]


@pytest.mark.slow
def test_differences_and_plain_values(runs):
    comparison = compare_runs(runs)
    assert comparison.differences == {
        "data.portions": ({"en": ["comparable"], "de": ["comparable"]},) * 2 + ({"en": ["comparable"]},),
        "loss.c2c_probability": (0.5, 0.5, 0.0),
        "optimizer.learning_rate": (0.01, 0.01, 0.02),
        "seed": (0, 1, 0),
    }
    assert [note for note in comparison.notes if "not better than chance" not in note] == []
    values = json.loads(json.dumps(comparison.to_dict()))
    assert [run["settings"]["seed"] for run in values["runs"]] == [0, 1, 0]
    assert values["runs"][2]["best"]["en"]["text_to_image"]["queries"] == 36
    assert values["groups"] == [{"name": "both", "runs": ["both/seed-0", "both/seed-1"]}]
    english, german = values["galleries"]
    assert [row["name"] for row in english["scores"]] == ["both/seed-0", "both/seed-1", "english", "both"]
    assert set(german["scores"][-1]["deviation"]) == {"image_to_text", "text_to_image", "sum_of_recalls"}
    assert german["chance"]["text_to_image"]["recall_at_1"] == pytest.approx(100 / 12)
    assert (german["language"], german["split"], german["captions"]) == ("de", "val", 24)
    assert values["differences"]["seed"] == [0, 1, 0]


# --- runs that are not whole -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_compare_runs_without_a_checkpoint(runs, tmp_path):
    begun = tmp_path / "begun"
    begun.mkdir()
    shutil.copy(tmp_path / "english" / "config.toml", begun)
    (begun / "log.jsonl").write_text('{"event": "step", "step": 10, "loss": 1.0, "terms": {"c2i/en": 1.0}}\n{"eve')
    comparison = compare_runs([*runs[2:], str(begun)])
    assert comparison.differences == {}  # Its seed and data are not known.
    run = comparison.runs[1]
    assert (run.state, run.history.last_step, dict(run.measured), dict(run.history.speed)) == ("unfinished", 10, {}, {})


def test_runs_of_other_content_differ_and_are_no_group(copied_run, finished_run, tmp_path):
    def write(name: str, **changes) -> str:
        shutil.copytree(copied_run, tmp_path / name)
        for file in ("best.pt", "last.pt"):
            checkpoint = read_checkpoint(Folder(str(copied_run)), file)
            write_checkpoint(Folder(str(tmp_path / name)), file, replace(checkpoint, **changes))
        return str(tmp_path / name)

    contents = dict(read_checkpoint(Folder(str(copied_run)), "last.pt").contents)
    updated = write("updated", seed=1, contents={**contents, "features": "f" * 64})
    comparison = compare_runs([str(finished_run[0]), updated])
    assert comparison.differences == {"seed": (0, 1), "content: features": (contents["features"][:12], "f" * 12)}
    assert comparison.groups == ()


def test_compare_runs_of_other_folders_is_refused(finished_run, copied_run, tmp_path):
    with pytest.raises(UsageError, match="there is nothing to compare"):
        compare_runs([])
    with pytest.raises(DatasetError, match=r"is not a run: it has none of last\.pt, best\.pt, config\.toml and log\.jsonl"):
        compare_runs([str(tmp_path / "nothing")])
    with pytest.raises(UsageError, match="is given twice"):
        compare_runs([str(finished_run[0]), f"{finished_run[0]}/"])
    (copied_run / "last.pt").unlink()
    (copied_run / "best.pt").unlink()
    (copied_run / "config.toml").write_text("[loss")
    with pytest.raises(DatasetError, match=r"run/config\.toml is damaged \(not TOML"):
        compare_runs([str(copied_run)])
    (tmp_path / "evaluated").mkdir()
    (tmp_path / "evaluated" / "evaluation.json").write_text('{"scores": [{"language": "en"}]}')
    with pytest.raises(DatasetError, match=r"evaluated/evaluation\.json is damaged"):
        compare_runs([str(tmp_path / "evaluated")])


WITHOUT_CHANCE = History(tuple(entry for entry in HISTORY.entries if entry["event"] != "chance"))


def compared(name: str, settings: dict, history: History = WITHOUT_CHANCE, state: str = "steps") -> ComparedRun:
    return ComparedRun(name, name, settings, state, history, (), logged_scores(settings, history))


def test_other_data_and_galleries_are_noted():
    settings = {"data.portions": {"en": ["comparable"]}, "data.validation_split": "val", "data: captions": "a", "seed": 0}
    entry = {"event": "evaluation", "step": 5, "score": 1.0, "en": retrieval(1.0)}
    entry["en"]["text_to_image"]["queries"] = 10
    notes = {
        "captions": _comparison_notes([compared("a", settings), compared("b", {**settings, "data: captions": "b"})]),
        "vocabulary": _comparison_notes([compared("a", settings | {"content: vocabulary": n}) for n in "xyx"]),
        "queries": _comparison_notes([compared("a", settings), compared("b", settings, History((entry,)))]),
    }
    assert notes == {
        "captions": ["not the same captions (data): a (a); b (b)"],
        "vocabulary": ["not the same vocabulary (content): x (a, a); y (a)"],
        "queries": ["not the same gallery of en comparable val: 9 images, 9 captions (a); 9 images, 10 captions (b)"],
    }
    assert _comparison_notes([compared("a", settings), compared("b", settings)]) == []
    others = compared("b", {**settings, "data.validation_split": "test"}), compared("c", {**settings, "data.portions": {}})
    galleries = Comparison((compared("a", settings), *others), {}).galleries  # Never in one block of the table.
    assert {gallery.name for gallery in galleries} == {"en comparable val", "en comparable test", "en val"}


# --- pictures ----------------------------------------------------------------------------------------------------------


def test_picture(monkeypatch, tmp_path):
    figures = []
    monkeypatch.setattr("train.reports.comparison_plot.save", lambda figure, folder, name: figures.append(figure))
    # The second evaluation, with two languages, is the best.
    history = History(tuple({**entry, "score": entry["step"]} if "score" in entry else entry for entry in HISTORY.entries))
    runs = tuple(compared(f"x/seed-{n}", {"seed": n}, history) for n in range(2))
    runs += (compared("other", {"seed": 0, "loss.margin": 1}, History(HISTORY.entries[:4]), "unfinished"),)
    rows = ComparedRow("x", runs[:2]), ComparedRow("other", runs[2:])
    plot_comparison(Comparison(runs, {}, rows), tmp_path / "a.png")
    losses, english, german, *_, last = figures[0].axes
    assert [len(panel.lines) for panel in (losses, english, german)] == [3, 4, 2]
    assert [panel.get_title(loc="right") for panel in (english, german)] == ["chance: 4.0", ""]
    assert set(english.lines[3].get_ydata()) == {4.0}
    assert list(english.lines[0].get_ydata()) == [12.0, 18.0]
    looks = [(line.get_color(), line.get_marker()) for line in losses.lines]
    assert looks[0] == looks[1] != looks[2]
    assert [text.get_text() for text in last.get_legend().texts] == ["x (2 seeds)", "other"]


def test_picture_shows_scores_with_intervals_by_short_names(monkeypatch, tmp_path):
    figures = []
    monkeypatch.setattr("train.reports.comparison_plot.save", lambda figure, folder, name: figures.append(figure))
    gallery = RankedGallery("en", ("comparable",), "test", 9, 9)
    chance = dict.fromkeys(SCORES, 10.0)
    runs = [
        ComparedRun(
            name, name, {}, "evaluation", History(()), (), {gallery: Measurement(dict.fromkeys((*SCORES, SUM), score), chance)}
        )
        for name, score in (("here/models/a", 30.0), ("there/models/b", 40.0))
    ]
    rows = tuple(ComparedRow(run.name, (run,)) for run in runs)
    interval = Interval(25.0, 45.0)
    intervals = {(gallery, "image_to_text"): {rows[0]: MetricIntervals(interval, interval, interval, interval)}}
    plot_comparison(Comparison(tuple(runs), {}, rows, (), intervals), tmp_path / "a.png")
    panel, last = figures[0].axes
    points = [(bars[0].get_xdata()[0], bars[0].get_ydata()[0]) for bars in panel.containers]
    assert [y for _, y in points] == [30.0, 40.0] * 6
    assert len({x for x, _ in points}) == 12
    ends = [[line.get_segments()[0][:, 1].tolist() for line in bars[2]] for bars in panel.containers]
    assert ends == [[[25.0, 45.0]], []] * 3 + [[], []] * 3
    levels = [line.get_segments()[0][:, 1].tolist() for line in panel.collections if len(line.get_segments()[0]) == 2]
    assert levels.count([10.0, 10.0]) == 6
    assert [text.get_text() for text in last.get_legend().texts] == ["a", "b"]


# --- intervals and tests -----------------------------------------------------------------------------------------------


VAL = RankedGallery("en", ("comparable",), "val", images=50, captions=100)


def ranked(name: str, share: float, seed: int, settings: dict, *, per_image: int = 2) -> ComparedRun:
    """Return a run with random ranks; a greater share has more hits."""
    rng, queries, scores = np.random.default_rng(seed), {}, {SUM: 0.0}
    for direction, count in zip(DIRECTIONS, (1, per_image), strict=True):
        images = np.repeat(np.arange(50), count)
        ranks = rng.geometric(share, len(images))
        queries[direction] = Queries(np.array([f"{n}" for n in range(len(images))]), images, ranks[None])
        scores |= {(direction, name): 100 * float(np.mean(ranks <= k)) for name, k in zip(MEASURES, (1, 5, 10), strict=False)}
        scores[direction, "median_rank"] = float(np.median(ranks))
    measured = {VAL: Measurement(scores, queries=queries)}
    return ComparedRun(name, name, {**settings, "seed": seed}, "steps", History(()), (), measured)


def compare_ranked(*runs: ComparedRun) -> Comparison:
    return with_tests(Comparison(runs, {}, _group_by_seeds(runs)))


@pytest.mark.slow
def test_tables_of_tests_mark_rows_not_worse():
    good = [ranked(f"good/seed-{n}", 0.5, n, {"loss.margin": 1}) for n in range(3)]
    other = [ranked(f"other/seed-{n}", 0.45, 10 + n, {"loss.margin": 2}) for n in range(3)]
    comparison = compare_ranked(*good, *other, ranked("bad", 0.03, 20, {"loss.margin": 3}))
    texts = {row.name: intervals for row, intervals in comparison.intervals[VAL, "text_to_image"].items()}
    assert list(texts) == ["good", "other", "bad"]
    *_, scores, differences = comparison.to_tables()
    (marked,) = ([row[6].rstrip("≈ ") for row in scores.values if "≈" in str(row[6])] for _ in range(1))
    assert len(marked) == 1
    intervals = [row for row in scores.values if row[0] == "  95 % interval"]
    assert len(intervals) == 3
    ends = texts["good"].recall_at_1
    assert intervals[1][5] == (f"{round(ends.low, 1)}–", f"{round(ends.high, 1)} ")
    names = [row[0] for row in differences.rows]
    assert names[:2] == [("en comparable val i→t", " good - other"), "  over seeds"]
    assert differences.rows[names.index(("en comparable val t→i", " bad - good"))][1].startswith("-")
    assert json.loads(json.dumps(comparison.to_dict()))["tests"][0]["direction"] == "image_to_text"


@pytest.mark.parametrize(("seeds", "least"), [(2, 1.0), (3, 0.6), (4, 0.171), (5, 0.0476)])
def test_least_p_value_over_seeds_is_that_of_the_page(seeds, least, monkeypatch):
    monkeypatch.setattr("train.evaluation.ranks.bootstrap_intervals", lambda ranks, images: None)
    good = [ranked(f"good-{n}", 0.9, n, {"loss.margin": 1}) for n in range(seeds)]
    bad = [ranked(f"bad-{n}", 0.02, 50 + n, {"loss.margin": 2}) for n in range(seeds)]
    comparison = compare_ranked(*good, *bad)
    assert [test.seed_p_value for test in comparison.tests] == pytest.approx([least] * 6, abs=0.0005)
    assert [test.rows[0].name for test in comparison.tests] == ["good"] * 6
    marked = not_worse(comparison.tests)
    assert {row.name for _, _, row in marked} == ({"bad"} if least > 0.05 else set())
    page = (Path(__file__).parents[3] / "docs/reference/intervals.md").read_text()
    assert re.search(rf"\| {seeds} \| [\d.]+ \| {least:.2g} \|", page)


def test_deviation_of_seeds_is_that_of_a_sample():
    runs = [ranked(f"x-{n}", 0.3, n, {"loss.margin": 1}) for n in range(3)]
    values = [run.measured[VAL].scores["text_to_image", "recall_at_5"] for run in runs]
    (*_, row) = compare_ranked(*runs).to_dict()["galleries"][0]["scores"]
    assert row["mean"]["text_to_image"]["recall_at_5"] == pytest.approx(sum(values) / 3)
    variance = sum((value - sum(values) / 3) ** 2 for value in values) / 2
    assert row["deviation"]["text_to_image"]["recall_at_5"] == pytest.approx(variance**0.5)
    assert variance > 0
    *_, means, _, deviation = compare_ranked(*runs).to_tables()[2].values
    assert deviation[6].strip() == f"{variance**0.5:.1f}"
    assert (median := row["mean"]["image_to_text"]["median_rank"]) % 1 > 0
    assert means[4].strip() == f"{median:.1f}"


def test_runs_of_other_queries_are_not_tested():
    one, other = ranked("one", 0.5, 0, {}), ranked("other", 0.5, 1, {"loss.margin": 2}, per_image=3)
    without = replace(one, name="without", measured={VAL: Measurement(one.measured[VAL].scores)})
    comparison = compare_ranked(one, other, without)
    assert {test.place[1] for test in comparison.tests} == {"image_to_text"}
    assert comparison.notes == ("not tested, without ranks.parquet of the best step or of other queries: without, other",)
    assert compare_ranked(one).notes == compare_ranked(one).tests == ()
