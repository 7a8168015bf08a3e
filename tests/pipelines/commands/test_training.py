from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pytest
from PIL import Image

from schemas.console.tables import Cell
from schemas.duplicates import Duplicate, duplicates_csv
from schemas.errors import DatasetError, UsageError
from schemas.storage.folder import Folder
from schemas.writing.made_from import MADE_FROM_NAME
from tests.integration.processes import ForkedSteps
from tests.train.trainings import CONFIG
from train.config.sections import from_toml, load_config
from train.evaluation.ranks import read_ranks, write_ranks
from train.evaluation.scores import evaluate
from train.jobs import StsJob
from train.reports.comparison import compare_runs
from train.reports.score_report import averages, evaluation_report, score_tables
from train.runs.run import open_run
from train.sts.similarity import sts


def scores_of(text: str) -> dict:
    """Parse the output of ``evaluate --json`` without its runs."""
    return {key: value for key, value in json.loads(text).items() if key != "runs"}


@pytest.fixture(autouse=True)
def steps(monkeypatch) -> ForkedSteps:
    """Fork the processes of rows."""
    forked = ForkedSteps()
    monkeypatch.setattr("schemas.process.steps.run_command", forked)
    return forked


def data_of(corpus) -> tuple[str, ...]:
    return ("--captions", corpus.captions, "--features", corpus.features, "--device", "cpu")


# --- train -----------------------------------------------------------------------------------------------------------

SMALL = """
description = "small"
[data]
portions = { en = ["comparable"] }
[model]
embed_dim = 6
word_dim = 4
[schedule]
batch_size = 9
patience = 0
max_steps = 30
"""


@pytest.fixture
def train(command, toy, tmp_path):
    """Train a small model; return standard output and standard error."""
    (tmp_path / "small.toml").write_text(SMALL)
    given = ("train", tmp_path / "small.toml", *data_of(toy), "--vocabulary", toy.vocabulary)
    return lambda name, *options: command(*given, tmp_path / name, *options)


@pytest.mark.slow
def test_run_from_a_file(train, tmp_path):
    settings = ["--set", "model.embed_dim=5", "--set", "loss.hinges = max", "--seed", "7", "--no-tensorboard", "--no-curves"]
    output, _ = train("run", *settings, "--max-steps", "12")
    assert "12 steps in" in output
    assert "ended by steps; best sum of recalls" in output
    assert "of 600 (chance 242.3) at step 12; this is not better than chance\n" in output
    run = open_run(tmp_path / "run")
    assert (run.model.width, run.config.loss.hinges, run.step, run.seed) == (5, "max", 12, 7)
    assert not (tmp_path / "run" / "tensorboard").exists()
    assert not (tmp_path / "run" / "curves.png").exists()
    assert (tmp_path / "run" / "metrics.csv").read_text().startswith("event,step,loss,terms.")
    assert from_toml((tmp_path / "run" / "config.toml").read_text(), "run") == run.config

    assert train("run", *settings, "--max-steps", "12")[0].splitlines()[-1] == output.splitlines()[-1]
    assert "20 steps in" in train("run", *settings[:6], "--max-steps", "20", "--resume")[0]
    assert (tmp_path / "run" / "tensorboard").is_dir()
    assert (tmp_path / "run" / "curves.png").is_file()


def test_configuration_is_shown_in_full(command):
    text, _ = command("train", "gella2017/oe-de", "--show", "--set", "loss.margin=0.3", "--max-steps", "9")
    assert from_toml(text, "shown") == load_config("gella2017/oe-de", {"schedule.max_steps": "9", "loss.margin": "0.3"})


# --- evaluate, compare, embed, search ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_evaluate_prints_the_scores(command, write_run, toy):
    folder = write_run()
    arguments = ("evaluate", folder, *data_of(toy), "--splits", "test")
    scores = evaluate(open_run(folder), captions=toy.captions, features=toy.features, splits=["test"])
    assert scores_of(command(*arguments, "--json")[0]) == evaluation_report(scores)
    assert json.loads(command(*arguments, "--json", "--portions", "translation")[0])["scores"] == [scores[-1].to_dict()]
    table, _ = command(*arguments)
    for score in scores:
        line, right_items = (line for line in table.splitlines() if f"{score.language} {score.portion}" in line)
        assert f" {score.relevance['captions']['image_to_text'].ndcg_at_10:.1f} (" in right_items
        assert f"{score.retrieval.image_to_text.recall_at_5:.1f} ({score.chance['image_to_text'][1]:.1f})" in line
        first = table.splitlines().index(line)
        intervals = score.intervals["image_to_text"]
        ends = f"{intervals.recall_at_5.low:.1f}–{intervals.recall_at_5.high:.1f}"
        assert re.search(rf"test +95 % interval .* {ends} .* {intervals.median_rank.low:g}–", table.splitlines()[first + 1])
    assert "27 texts" in table


