from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import pytest
import typer

from schemas.console import events
from schemas.console.tables import Cell
from schemas.dataset import open_dataset
from schemas.errors import DatasetError, UsageError
from tests.train.trainings import CONFIG
from train.commands import options, runs, tables
from train.data.splits import open_data
from train.evaluation.averaging import averages, evaluation_report
from train.evaluation.scoring import score_run, score_together
from train.evaluation.searching import embed_gallery, search_gallery
from train.reports import row_runs
from train.reports.comparison import compare_runs
from train.reports.tables import score_tables
from train.runs.run import open_run


def tokenize(text, language, recipe, truecaser) -> list[str]:
    return [f"{language}{word}" for word in f"{text} {recipe.recipe} {truecaser}".split()]


@pytest.fixture
def command(capsys, monkeypatch):
    """Run a command, mounted as an application mounts it; return its standard output and standard error."""
    for console in (options.console, options.notes):
        monkeypatch.setattr(console, "_width", 140)
    app = typer.Typer(pretty_exceptions_enable=False)
    app.add_typer(runs.app)
    app.add_typer(tables.app)

    def run(*arguments: object, obj=tokenize) -> tuple[str, str]:
        app([str(argument) for argument in arguments], standalone_mode=False, obj=obj)
        printed = capsys.readouterr()
        return printed.out, printed.err

    return run


@pytest.mark.slow
def test_evaluate_prints_the_scores(command, write_run, toy):
    folder = write_run()
    arguments = (
        "evaluate",
        folder,
        "--captions",
        toy.captions,
        "--features",
        toy.features,
        "--split",
        "test",
        "--device",
        "cpu",
    )
    scores = score_run(open_run(folder), captions=toy.captions, features=toy.features, splits=["test"])
    assert json.loads(command(*arguments, "--json")[0]) == evaluation_report(scores)
    assert json.loads(command(*arguments, "--json", "--portion", "translation")[0])["scores"] == [scores[-1].to_dict()]
    assert json.loads(command(*arguments, "--json", "--languages", "de")[0])["scores"] == [
        score.to_dict() for score in scores if score.language == "de"
    ]
    table, _ = command(*arguments)
    for score in scores:
        (line,) = (line for line in table.splitlines() if f"{score.language} {score.portion}" in line)
        assert f"{score.retrieval.image_to_text.recall_at_5:.1f} ({score.chance['image_to_text'][1]:.1f})" in line
    assert "27 texts" in table


@pytest.mark.slow
def test_evaluate_writes_a_report_that_stays_while_its_inputs_do(command, write_run, toy, tmp_path):
    report = tmp_path / "report.json"
    arguments = ("evaluate", write_run(), "--captions", toy.captions, "--features", toy.features, "--output", report)
    out, err = command(*arguments, "--split", "val", "--json")
    content = json.loads(report.read_text())
    assert f"written: {report}" in err.replace("\n", "")
    assert content.pop("made_from")["options"]["splits"] == ["val"]
    assert content == json.loads(out)
    before = report.stat().st_mtime_ns
    out, err = command(*arguments, "--split", "val", "--json")
    assert "is up to date" in err
    assert out == report.read_text()
    assert report.stat().st_mtime_ns == before
    command(*arguments, "--split", "test")
    assert json.loads(report.read_text())["made_from"]["options"]["splits"] == ["test"]
    report.write_text("{}")
    with pytest.raises(DatasetError, match="is no report of imagepivot evaluate: choose another name"):
        command(*arguments)
    with pytest.raises(UsageError, match=r"expected a file that ends in \.json"):
        command(*arguments[:-1], tmp_path / "report")
    assert report.read_text() == "{}"


def test_evaluate_in_folds(command, write_run, toy):
    folder = write_run()
    arguments = ("evaluate", folder, "--captions", toy.captions, "--features", toy.features, "--split", "val", "--folds", 3)
    scores = score_run(open_run(folder), captions=toy.captions, features=toy.features, splits=["val"], folds=3)
    assert json.loads(command(*arguments, "--json")[0]) == evaluation_report(scores)
    assert "means over 3 folds of the images" in " ".join(command(*arguments)[0].split())


