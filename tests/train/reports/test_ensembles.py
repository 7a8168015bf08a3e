import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from schemas.errors import DatasetError
from tests.train.trainings import SMALL, reproduce_job, settings_of
from train.evaluation.scores import evaluate
from train.jobs import ReproduceJob
from train.reports.reproduce import reproduce
from train.reports.reproduce_report import read_report
from train.reports.row_results import read_result
from train.runs.run import open_run

pytestmark = pytest.mark.cluster

MEMBERS = ["scan/t2i-avg", "scan/i2t-lse"]
ENSEMBLE = "scan/t2i-avg+i2t-lse"


def job_of(corpus, output, **more) -> ReproduceJob:
    fields = {"rows": (ENSEMBLE,), "seeds": 1, "overrides": SMALL, "workers": 1, "device": "cpu", **more}
    return reproduce_job("huang2019", str(output), corpus, **fields)


@pytest.fixture(scope="module")
def finished(four_languages_regions, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("ensembles") / "out"
    ended = []
    job = job_of(four_languages_regions, output)
    assert reproduce(job, lambda done: ended.append((done.task.preset, done.total))) == ()
    assert ended == [(preset, 3) for preset in (*MEMBERS, ENSEMBLE)]
    return output


def result(output: Path, preset: str) -> dict:
    return read_result(output / "results" / preset / "seed-0.json")


def test_result_equals_evaluate_of_both_runs(finished, four_languages_regions):
    runs = [open_run(finished / "runs" / member / "seed-0") for member in MEMBERS]
    corpus = four_languages_regions
    scores = evaluate(runs, captions=corpus.captions, features=corpus.features)
    together = result(finished, ENSEMBLE)
    assert together["scores"] == [score.to_dict() for score in scores]
    assert list(together["members"]) == MEMBERS
    assert not (finished / "runs" / ENSEMBLE).exists()
    alone = [score["image_to_text"] for score in result(finished, MEMBERS[0])["scores"]]
    assert alone != [score["image_to_text"] for score in together["scores"]]


def test_members_are_trained_once_and_kept(finished, four_languages_regions, tmp_path):
    shutil.copytree(finished, tmp_path / "o")
    path = tmp_path / "o" / "results" / ENSEMBLE / "seed-0.json"
    before = path.read_bytes()
    path.unlink()
    kept = {each: each.stat().st_mtime_ns for each in (tmp_path / "o" / "runs").rglob("best.pt")}
    job = job_of(four_languages_regions, tmp_path / "o", rows=("scan/t2i-avg", ENSEMBLE))
    assert reproduce(job) == ()
    assert path.read_bytes() == before
    assert {each: each.stat().st_mtime_ns for each in (tmp_path / "o" / "runs").rglob("best.pt")} == kept
    with pytest.raises(DatasetError, match="measured with other config"):
        reproduce(replace(job, settings=settings_of(SMALL | {"schedule.max_steps": "6"})))
    for member in MEMBERS:
        (tmp_path / "o" / "results" / member / "seed-0.json").unlink()
    with pytest.raises(DatasetError, match=r"i2t-lse/seed-0\.json' was measured with other members"):
        reproduce(replace(job, settings=settings_of(SMALL | {"schedule.max_steps": "6"})))


def test_without_a_member_it_fails(finished, four_languages_regions, tmp_path):
    shutil.copytree(finished, tmp_path / "o")
    for preset in (MEMBERS[1], ENSEMBLE):
        (tmp_path / "o" / "results" / preset / "seed-0.json").unlink()
    failed = reproduce(job_of(four_languages_regions, tmp_path / "o"))
    assert [run.name for run in failed] == [f"{preset}, seed 0" for preset in (MEMBERS[1], ENSEMBLE)]
    assert failed[1].failure.reason.startswith("the run of its member scan/i2t-lse with seed 0 failed")
    report = read_report(str(tmp_path / "o"), "huang2019")
    assert [run.preset for run in report.failed] == [MEMBERS[1], ENSEMBLE]
