import json
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev

import pytest

from schemas.errors import UsageError
from tests.train.trainings import SMALL, reproduce_job
from train.jobs import Corpus, ReproduceJob, StsJob
from train.reports.published import STS_PAPERS
from train.reports.reproduce import reproduce
from train.reports.row_results import write_report
from train.sts.pairs import read_sts
from train.sts.paper_rows import measure_sts, open_sts
from train.sts.similarity import sts

pytestmark = pytest.mark.cluster


def tokenize(text, language, recipe, truecaser) -> list[str]:
    """Return words of the toy, one for each length of a word."""
    return [f"{language}{len(word)}" for word in text.split()]


def job_of(paper: str, output: Path, corpus: Corpus) -> ReproduceJob:
    return reproduce_job(paper, str(output), corpus, overrides=SMALL, device="cpu")


@pytest.fixture(scope="module")
def trained(toy_2016, tmp_path_factory):
    """Two rows of table 4 of Gella et al., two runs each; read-only."""
    output = tmp_path_factory.mktemp("sts") / "out"
    job = job_of("gella2017", output, toy_2016)
    assert reproduce(replace(job, seeds=2, rows=("vse-en", "pivot-asym"), workers=1)) == ()
    return output


@pytest.fixture
def pairs(sts_pairs):
    return read_sts(sts_pairs)


def test_sts_rows_equal_sts_with_published_values(trained, toy_2016, pairs, sts_pairs, tmp_path):
    rows = measure_sts(job_of("gella2017", trained, toy_2016), pairs, tokenize)
    assert [row.published for row in rows.rows] == list(STS_PAPERS["gella2017"].rows)
    assert rows.tasks == ("images 2014", "images 2015")
    folders = [str(trained / "runs" / "gella2017" / "pivot-asym" / f"seed-{seed}") for seed in (0, 1)]
    expected = sts(StsJob((str(sts_pairs), *folders), language="en", device="cpu"), tokenize)
    by_name = {row.published.name: row for row in rows.rows}
    for number in (0, 1):
        cells = {name: rows.measurement(row, number) for name, row in by_name.items()}
        assert cells["PIVOT-ASYM"].values == tuple(system.correlations[number].pearson for system in expected.systems[1:])
        assert cells["PIVOT-ASYM"].published == (83.8, 90.3)[number]
        (overlap,) = cells["Shared task baseline"].values
        assert overlap == pytest.approx((51.3, 60.4)[number], abs=0.1)
        for quoted in ("GRAN (Wieting et al.)", "STS best system", "MLMME (Calixto et al.)"):
            assert cells[quoted].values == ()
        assert cells["OE"].values == ()  # Not trained.

    assert write_report(str(tmp_path), "table", rows.to_markdown(), rows.to_dict()) == [
        f"{tmp_path}/table.md",
        f"{tmp_path}/table.json",
    ]
    plain = json.loads((tmp_path / "table.json").read_text())
    (row,) = (row for row in plain["rows"] if row["preset"] == "gella2017/pivot-asym")
    assert row["scores"]["images-2014"]["published"] == 83.8
    markdown = (tmp_path / "table.md").read_text()
    values = rows.measurement(by_name["PIVOT-ASYM"], 0).values
    assert f"| PIVOT-ASYM | 2 | {mean(values):.1f} ± {stdev(values):.1f} (83.8) |" in markdown


def test_quoted_row_of_another_paper_is_measured(trained, toy_2016, pairs):
    rows_of_huang = measure_sts(job_of("huang2019", trained, toy_2016), pairs, tokenize)
    rows = {row.published.name: row for row in rows_of_huang.rows}
    assert len(rows["VSE (Kiros et al.)"].measured) == 2
    assert [system.name for system in rows["VSE (Kiros et al.)"].measured] == [f"gella2017/vse-en/seed-{n}" for n in (0, 1)]
    assert {name for name, row in rows.items() if row.refused} == {"SCAN (Lee et al.)"}
    (note,) = (note for note in rows_of_huang.to_tables()[-1].notes if "not measured" in note)
    assert note.startswith("SCAN (Lee et al.) is not measured: it has no vector of a sentence")
    assert open_sts(replace(job_of("gella2017", trained, toy_2016), table=3), tokenize) == []


def test_unsuitable_run_does_not_end_the_others(trained, toy_2016, pairs):
    def refuse(text, language, recipe, truecaser):
        raise UsageError("no words here")

    rows = measure_sts(job_of("gella2017", trained, toy_2016), pairs, refuse)
    assert {row.published.name for row in rows.rows if row.refused} == {"VSE", "PIVOT-ASYM"}
    (note,) = (note for note in rows.to_tables()[-1].notes if note.startswith("VSE is not measured: "))
    assert "no words here" in note