@pytest.mark.slow
def test_evaluate_takes_an_ensemble(command, write_run, toy):
    folders = [write_run("a", seed=0), write_run("b", seed=1)]
    arguments = ("--captions", toy.captions, "--features", toy.features, "--split", "test", "--device", "cpu")
    scores = score_together([open_run(run) for run in folders], captions=toy.captions, features=toy.features, splits=["test"])
    assert json.loads(command("evaluate", *folders, *arguments, "--json")[0]) == evaluation_report(scores)
    table, _ = command("evaluate", *folders, *arguments)
    assert f"mean scores of {folders[0]}, {folders[1]}".replace(" ", "") in "".join(table.split())


@pytest.mark.slow
def test_compare(command, finished_run, train_toy, tmp_path):
    train_toy(CONFIG.replace("word_dim = 4", "word_dim = 5"), "wide")
    folders = (finished_run[0], tmp_path / "wide")
    comparison = compare_runs([str(folder) for folder in folders])
    out, notes = command("compare", *folders, "--json", "--output", tmp_path / "pictures")
    assert json.loads(out) == comparison.to_dict()
    assert notes == f"written: {tmp_path}/pictures/comparison.png\n"
    assert (tmp_path / "pictures" / "comparison.png").read_bytes().startswith(b"\x89PNG")
    out, notes = command("compare", *folders)
    assert re.search(r"model\.word_dim +4 +5 *\n", out)
    assert notes == ""
    with pytest.raises(
        UsageError, match=r"--output is '.*/a\.jpg', expected a folder, or a file that ends in \.png, \.pdf, \.svg"
    ):
        command("compare", *folders, "--output", tmp_path / "a.jpg")


@pytest.mark.slow
def test_evaluate_prints_means_and_captions_across_languages(command, write_run, toy):
    folder = write_run(languages=("en", "de", "fr"))
    data = ("--captions", toy.captions, "--features", toy.features, "--split", "test", "--device", "cpu")
    scores = score_run(open_run(folder), captions=toy.captions, features=toy.features, splits=["test"], across_languages=True)
    _, means, across = score_tables(scores, title="")
    for average in averages(scores):
        (row,) = (row for row in means.values if row[0] == f"{average.portion} mean test")
        assert row[-2:] == [average.mean_recall, average.sum_of_recalls]
    for score in scores:
        (row,) = (row for row in means.values if row[0] == f"{score.portion} {score.language} test")
        assert row[-2:] == [score.retrieval.mean_recall, score.retrieval.sum_of_recalls]
        for language, found in score.across_languages.items():
            first = across.rows.index([Cell(score.portion, style="dim"), Cell("test", style="dim")])
            row = next(row for row in across.rows[first:] if row[0] == f"  {score.language} to {language}")
            assert row[-2:] == (Cell(found.direction.recall_at_10, found.chance[2]), found.direction.median_rank)
    assert json.loads(command("evaluate", folder, *data, "--across-languages", "--json")[0]) == evaluation_report(scores)
    assert "captions among captions" in command("evaluate", folder, *data, "--across-languages")[0]
    assert " to de" not in command("evaluate", folder, *data)[0]


