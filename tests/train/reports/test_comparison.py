import json
import shutil
from dataclasses import replace
from statistics import mean, stdev

import pytest

from schemas.errors import DatasetError, UsageError
from schemas.storage.folder import Folder
from tests.train.runs.test_history import HISTORY, retrieval
from tests.train.trainings import CONFIG, ENGLISH, events
from train.reports.comparison import SCORES, SUM, ComparedRun, Comparison, SeedGroup, compare_runs
from train.reports.plots import picture_place, plot_comparison
from train.reports.tables import comparison_tables
from train.runs.checkpoints import read_checkpoint, write_checkpoint
from train.runs.history import History


@pytest.fixture
def runs(train_toy, finished_run, tmp_path):
    """A run, the same with another seed, and one with another configuration and one language."""
    shutil.copytree(finished_run[0], tmp_path / "both" / "seed-0")
    train_toy(name="both/seed-1", seed=1)
    train_toy(ENGLISH.replace("0.01", "0.02"), name="english")
    return [str(tmp_path / name) for name in ("both/seed-0", "both/seed-1", "english")]


@pytest.mark.slow
def test_differences_list_only_differing_settings(runs):
    comparison = compare_runs(runs)
    assert comparison.differences == {
        "data.portions": ({"en": ["comparable"], "de": ["comparable"]},) * 2 + ({"en": ["comparable"]},),
        "loss.c2c_probability": (0.5, 0.5, 0.0),
        "optimizer.learning_rate": (0.01, 0.01, 0.02),
        "seed": (0, 1, 0),
    }
    assert [run.name for run in comparison.runs] == ["both/seed-0", "both/seed-1", "english"]
    assert [run.state for run in comparison.runs] == ["steps"] * 3
    assert comparison.notes == ()


@pytest.mark.slow
def test_scores_are_those_of_the_best_step(runs, tmp_path):
    comparison = compare_runs(runs)
    assert comparison.languages == ("en", "de")
    for run in comparison.runs:
        best = max(events(tmp_path / run.name, "evaluation"), key=lambda line: line["score"])
        scores = run.scores("en")
        assert set(scores) == {*SCORES, SUM}
        assert scores["text_to_image", "recall_at_5"] == best["en"]["text_to_image"]["recall_at_5"]
        assert scores[SUM] == best["en"]["sum_of_recalls"]
        assert run.history.speed["steps_per_second"] > 0
    assert comparison.runs[2].scores("de") == {}


@pytest.mark.slow
def test_runs_differing_only_in_seeds_form_a_group(runs):
    comparison = compare_runs(runs)
    (group,) = comparison.groups
    assert (group.name, [run.name for run in group.runs]) == ("both", ["both/seed-0", "both/seed-1"])
    values = [run.scores("de")["image_to_text", "recall_at_10"] for run in group.runs]
    assert group.scores("de", mean)["image_to_text", "recall_at_10"] == mean(values)
    assert group.scores("de", stdev)["image_to_text", "recall_at_10"] == stdev(values)
    assert group.scores("fr", mean) == {}
    assert [comparison.label(run) for run in comparison.runs] == ["both (2 seeds)", "both (2 seeds)", "english"]


@pytest.mark.slow
def test_tables(runs):
    comparison = compare_runs(runs)
    differences, progress, scores = comparison_tables(comparison)
    assert differences.headings == ["", "both (2 seeds)", "english"]
    assert ("seed", "0, 1", "0") in differences.rows
    assert ("optimizer.learning_rate", "0.01", "0.02") in differences.rows
    assert [row[:2] for row in progress.rows] == [(run.name, "steps") for run in comparison.runs]
    assert [row[:2] for row in scores.values] == [
        *(["en", "both/seed-0"], ["", "both/seed-1"], ["", "english"], ["", "both, mean of 2"], ["", "  deviation"]),
        *(["de", "both/seed-0"], ["", "both/seed-1"], ["", "both, mean of 2"], ["", "  deviation"]),
    ]
    found = comparison.runs[2].scores("en")
    assert list(scores.rows[2][2:]) == [f"{found[pair]:.{0 if pair[1] == 'median_rank' else 1}f}" for pair in (*SCORES, SUM)]


