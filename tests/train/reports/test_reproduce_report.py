"""The report on stored results: chance, other sets, other splits."""

import json
from pathlib import Path

import pyarrow as pa
import pytest

from schemas.storage.folder import Folder
from train.evaluation.ranks import SCHEMA, write_ranks
from train.reports.report_plot import plot_report
from train.reports.reproduce_report import PaperReport, read_report
from train.reports.row_results import write_result

RECALLS = {"recall_at_1": 30.0, "recall_at_5": 60.0, "recall_at_10": 72.0, "median_rank": 3}
CHANCE = {"image_to_text": [0.5, 2.5, 5.0], "text_to_image": [0.1, 0.5, 1.0]}


def score(images=1000, captions=5000, *, split="test_2016", language="en", gain=0.0) -> dict:
    measures = {name: value + gain for name, value in RECALLS.items()}
    directions = {"image_to_text": {"queries": images, **measures}, "text_to_image": {"queries": captions, **measures}}
    return {"language": language, "portion": "comparable", "split": split, **directions, "chance": CHANCE}


@pytest.fixture
def report_on(tmp_path):
    """Write a result for each score, as those of several seeds, and read the report."""

    def read(*scores: dict, preset: str = "gella2017/vse-en") -> PaperReport:
        for seed, value in enumerate(scores):
            result = {"feature": "toy", "untrained": [], "overrides": [], "step": 4, "scores": [value]}
            write_result(tmp_path / "results" / preset / f"seed-{seed}.json", result)
        return read_report(str(tmp_path), "gella2017")

    return read


def rows_of(report: PaperReport, name: str) -> list[list]:
    """Return the row of the first table with a name, and the lines below it up to the next row."""
    rows = report.to_tables()[0].values
    start = next(index for index, row in enumerate(rows) if str(row[0]).startswith(name))
    end = next((index for index in range(start + 1, len(rows)) if not str(rows[index][0]).startswith(" ")), len(rows))
    return rows[start:end]


def test_chance_follows_the_rows_of_its_language(report_on):
    report = report_on(score())
    assert rows_of(report, "chance, ") == [
        ["chance, en", None, None, None, None],
        ["  image to text", "0.5", "2.5", "5.0", None],
        ["  text to image", "0.1", "0.5", "1.0", None],
    ]
    assert rows_of(report, "VSE, en")[2] == ["    published", 31.6, 60.4, 72.7, 3]  # Without a mark.
    assert "| chance | en |  | 0.5 | 2.5 | 5.0 |  | 0.1 | 0.5 | 1.0 |  |" in report.to_markdown()


@pytest.mark.parametrize("sizes", [(1000, 4999), (999, 5000)])
def test_published_numbers_on_another_set_are_marked(report_on, sizes):
    report = report_on(score(*sizes))
    assert rows_of(report, "VSE, en")[2][0] == "    published †"
    assert "30.0 (31.6 †)" in report.to_markdown()
    (note,) = (note for note in report.notes if "another set" in note)
    sizes_text = f"{sizes[0]:,} of 1,000 images, {sizes[1]:,} of 5,000 captions"
    assert note == f"† published on another set than the measured one: en comparable {sizes_text}."
    assert report.to_dict()["tables"][0]["rows"][0]["image_to_text"]["recall_at_1"]["is_other_set"] is True


def test_report_on_another_split_has_no_published_numbers(report_on):
    report = report_on(score(split="mine"))
    assert rows_of(report, "VSE, en") == [
        ["VSE, en, 1 run", None, None, None, None],
        ["  image to text", "30.0", "60.0", "72.0", "3.0"],
        ["  text to image", "30.0", "60.0", "72.0", "3.0"],
    ]
    assert "31.6" not in report.to_markdown()
    assert "on split mine." in report.notes[0]
    assert report.notes[1] == "Published numbers, of the test images of 2016, are left out."


def test_report_as_json_has_all_values(report_on):
    report = report_on(score(), score(gain=2.0))
    stored = json.loads(json.dumps(report.to_dict()))
    row = stored["tables"][0]["rows"][0]
    assert [row[key] for key in ("name", "preset", "language", "portion", "runs", "failed")] == [
        *("VSE", "gella2017/vse-en", "en", "comparable", 2, 0)
    ]
    cell = row["text_to_image"]["recall_at_5"]
    assert (cell["published"], cell["values"], cell["mean"], cell["chance"]) == (53.6, [60.0, 62.0], 61.0, 0.5)
    assert cell["deviation"] == pytest.approx(2**0.5)
    assert (stored["paper"], stored["untrained"], stored["failed"]) == ("gella2017", [], [])


def write_ranks_of(output: Path, preset: str, ranks: dict[str, list[int]], seed: int = 0) -> None:
    """Write the ranks of a run by direction; each query is of an image of its own."""
    rows = [
        {"split": "test_2016", "language": "en", "portion": "comparable", "direction": direction}
        | {"query_id": f"{index:03d}", "image_id": f"{index:03d}", "rank": rank}
        for direction, values in ranks.items()
        for index, rank in enumerate(values)
    ]
    write_ranks(Folder(str(output / "results" / preset / f"seed-{seed}")), pa.Table.from_pylist(rows, schema=SCHEMA))


def test_intervals_and_marks_are_those_of_the_ranks(report_on, tmp_path):
    hits = {"a": [1] * 60 + [50] * 40, "b": [2] * 60 + [50] * 40, "c": [50] * 100}
    presets = {"a": "gella2017/vse-en", "b": "gella2017/oe-en", "c": "gella2017/pivot-sym"}
    for name, preset in presets.items():
        write_ranks_of(tmp_path, preset, {"image_to_text": hits[name], "text_to_image": hits["c"]})
        report = report_on(score(), preset=preset)
    names = {"a": "VSE", "b": "OE", "c": "PIVOT-SYM"}
    marks = {key: [str(text)[-1] == "≈" for text in rows_of(report, f"{names[key]}, en")[1][1:4]] for key in presets}
    assert marks == {"a": [True, True, True], "b": [False, True, True], "c": [False, False, False]}
    row = rows_of(report, "VSE, en")
    assert row[2][0] == "    95 % interval"
    low, high = map(float, row[2][1].split("–"))
    assert 45 < low < 55 < 65 < high < 75  # Sixty of a hundred, with a standard error of 4.9 points.
    assert row[5][1] == "0.0–3.6"  # No hit: the exact bound of a hundred images.
    assert f"| VSE | en | 1 | 30.0 ≈ [{row[2][1]}] (31.6) |" in report.to_markdown()
    cell = report.to_dict()["tables"][0]["rows"][0]["image_to_text"]["recall_at_1"]
    assert (cell["interval"], cell["not_below_best"]) == ({"low": low, "high": high}, True)
    assert any("≈ best for its language, or no difference" in note for note in report.notes)


def test_rows_on_other_queries_are_not_compared(report_on, tmp_path):
    for preset, count in (("gella2017/vse-en", 100), ("gella2017/oe-en", 99)):
        write_ranks_of(tmp_path, preset, {"image_to_text": [1] * count})
        report = report_on(score(), preset=preset)
    assert all("≈" not in str(row) for name in ("VSE, en", "OE, en") for row in rows_of(report, name))


def test_picture_marks_chance(report_on, tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, file, **options: figures.append(figure))
    plot_report(report_on(score()).begun, tmp_path / "report.png")
    panel = figures[0].axes[0]
    assert [line.get_xdata()[0] for line in panel.lines if line.get_marker() == "x"] == [5.0, 1.0]
    assert "× chance" in panel.get_xlabel()
