"""Features of random weights are named by everything that derives from them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from schemas.dataset import open_dataset
from tests.train.trainings import CONFIG, SMALL, events, reproduce_job, rewrite
from train.config.sections import from_toml
from train.evaluation.embedding import embed
from train.evaluation.scores import evaluate
from train.evaluation.search import search
from train.jobs import Corpus, EmbedJob, EvaluateJob, FiguresJob, SearchJob, StsJob, TrainJob
from train.loop.training import train
from train.reports.comparison import compare_runs
from train.reports.figures import draw_figures
from train.reports.reproduce import reproduce
from train.reports.reproduce_report import read_report
from train.reports.row_results import write_result
from train.reports.score_report import score_table
from train.runs.checkpoints import BEST, LAST
from train.runs.run import open_run
from train.sts.report import sts_tables
from train.sts.similarity import sts

NAME = "toy (random:3)"
REMARK = f"untrained: the weights of {NAME} are random, the features mean nothing"
RANDOM = {"extractor": {"untrained": True, "weights": {"name": "random:3"}}, "extractor_fingerprint": "e" * 64}


@pytest.fixture(scope="module")
def corpus(toy, tmp_path_factory) -> Corpus:
    return replace(toy, features=rewrite(toy.features, tmp_path_factory.mktemp("random") / "features", list, parameters=RANDOM))


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory) -> tuple[str, list[str]]:
    """A run on features of random weights, and the warnings of its training."""
    warnings: list[str] = []
    folder = str(tmp_path_factory.mktemp("trained") / "run")
    config = from_toml(CONFIG.replace("max_steps = 44", "max_steps = 2"), "test")
    train(TrainJob(config, corpus, folder, device="cpu", curves=False), on_warning=warnings.append)
    return folder, warnings


def test_training_warns_and_keeps_the_names(trained, finished_run):
    folder, warnings = trained
    assert REMARK in warnings
    assert events(Path(folder), "untrained") == [{"event": "untrained", "step": 0, "features": [NAME]}]
    assert open_run(folder).untrained == open_run(folder, checkpoint="last").untrained == (NAME,)
    other = finished_run[0]
    assert (open_run(other).untrained, events(other, "untrained")) == ((), [])


@pytest.mark.parametrize("name", [BEST, LAST])
def test_checkpoint_of_version_0_2_is_read(copied_run, name):
    content = torch.load(copied_run / name, weights_only=True)
    del content["untrained"]
    torch.save(content, copied_run / name)
    assert open_run(copied_run, checkpoint=name.removesuffix(".pt")).untrained == ()


def test_scores_name_the_features(trained, corpus, finished_run, toy):
    scores = evaluate(EvaluateJob(trained[0], corpus.captions, corpus.features, splits=("test",)))
    assert {tuple(score.to_dict()["untrained"]) for score in scores} == {(NAME,)}
    assert list(score_table(scores, title="").notes)[-1] == REMARK
    scores = evaluate(EvaluateJob(str(finished_run[0]), toy.captions, toy.features, splits=("test",)))
    assert not any("untrained" in score.to_dict() for score in scores)
    assert len(score_table(scores, title="").notes) == 2


def test_comparison_names_the_runs(trained, finished_run):
    comparison = compare_runs([trained[0], finished_run[0]])
    assert [run["untrained"] for run in comparison.to_dict()["runs"]] == [[NAME], []]
    assert [note for note in comparison.notes if "untrained" in note] == [f"{comparison.runs[0].name}: {REMARK}"]


def test_embeddings_and_search_name_the_features(trained, corpus, finished_run, toy, tmp_path):
    manifests = embed(EmbedJob(trained[0], str(tmp_path), corpus.features, corpus.captions, device="cpu"))
    assert [manifest.parameters["model"]["untrained"] for manifest in manifests] == [[NAME], [NAME]]
    assert [open_dataset(tmp_path / name).untrained for name in ("images", "captions")] == [(NAME,), (NAME,)]
    for run, places, expected in (
        (trained[0], {"features": corpus.features}, [REMARK]),
        (trained[0], {"embeddings": str(tmp_path)}, [REMARK]),
        (str(finished_run[0]), {"features": toy.features}, []),
    ):
        warnings: list[str] = []
        search(SearchJob(run, "en1 en2", "en", **places, tokenized=True, device="cpu"), on_warning=warnings.append)
        assert warnings == expected


def test_sts_names_the_features(trained, tmp_path):
    (tmp_path / "pairs.tsv").write_text("5\ten1 en2\ten1 en2\n0\ten1\ten9\n3\ten4\ten4 en5\n")
    result = sts(StsJob((trained[0], str(tmp_path / "pairs.tsv")), tokenized=True, device="cpu"))
    assert [system["untrained"] for system in result.to_dict()["systems"]] == [[], [NAME]]
    assert f"{trained[0]}: {REMARK}" in sts_tables(result)[0].notes


def test_figures_name_the_features(trained, corpus, tmp_path, monkeypatch):
    notes = []
    monkeypatch.setattr("train.reports.figures.plot_rankings", lambda *args, note: notes.append(note))
    job = FiguresJob(
        trained[0], str(tmp_path), corpus.captions, corpus.features, only=("retrieval",), split="test", device="cpu"
    )
    monkeypatch.setattr("train.reports.figures.write_made_from", lambda *args: None)
    assert draw_figures(job).untrained == (NAME,)
    assert json.loads((tmp_path / "figures.json").read_text())["untrained"] == [NAME]
    assert notes[0].endswith(f" {REMARK}.")


def test_reproduce_and_its_report_name_the_features(toy_2016, tmp_path, monkeypatch):
    corpus = replace(toy_2016, features=rewrite(toy_2016.features, tmp_path / "features", list, parameters=RANDOM))
    monkeypatch.setattr("train.reports.reproduce._run_all", lambda tasks, job: ())
    warnings: list[str] = []
    job = reproduce_job("gella2017", str(tmp_path / "output"), corpus, overrides=SMALL, rows=("vse-*",), device="cpu")
    reproduce(job, on_warning=warnings.append)
    assert warnings == [REMARK]
    result = {"feature": NAME, "untrained": [NAME], "overrides": [], "step": 4, "scores": []}
    write_result(tmp_path / "results/gella2017/vse-en/seed-0.json", result)
    report = read_report(str(tmp_path), "gella2017")
    assert f"{REMARK}." in report.notes
    assert f"{REMARK}." in report.to_markdown()
