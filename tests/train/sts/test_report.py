import csv
import json
from dataclasses import replace

import numpy as np
import pytest

from schemas.console.tables import Cell
from schemas.storage.folder import Folder
from train.sts.correlation import Correlation
from train.sts.pairs import StsPairs
from train.sts.plot import plot_sts
from train.sts.report import sts_tables, write_sts
from train.sts.similarity import OVERLAP, StsResult, StsSystem, tasks_of
from train.sts.vectors import Coverage


def result_of(count: int, names: tuple[str, ...] = ("runs/c2c",), pairs: int = 750, baseline: float = 51.34) -> StsResult:
    """A result on data sets of which the first is told by its baseline; all numbers differ."""
    data = tuple(
        StsPairs(f"data-{n}", f"/x/{n}", (1.0,) * pairs, ("a, b",) * pairs, ("c",) * pairs, tuple(range(pairs)))
        for n in range(count)
    )
    systems = [
        StsSystem(
            name,
            "run" if number else "baseline",
            "recipe raw",
            tuple(np.full(pairs, n / 10 + number) for n in range(count)),
            tuple(Correlation(baseline + 5 * n + 20 * number, 1.5 + n + 20 * number) for n in range(count)),
            language="en" if number else "",
            coverage=Coverage(2000, 1234, 7, {"axolotl": 3}) if number else None,
        )
        for number, name in enumerate((OVERLAP, *names))
    ]
    return StsResult(data, tuple(systems))


# --- what was published ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pairs", "baseline", "task"),
    [
        (750, 29.96, "MSRvid 2012"),
        (750, 51.34, "images 2014"),
        (750, 60.39, "images 2015"),
        (750, 51.0, None),
        (749, 51.34, None),
        (750, None, None),
    ],
)
def test_data_sets_are_known_by_their_baseline(pairs, baseline, task):
    result = result_of(1, pairs=pairs)
    overlap = replace(result.systems[0], correlations=(Correlation(baseline, 1.0),))
    assert tasks_of(result.data, overlap) == (task,)


# --- tables ----------------------------------------------------------------------------------------------------------


def test_tables_show_measured_beside_published_correlations():
    scores, read = sts_tables(result_of(2))
    assert scores.headings == ["", "data-0\n750 pairs\nimages 2014", "data-1\n750 pairs", "mean"]
    assert scores.rows[0] == ("word overlap", Cell(51.34, 1.5), Cell(56.34, 2.5), Cell(53.84, 2.0))
    assert scores.rows[1] == ("runs/c2c en", Cell(71.34, 21.5), Cell(76.34, 22.5), Cell(73.84, 22.0))
    values = [[str(value).strip() for value in row if value is not None] for row in scores.values]
    assert ["PARALLEL-ASYM", "84.5", "–"] in values
    assert ["Ours (w/ BERT)", "88.0", "–"] in values
    assert values.count(["GRAN (Wieting et al.) *", "84.5", "–"]) == 2
    assert [row for row in values if len(row) == 1] == [["Gella et al. 2017, table 4"], ["Huang et al. 2019, table 2"]]
    assert scores.notes[1] == "*: quoted in that paper from other work"
    assert read.rows[1] == ("runs/c2c", "recipe raw", "61.7 %", 2000, 7)


def test_other_data_have_no_published_rows():
    scores, _ = sts_tables(result_of(1, baseline=70.0))
    assert scores.rows == [("word overlap", Cell(70.0, 1.5)), ("runs/c2c en", Cell(90.0, 21.5))]
    assert len(scores.notes) == 1


def test_undefined_correlation_is_a_dash():
    result = result_of(1)
    system = replace(result.systems[1], correlations=(Correlation(None, None),))
    scores, _ = sts_tables(replace(result, systems=(result.systems[0], system)))
    assert scores.rows[1] == ("runs/c2c en", Cell("–"))
    assert json.loads(json.dumps(replace(result, systems=(system,)).to_dict()))["systems"][0]["mean"] == {
        "pearson": None,
        "spearman": None,
    }


# --- files -----------------------------------------------------------------------------------------------------------


def test_report_holds_everything(tmp_path):
    result = result_of(2, pairs=750)
    assert write_sts(result, str(tmp_path)) == ["sts.json", "sts-pairs.csv"]
    report = json.loads((tmp_path / "sts.json").read_text())
    assert report == result.to_dict()
    assert report["data"][0] == {"name": "data-0", "location": "/x/0", "pairs": 750, "unscored": 0, "task": "images 2014"}
    assert report["data"][1]["task"] is None
    assert report["systems"][1]["scores"]["data-1"] == {"pearson": 76.34, "spearman": 22.5}
    assert report["systems"][1]["coverage"] == {"words": 2000, "known": 1234, "blind": 7, "unknown": {"axolotl": 3}}
    gran = [row for row in report["published"] if row["name"].startswith("GRAN")]
    assert [(row["quoted"], row["scores"]) for row in gran] == [(True, {"data-0": 84.5})] * 2
    with (tmp_path / "sts-pairs.csv").open(newline="") as file:
        pairs = list(csv.DictReader(file))
    assert len(pairs) == 1500
    assert list(pairs[751]) == ["data", "line", "score", OVERLAP, "runs/c2c", "sentence1", "sentence2"]
    assert list(pairs[751].values()) == ["data-1", "1", "1.0", "0.1", "1.1", "a, b", "c"]


@pytest.mark.slow
def test_panel_for_each_system_and_data_set(tmp_path, monkeypatch):
    figures, count = [], 3
    monkeypatch.setattr("train.sts.plot.save", lambda figure, folder, name: figures.append(figure))
    plot_sts(result_of(count, ("runs/a_$long$", "b.vec")), Folder(str(tmp_path)), "sts.png")
    panels = [panel for panel in figures[0].axes if panel.get_visible()]
    assert len(panels) == 3 * count
    assert [panel.get_ylabel() for panel in panels[::count]] == [
        "word overlap\ncosine",
        "a_\\$long\\$\ncosine",
        "b.vec\ncosine",
    ]
    for number, panel in enumerate(panels):
        (dots,) = panel.collections
        assert dots.get_offsets().tolist() == [[1.0, number % count / 10 + number // count]] * 750
    assert panels[0].get_title() == "data-0\nn = 750, r = 0.513"