@pytest.mark.slow
@pytest.mark.parametrize(("seeds", "title"), [((0,), "means over 3 folds of the images"), ((0, 1), "mean scores of ")])
def test_evaluate_in_folds_and_as_an_ensemble(command, write_run, toy, seeds, title):
    folders = [write_run(f"seed-{seed}", seed=seed) for seed in seeds]
    runs = [open_run(folder) for folder in folders]
    data = {"captions": toy.captions, "features": toy.features, "splits": ["val"]}
    scores = evaluate(runs, **data, folds=3 if len(runs) == 1 else 1)
    arguments = ("evaluate", *folders, *data_of(toy), "--splits", "val", *(("--folds", 3) if len(runs) == 1 else ()))
    assert scores_of(command(*arguments, "--json")[0]) == evaluation_report(scores)
    assert title in " ".join(command(*arguments)[0].split())


def test_evaluate_without_duplicates_shows_both_scores(command, write_run, toy, tmp_path):
    path, run = tmp_path / "duplicates.csv", write_run()
    path.write_text(
        duplicates_csv([Duplicate(0, "hash", 0.9, "val-001", "val"), Duplicate(0, "hash", 0.9, "train-001", "train")])
    )
    arguments = ("evaluate", run, *data_of(toy), "--splits", "val", "--portions", "translation")
    plain = scores_of(command(*arguments, "--json")[0])
    out, err = command(*arguments, "--exclude", path, "--json")
    report = json.loads(out)
    assert report["with_duplicates"] == {name: plain[name] for name in ("scores", "averages")}
    assert [report["scores"][0]["excluded"]["images"], report["scores"][0]["text_to_image"]["queries"]] == [1, 11]
    assert "left out of split val: 1 image and 0 captions with duplicates in other splits" in " ".join(err.split())
    reduced, _, complete = "".join(command(*arguments, "--exclude", path)[0].split()).partition(",withduplicates")
    assert f"{Path(run).name},withoutduplicates" in reduced
    assert ("11texts" in reduced, "12texts" in complete) == (True, True)
    kept = ("--exclude", path, "--output", tmp_path / "evaluation")
    assert "is up to date" not in command(*arguments, *kept)[1]
    assert "is up to date" in command(*arguments, *kept)[1]
    path.write_text(path.read_text().replace("val-001", "val-002"))
    assert "is up to date" not in command(*arguments, *kept)[1]


@pytest.mark.slow
def test_evaluate_keeps_a_folder_of_the_same_inputs(command, write_run, toy, tmp_path, monkeypatch):
    run, folder = write_run(), tmp_path / "scores"
    arguments = ("evaluate", run, "--captions", toy.captions, "--features", toy.features, "--output", folder)
    out, err = command(*arguments, "--splits", "val", "--json")
    assert f"written: {folder}/evaluation.json, {folder}/ranks.parquet" in err.replace("\n", "")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert set(files) == {"evaluation.json", "ranks.parquet", "_made_from.json"}
    assert files["evaluation.json"].decode() == out
    opened, (described,) = open_run(run), json.loads(out)["runs"]
    assert described["folder"] == str(run)
    assert (described["step"], described["seed"]) == (opened.step, opened.seed)
    assert described["settings"] == compare_runs([str(run)]).runs[0].settings
    again, err = command(*arguments, "--splits", "val", "--json")
    assert "is up to date" in err
    assert again == out
    (folder / "ranks.parquet").unlink()
    command(*arguments, "--splits", "val")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files
    command(*arguments, "--splits", "test")
    assert set(read_ranks(folder)["split"].to_pylist()) == {"test"}
    with monkeypatch.context() as patch:  # Killed between the two files.
        patch.setattr("train.reports.score_report.write_ranks", lambda *args: pytest.fail("killed"))
        with pytest.raises(pytest.fail.Exception, match="killed"):
            command(*arguments, "--splits", "test", "--languages", "de")
    assert [path.name for path in folder.iterdir() if path.name != ".lock"] == ["evaluation.json"], (
        "the others are of other scores"
    )
    for location in (tmp_path / "scores.json", Path(run) / "best.pt"):
        with pytest.raises(UsageError, match=r"expected a folder: evaluation\.json and ranks\.parquet are written into it"):
            command(*arguments[:-1], location)
    with pytest.raises(UsageError, match="which holds a run: choose another folder; nothing was changed"):
        command(*arguments[:-1], run)