@pytest.mark.slow
def test_plain_values(runs):
    values = json.loads(json.dumps(compare_runs(runs).to_dict()))
    assert [run["settings"]["seed"] for run in values["runs"]] == [0, 1, 0]
    assert values["runs"][2]["best"]["en"]["text_to_image"]["queries"] == 36
    assert values["groups"][0]["runs"] == ["both/seed-0", "both/seed-1"]
    assert set(values["groups"][0]["mean"]["de"]) == {"image_to_text", "text_to_image", "sum_of_recalls"}
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
    assert (run.state, run.history.last_step, run.scores("en"), dict(run.history.speed)) == ("unfinished", 10, {}, {})
    assert comparison.notes == ("unfinished runs are shown as far as they have come",)
    assert comparison_tables(comparison)[1].rows[1] == ("begun", "unfinished", 10, *"––––")
    assert plot_comparison(comparison, tmp_path / "a.png") == str(tmp_path / "a.png")


def test_compare_runs_with_an_interrupted_run(train_toy, finished_run, tmp_path):
    train_toy(CONFIG.replace("max_steps = 44", "max_steps = 20"), "short")
    comparison = compare_runs([str(finished_run[0]), str(tmp_path / "short")])
    assert comparison.differences == {"schedule.max_steps": (44, 20)}


def test_copy_without_its_last_checkpoint_or_log(copied_run, finished_run, tmp_path):
    (copied_run / "last.pt").unlink()
    (copied_run / "log.jsonl").unlink()
    comparison = compare_runs([str(finished_run[0]), str(copied_run)])
    assert comparison.differences == {}
    assert comparison.runs[1].history == History(())


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


def test_scores_on_other_captions_are_not_compared():
    settings = {"data.portions": {"en": ["comparable"]}, "data.validation_split": "val", "data: captions": "a", "seed": 0}
    run = ComparedRun("a", "runs/a", settings, "steps", HISTORY)
    entry = {"event": "evaluation", "step": 5, "score": 1.0, "en": retrieval(1.0)}
    entry["en"]["text_to_image"]["queries"] = 10
    others = {
        "captions": replace(run, settings={**settings, "data: captions": "b"}),
        "split": replace(run, settings={**settings, "data.validation_split": "test"}),
        "portions": replace(run, settings={**settings, "data.portions": {"en": ["translation"]}}),
        "queries": replace(run, history=History((entry,))),
    }
    from train.reports.comparison import _notes

    for name, other in others.items():
        assert [note.partition(":")[0] for note in _notes([run, replace(other, name="b")])] == ["en"], name
    assert _notes([run, replace(run, name="b")]) == []


# --- pictures ----------------------------------------------------------------------------------------------------------


def test_picture(monkeypatch, tmp_path):
    figures = []
    monkeypatch.setattr("train.reports.plots.save", lambda figure, folder, name: figures.append(figure))
    runs = tuple(ComparedRun(f"x/seed-{n}", f"x/{n}", {"seed": n}, "steps", HISTORY) for n in range(2))
    runs += (ComparedRun("other", "other", {"seed": 0, "loss.margin": 1}, "unfinished", History(HISTORY.entries[:4])),)
    plot_comparison(Comparison(runs, {}, (SeedGroup("x", runs[:2]),)), tmp_path / "a.png")
    losses, english, german, last = figures[0].axes
    assert [panel.get_ylabel() for panel in (losses, english, german)] == [
        *("loss per query", "validation recalls, en (sum)", "validation recalls, de (sum)")
    ]
    assert [len(panel.lines) for panel in (losses, english, german)] == [3, 3, 2]
    assert list(english.lines[0].get_ydata()) == [12.0, 18.0]
    looks = [(line.get_color(), line.get_marker()) for line in losses.lines]
    assert looks[0] == looks[1] != looks[2]
    assert [text.get_text() for text in last.get_legend().texts] == ["x (2 seeds)", "other"]


@pytest.mark.parametrize(
    ("output", "folder", "name"),
    [
        ("a.png", ".", "a.png"),
        ("/a.pdf", "/", "a.pdf"),
        ("x/y/a.svg", "x/y", "a.svg"),
        ("x", "x", "comparison.png"),
        ("x/y.png/", "x/y.png", "comparison.png"),
        ("gs://bucket/a.png", "gs://bucket", "a.png"),
    ],
)
def test_place_of_the_picture(output, folder, name):
    found = picture_place(output)
    assert (found[0].location, found[1]) == (folder, name)
    with pytest.raises(UsageError, match=r"--output is 'a\.jpeg', expected a folder"):
        picture_place("a.jpeg")