@pytest.mark.slow
def test_work_with_a_run_counts_what_it_embeds(command, write_run, toy, tmp_path, monkeypatch):
    """The last progress is complete, also where an earlier run did all of it."""
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    folder, images = write_run(), len(open_dataset(toy.features))
    captions = len(open_dataset(toy.captions))

    def progress_of(*arguments):
        stream.seek(0)
        stream.truncate()
        command(*arguments, "--device", "cpu", "--log-json")
        events.finish(0)
        found = [json.loads(text) for text in stream.getvalue().splitlines()]
        return [event for event in found if event["event"] == "progress"][-1], found[-1]["counts"]

    embed = ("embed", folder, tmp_path / "e", "--features", toy.features, "--captions", toy.captions)
    for _ in range(2):
        last, counts = progress_of(*embed)
        assert (last["what"], last["unit"], last["done"], last["total"]) == (
            "embed",
            "vectors",
            images + captions,
            images + captions,
        )
        assert counts["shards"] == 6
    last, counts = progress_of("search", folder, "en1", "--tokenized", "--language", "en", "--features", toy.features)
    assert (last["done"], last["total"], counts) == (images, images, {"hits": 10})
    evaluated = ("evaluate", folder, "--captions", toy.captions, "--features", toy.features, "--split", "test", "--json")
    last, counts = progress_of(*evaluated)
    scores = score_run(open_run(folder), captions=toy.captions, features=toy.features, splits=["test"])
    test = len(open_data(toy.captions, toy.features, split="test", languages=["en"], portions=["comparable"]).features.array)
    queries = sum(score.retrieval.text_to_image.queries for score in scores)
    assert counts == {"scores": len(scores)}
    assert queries < last["done"] <= queries + len(scores) * max(test, images)


def test_evaluate_maps_features_that_do_not_fit(command, write_run, toy, tmp_path, monkeypatch):
    arguments = ("evaluate", write_run(), "--captions", toy.captions, "--features", toy.features, "--split", "test", "--json")
    expected = command(*arguments, "--device", "cpu")
    monkeypatch.setattr("os.sysconf", lambda name: 1)
    with pytest.raises(UsageError, match="--memory-map"):
        command(*arguments, "--device", "cpu")
    assert command(*arguments, "--device", "cpu", "--memory-map", tmp_path / "map") == expected
    assert len(list((tmp_path / "map").iterdir())) == 1


def test_embed_prints_the_written_datasets(command, write_run, toy, tmp_path):
    out, _ = command("embed", write_run("my-run"), tmp_path / "e", "--features", toy.features, "--captions", toy.captions)
    images, captions = (open_dataset(tmp_path / "e" / name) for name in ("images", "captions"))
    assert f"features: {len(images)} rows in 3 shards" in out
    assert f"embeddings: {len(captions)} rows in 3 shards" in out
    assert images.spec.name == captions.spec.name == "my-run"
    with pytest.raises(UsageError, match="nothing to embed: give --features, --captions, or both"):
        command("embed", tmp_path / "my-run", tmp_path / "f")


@pytest.mark.slow
def test_search_lists_images(command, write_run, toy, tmp_path):
    folder = write_run()
    run = open_run(folder)
    gallery = embed_gallery(run, toy.features)
    hits = search_gallery(run, ["en1", "en2", "enraw"], "en", gallery, top=4)
    expected = [{"image_id": hit.image_id, "score": pytest.approx(hit.score)} for hit in hits]
    arguments = ("search", folder, "1 2", "--language", "en", "--top", "4")
    out, notes = command(*arguments, "--features", toy.features, "--json")
    assert json.loads(out) == expected
    assert "not in the vocabulary: enraw" in notes  # The tokenizer got the recipe of the run's captions.
    command("embed", folder, tmp_path / "e", "--features", toy.features)
    assert json.loads(command(*arguments, "--embeddings", tmp_path / "e", "--json")[0]) == expected
    tokenized = command("search", folder, "en1 en2", "--language", "en", "--tokenized", "--features", toy.features)
    assert search_gallery(run, ["en1", "en2"], "en", gallery)[0].image_id in tokenized[0].splitlines()[1]
    assert tokenized[1] == ""


def test_search_needs_no_language_for_a_run_with_one(command, write_run, toy):
    folder = write_run(languages=("de",))
    out, _ = command("search", folder, "1", "--features", toy.features, "--truecaser", "2", "--json")
    run = open_run(folder)
    expected = search_gallery(run, ["de1", "deraw", "de2"], "de", embed_gallery(run, toy.features))
    assert [hit["image_id"] for hit in json.loads(out)] == [hit.image_id for hit in expected]