@pytest.mark.slow
def test_compare_evaluations_and_runs(command, finished_run, train_toy, toy, tmp_path):
    train_toy(name="other", seed=1)
    train_toy(CONFIG.replace("word_dim = 4", "word_dim = 5"), "wide")
    runs = (finished_run[0], tmp_path / "other", tmp_path / "wide")
    folders = [tmp_path / f"evaluations/{name}" for name in ("seed-0", "seed-1", "wide")]
    for run, folder in zip(runs, folders, strict=True):
        command("evaluate", run, *data_of(toy), "--splits", "test", "--portions", "comparable", "--output", folder)
    comparison = compare_runs([*folders, tmp_path / "wide"])
    assert [run.state for run in comparison.runs] == ["evaluation"] * 3 + ["steps"]
    assert [(group.name, len(group.runs)) for group in comparison.groups] == [("evaluations", 2)]
    (test, *_) = (t for t in comparison.tests if (t.place[1], t.measure) == ("text_to_image", "recall_at_5"))
    tables = [read_ranks(folder).filter(pc.field("direction") == "text_to_image") for folder in folders]
    ranks = [table.filter(pc.field("language") == test.place[0].language) for table in tables]
    hits = [np.mean(table["rank"].to_numpy() <= 5) for table in ranks]
    assert {row.name for row in test.rows} == {"evaluations", "evaluations/wide"}
    assert test.difference == pytest.approx(100 * abs((hits[0] + hits[1]) / 2 - hits[2]))
    best = comparison.runs[3].history.best["step"]
    write_ranks(Folder(str(tmp_path / "wide")), read_ranks(tmp_path / "wide"), {"step": str(best + 1)})
    assert compare_runs([runs[0], runs[2]]).tests == ()
    assert "not tested, without ranks.parquet of the best step or of other queries: " in compare_runs(runs).notes[-1]
    comparison = compare_runs([str(folder) for folder in folders])
    out, notes = command("compare", *folders, "--json", "--output", tmp_path / "pictures")
    assert json.loads(out) == comparison.to_dict()
    assert notes.splitlines() == [*comparison.notes, f"written: {tmp_path}/pictures/comparison.png"]
    assert (tmp_path / "pictures" / "comparison.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_evaluate_prints_means_and_captions_cross_lingual(command, write_run, toy):
    folder = write_run(languages=("en", "de", "fr"))
    data = (*data_of(toy), "--splits", "test")
    scores = evaluate(open_run(folder), captions=toy.captions, features=toy.features, splits=["test"], cross_lingual=True)
    _, means, across, _ = score_tables(scores, title="")
    named = [(f"{average.portion} mean test", average.retrieval) for average in averages(scores)]
    named += [(f"{score.portion} {score.language} test", score.retrieval) for score in scores]
    for name, metrics in named:
        recalls = [np.mean(metrics.image_to_text.recalls), np.mean(metrics.text_to_image.recalls)]
        (row,) = (row for row in means.values if row[0] == name)
        assert row[1:] == [*map(pytest.approx, recalls), metrics.mean_recall, metrics.sum_of_recalls]
    for score in scores:
        first = across.rows.index([Cell(score.portion, style="dim"), Cell("test", style="dim")])
        for language, found in score.cross_lingual.items():
            row = next(row for row in across.rows[first:] if row[0] == f"  {score.language} to {language}")
            assert row[-2:] == tuple(map(Cell, (found.direction.recall_at_10, found.direction.median_rank), found.chance[2:]))
    assert scores_of(command("evaluate", folder, *data, "--cross-lingual", "--json")[0]) == evaluation_report(scores)
    assert "captions among captions" in command("evaluate", folder, *data, "--cross-lingual")[0]
    assert " to de" not in command("evaluate", folder, *data)[0]


# --- reproduce -------------------------------------------------------------------------------------------------------


@pytest.fixture
def reproduce(command, toy_2016, tmp_path):
    """Train rows of small models for two steps; return standard output and standard error."""

    def run(*options: object, paper: str = "gella2017", output: object = tmp_path / "o") -> tuple[str, str]:
        return command(
            *("reproduce", paper, output, "--seeds", "1", "--workers", "1"),
            *(*data_of(toy_2016), "--vocabulary", toy_2016.vocabulary),
            *("--max-steps", "2", "--set", "model.embed_dim=6", "--set", "model.word_dim=4", "--set", "schedule.batch_size=8"),
            *options,
        )

    return run


@pytest.mark.cluster
def test_reproduce_writes_the_report(reproduce, steps, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    out, notes = reproduce("--rows", "vse-de", "--memory-map", tmp_path / "map", output="~/o")
    assert [words[0] for words in steps.started] == ["train", "evaluate"]
    assert all(f"--memory-map={tmp_path / 'map'}" in words for words in steps.started)
    assert "1 of 1: gella2017/vse-de, seed 0" in notes
    assert "gella2017/vse-de: words: " in out
    assert "best after 2 of 2 steps; seeds: 1 of 1" in out
    assert "Table 2 (comparable captions)" in out
    assert "schedule.max_steps=2" in out
    markdown = Path(tmp_path, "o", "gella2017.md").read_text()
    assert "| VSE | de | 1 | " in markdown
    assert Path(tmp_path, "o", "gella2017.png").stat().st_size > 1000


@pytest.mark.cluster
def test_table_3_ranks_captions(reproduce, tmp_path):
    with pytest.raises(UsageError, match="--table and --rows both select rows"):
        reproduce("--no-plot", "--table", "3", "--rows", "vse-*")
    out, _ = reproduce("--no-plot", "--table", "3")
    trained = {path.name for path in (tmp_path / "o" / "runs" / "gella2017").iterdir()}
    assert trained == {"oe-de", "oe-en", "pivot-asym", "parallel-asym"}
    assert f"written: {tmp_path}/o/gella2017-table-3.json" in out
    assert json.loads((tmp_path / "o" / "gella2017-table-3.json").read_text())["images"] == 9


@pytest.mark.cluster
def test_table_4_is_measured_on_sentence_pairs(reproduce, sts_pairs, tmp_path, monkeypatch):
    lengths = lambda text, language, recipe, truecaser: [f"{language}{len(word)}" for word in text.split()]  # noqa: E731
    monkeypatch.setattr("pipelines.text.queries.tokenize_query", lengths)
    with pytest.raises(UsageError, match="table 4 of gella2017 is measured on sentence pairs: give --sts"):
        reproduce("--no-plot", "--table", "4")
    with pytest.raises(UsageError, match="--sts is given, but kadar2018 has no table of textual similarity"):
        reproduce("--sts", sts_pairs, paper="kadar2018")
    assert not (tmp_path / "o").exists()
    out, notes = reproduce("--no-plot", "--table", "4", "--sts", sts_pairs)
    trained = {path.name for path in (tmp_path / "o" / "runs" / "gella2017").iterdir()}
    assert trained == {"vse-en", "oe-en", "pivot-sym", "parallel-sym", "pivot-asym", "parallel-asym"}
    assert "7 of 7: " in notes
    assert "Table 4: semantic textual similarity" in out
    assert f"written: {tmp_path}/o/gella2017-table-4.json" in out
    rows = json.loads((tmp_path / "o" / "gella2017-table-4.json").read_text())["rows"]
    assert [row["name"] for row in rows if row["runs"]] == [
        *("Shared task baseline", "MLMME (Calixto et al.)", "VSE", "OE"),
        *("PIVOT-SYM", "PARALLEL-SYM", "PIVOT-ASYM", "PARALLEL-ASYM"),
    ]


def test_evaluate_reports_missing_features(command, write_run, gappy):
    arguments = ("evaluate", write_run(), "--captions", gappy.captions, "--features", gappy.features, "--splits", "test")
    with pytest.raises(DatasetError, match="--allow-missing-features"):
        command(*arguments, "--device", "cpu")
    out, notes = command(*arguments, "--device", "cpu", "--allow-missing-features", "--json")
    assert notes == "left out of split 'test': 6 captions of 1 image without features: test-004\n"
    assert {score["missing_features"]["images"] for score in json.loads(out)["scores"]} == {1}


# --- sts -------------------------------------------------------------------------------------------------------------

ROWS = ["3.5\ten1 en2\ten2 en1", "1.0\ten7 en9\ten20", "\ten1\ten2", "0.5\ten12\ten3 en4", "4.8\ten5\ten5 en6"]
STS = ("sts-pairs.csv", "sts.json", "sts.png")


@pytest.fixture
def pairs(tmp_path) -> Path:
    (tmp_path / "pairs.tsv").write_text("\n".join(ROWS) + "\n")
    return tmp_path / "pairs.tsv"


def test_runs_and_sentence_pairs_are_told_apart_in_any_order(command, write_run, pairs):
    folders = write_run("one"), write_run("two", seed=1)
    expected = sts(StsJob((str(pairs), *folders), tokenized=True, device="cpu")).to_dict()
    for order in ((*folders, pairs), (pairs, *folders), (folders[0], pairs, *folders)):
        assert json.loads(command("sts", *order, "--tokenized", "--device", "cpu", "--json")[0]) == expected
    out, err = command("sts", *folders, pairs, "--tokenized", "--device", "cpu")
    assert "pairs: skipped 1 pair without a score" in err
    assert "4 pairs" in out
    baseline = expected["systems"][0]["scores"]["pairs"]
    assert f"word overlap {baseline['pearson']:.1f} ({baseline['spearman']:.1f})" in " ".join(out.split())


def test_sts_without_runs_measures_vectors_and_the_baseline(command, pairs, tmp_path):
    words = tmp_path / "words.vec"
    words.write_text("en1 1 0\nen2 0 1\nen5 1 1\nen20 2 1\n")
    report = json.loads(command("sts", pairs, "--vectors", words, "--json")[0])
    assert [system["name"] for system in report["systems"]] == ["word overlap", str(words)]


def test_output_of_sts_holds_numbers_pairs_and_a_picture(command, pairs, tmp_path):
    _, err = command("sts", pairs, "--output", tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [MADE_FROM_NAME, *STS]
    assert (tmp_path / "out" / "sts.png").read_bytes().startswith(b"\x89PNG")
    assert f"{tmp_path}/out/sts.json" in err
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    out, err = command("sts", pairs, "--output", tmp_path / "out", "--json")
    assert out == (tmp_path / "out" / "sts.json").read_text()
    assert "out' is up to date" in err
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before
    pairs.write_text(pairs.read_text().replace("\n", " \n", 1))
    assert "written: " in command("sts", pairs, "--output", tmp_path / "out")[1]


def test_sentences_go_through_the_recipe_of_a_run(command, tokenizer, write_run, pairs):
    pairs.write_text("1\t1 2\t2 3\n2\t1\t4\n")
    command("sts", write_run(), pairs, "--language", "de", "--truecaser", "models", "--device", "cpu")
    assert set(tokenizer) == {("de", "models")}


# --- figures ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_figures_of_a_run_read_images_as_features_does(command, write_run, toy, tmp_path):
    (tmp_path / "photos").mkdir()
    rows = ["file,uri"]
    for number in range(9):
        Image.new("RGB", (20, 10), (number, 0, 0)).save(tmp_path / "photos" / f"test-{number:03d}.png")
        rows.append(f"test-{number:03d},photos/test-{number:03d}.png")
    (tmp_path / "photos.csv").write_text("\n".join(rows) + "\n")
    run, data = write_run(), (*data_of(toy), "--split", "test", "--examples", "1")
    folder, table = tmp_path / "figures", tmp_path / "of-table"
    given = (run, folder, *data, "--top", "2", "--images", tmp_path / "photos")
    out, _ = command("figures", *given)
    lines = out.splitlines()
    assert lines[0].startswith("examples: 1 of the 9 images of split test with captions in de, en, drawn with seed 0")
    content = json.loads((folder / "figures.json").read_text())
    assert lines[1:3] == [f"1 {row['language']} rank {row['rank']} of 9: {row['text']}" for row in content["retrieval"]]
    assert lines[3:] == [f"written: {folder}/retrieval.png, {folder}/map.png, {folder}/figures.json"]
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert "is up to date" in command("figures", *given)[1]
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    retrieval = (*data, "--top", "2", "--only", "retrieval")
    command("figures", run, table, *retrieval, "--images", tmp_path / "photos.csv", "--columns", "image_id=file")
    assert (table / "retrieval.png").read_bytes() == (folder / "retrieval.png").read_bytes()
    assert "no pictures without --images: image ids are drawn instead" in command("figures", run, table, *retrieval)[1]
    assert (table / "retrieval.png").read_bytes() != (folder / "retrieval.png").read_bytes()