def test_search_reports_missing_options(command, write_run, toy):
    folder = write_run()
    with pytest.raises(UsageError, match="--language is '', but this run knows only en, de"):
        command("search", folder, "1", "--features", toy.features)
    for places in ((), ("--features", toy.features, "--embeddings", "e")):
        with pytest.raises(UsageError, match="give either --features or --embeddings"):
            command("search", folder, "1", "--language", "en", *places)


def test_search_without_a_tokenizer_takes_only_tokens(command, write_run, toy):
    arguments = ("search", write_run(), "en1", "--language", "en", "--features", toy.features, "--device", "cpu")
    with pytest.raises(UsageError, match=r"pip install 'imagepivot\[pipelines\]'"):
        command(*arguments, obj=None)
    assert command(*arguments, "--tokenized", "--json", obj=None) == command(*arguments, "--tokenized", "--json")


@pytest.mark.slow
def test_tables_writes_the_report(command, toy_2016, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    maps = []
    for name in ("open_material", "score_together"):
        function = getattr(row_runs, name)

        def spied(*arguments, function=function, **keywords):
            maps.append(keywords["memory_map"])
            return function(*arguments, **keywords)

        monkeypatch.setattr(row_runs, name, spied)
    out, notes = command(
        *("tables", "gella2017", "~/o", "--rows", "vse-de", "--seeds", "1", "--workers", "1", "--device", "cpu"),
        *("--captions", toy_2016.captions, "--features", toy_2016.features, "--vocabulary", toy_2016.vocabulary),
        *("--max-steps", "2", "--set", "model.embed_dim=6", "--set", "model.word_dim=4", "--set", "schedule.batch_size=8"),
        *("--memory-map", tmp_path / "map"),
    )
    assert maps == [str(tmp_path / "map")] * 2
    assert "1 of 1: gella2017/vse-de, seed 0" in notes
    assert "gella2017/vse-de: words: " in out
    assert "best after 2 of 2 steps; seeds: 1 of 1" in out
    assert "Table 2 (comparable captions)" in out
    assert "schedule.max_steps=2" in out
    markdown = Path(tmp_path, "o", "gella2017.md").read_text()
    assert "| VSE | de | 1 | " in markdown
    assert Path(tmp_path, "o", "gella2017.png").stat().st_size > 1000


@pytest.mark.cluster
@pytest.mark.slow
def test_a_table_chooses_its_rows_and_table_3_ranks_captions(command, toy_2016, tmp_path):
    arguments = (
        *("tables", "gella2017", tmp_path / "o", "--seeds", "1", "--workers", "1", "--device", "cpu", "--no-plot"),
        *("--captions", toy_2016.captions, "--features", toy_2016.features, "--vocabulary", toy_2016.vocabulary),
        *("--max-steps", "2", "--set", "model.embed_dim=6", "--set", "model.word_dim=4", "--set", "schedule.batch_size=8"),
    )
    with pytest.raises(UsageError, match="--table and --rows both choose rows"):
        command(*arguments, "--table", "3", "--rows", "vse-*")
    with pytest.raises(UsageError, match="--table is 9, but the tables of gella2017 are 1, 2, 3"):
        command(*arguments, "--table", "9")
    out, notes = command(*arguments, "--table", "3")
    trained = {path.name for path in (tmp_path / "o" / "runs" / "gella2017").iterdir()}
    assert trained == {"oe-de", "oe-en", "pivot-asym", "parallel-asym"}
    assert "4 of 4: " in notes
    assert "Table 3: all captions" in out
    assert f"written: {tmp_path}/o/gella2017-table-3.json" in out
    assert json.loads((tmp_path / "o" / "gella2017-table-3.json").read_text())["images"] == 9


@pytest.mark.cluster
@pytest.mark.slow
def test_table_4_is_measured_on_sentence_pairs(command, toy_2016, sts_pairs, tmp_path):
    arguments = (
        *("tables", "gella2017", tmp_path / "o", "--seeds", "1", "--workers", "1", "--device", "cpu", "--no-plot"),
        *("--captions", toy_2016.captions, "--features", toy_2016.features, "--vocabulary", toy_2016.vocabulary),
        *("--max-steps", "2", "--set", "model.embed_dim=6", "--set", "model.word_dim=4", "--set", "schedule.batch_size=8"),
    )

    def lengths(text, language, recipe, truecaser) -> list[str]:
        return [f"{language}{len(word)}" for word in text.split()]

    with pytest.raises(UsageError, match="table 4 of gella2017 is measured on sentence pairs: give --sts"):
        command(*arguments, "--table", "4")
    with pytest.raises(UsageError, match="--sts is given, but kadar2018 has no table of textual similarity"):
        command("tables", "kadar2018", *arguments[2:], "--sts", sts_pairs)
    assert not (tmp_path / "o").exists()
    out, notes = command(*arguments, "--table", "4", "--sts", sts_pairs, obj=lengths)
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


def test_evaluate_says_what_it_leaves_out(command, write_run, gappy):
    arguments = ("evaluate", write_run(), "--captions", gappy.captions, "--features", gappy.features, "--split", "test")
    with pytest.raises(DatasetError, match="--allow-missing-features"):
        command(*arguments, "--device", "cpu")
    out, notes = command(*arguments, "--device", "cpu", "--allow-missing-features", "--json")
    assert notes == "left out of split 'test': 6 captions of 1 images without features: test-004\n"
    assert {score["missing_features"]["images"] for score in json.loads(out)["scores"]} == {1}


@pytest.mark.slow
@pytest.mark.cluster
def test_tables_say_what_they_leave_out_once(command, toy_2016, without_features, tmp_path):
    few = without_features(toy_2016, tmp_path)
    out, notes = command(
        *("tables", "gella2017", tmp_path / "o", "--rows", "vse-*", "--seeds", "1", "--workers", "1", "--device", "cpu"),
        *("--captions", few.captions, "--features", few.features, "--vocabulary", few.vocabulary, "--no-plot"),
        *("--max-steps", "2", "--set", "model.embed_dim=6", "--set", "model.word_dim=4", "--set", "schedule.batch_size=8"),
        "--allow-missing-features",
    )
    assert [line.partition(":")[0] for line in notes.splitlines() if line.startswith("left out")] == [
        f"left out of split '{split}'" for split in ("train", "val", "test_2016")
    ]
    assert "left out of 2 runs" in out


def test_embed_takes_splits_and_languages(command, write_run, toy, tmp_path):
    arguments = ("embed", write_run(), tmp_path / "e", "--features", toy.features, "--captions", toy.captions)
    command(*arguments, "--splits", "test, val", "--languages", "de")
    images, captions = (open_dataset(tmp_path / "e" / name) for name in ("images", "captions"))
    assert captions.manifest.parameters["selection"] == {"splits": ["test", "val"], "languages": ["de"]}
    assert images.manifest.parameters["selection"] == {"splits": ["test", "val"]}
    assert len(images) == 21
    with pytest.raises(DatasetError, match="holds another dataset"):
        command(*arguments, "--splits", "val")


def test_embed_says_which_images_it_lacks(command, write_run, gappy, tmp_path):
    arguments = (
        "embed",
        write_run(),
        tmp_path / "e",
        "--features",
        gappy.features,
        "--captions",
        gappy.captions,
        "--splits",
        "test",
    )
    with pytest.raises(DatasetError, match="--allow-missing-features"):
        command(*arguments)
    _, notes = command(*arguments, "--allow-missing-features")
    assert notes == "not embedded for lack of features: 1 of 9 images of split 'test': test-004\n"
