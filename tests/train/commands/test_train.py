import pytest
from typer.testing import CliRunner

from schemas.errors import DatasetError, UsageError
from train.commands.train import app
from train.config.presets import preset_names
from train.config.sections import from_toml, resolve
from train.runs.run import open_run

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
def command(monkeypatch):
    """Run the command; return its output, or raise its exception."""
    monkeypatch.setenv("COLUMNS", "200")

    def command(*arguments: str) -> str:
        result = CliRunner().invoke(app, list(arguments))
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == 0, result.output
        return result.output

    return command


@pytest.fixture
def datasets(toy):
    return ["--captions", toy.captions, "--features", toy.features, "--vocabulary", toy.vocabulary]


@pytest.mark.slow
def test_a_run_from_a_file(command, datasets, tmp_path):
    (tmp_path / "small.toml").write_text(SMALL)
    settings = ["--set", "model.embed_dim=5", "--set", "loss.hinges = max", "--max-steps", "12", "--seed", "7"]
    given = [str(tmp_path / "small.toml"), str(tmp_path / "run"), *datasets, "--device", "cpu"]
    output = command(*given, *settings, "--no-tensorboard", "--no-curves")
    assert "12 steps in" in output
    assert "ended by steps; best sum of recalls" in output
    run = open_run(tmp_path / "run")
    assert (run.model.width, run.config.loss.hinges, run.step, run.seed) == (5, "max", 12, 7)
    assert not (tmp_path / "run" / "tensorboard").exists()
    assert not (tmp_path / "run" / "curves.png").exists()
    assert (tmp_path / "run" / "metrics.csv").read_text().startswith("event,step,loss,terms.")
    assert from_toml((tmp_path / "run" / "config.toml").read_text(), "run") == run.config

    again = command(*given, *settings, "--no-tensorboard", "--no-curves")
    assert again.splitlines()[-1] == output.splitlines()[-1]
    with pytest.raises(UsageError, match="holds a run: give --resume"):
        command(*given, *settings, "--max-steps", "13")
    assert "20 steps in" in command(*given, *settings, "--max-steps", "20", "--resume")
    assert (tmp_path / "run" / "tensorboard").is_dir()
    assert (tmp_path / "run" / "curves.png").is_file()


def test_presets_are_listed(command):
    lines = command("--list-presets").splitlines()
    assert [line.split("  ")[0] for line in lines] == list(preset_names())
    assert "kadar2018/bilingual-c2c  Kádár et al. 2018, tables 2 and 3, Bilingual + c2c: English and German" in lines


def test_a_configuration_is_shown_in_full(command):
    text = command("gella2017/oe-de", "--show", "--set", "schedule.max_steps=9")
    assert from_toml(text, "shown") == resolve("gella2017/oe-de", {"schedule.max_steps": "9"})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a preset or a TOML file"),
        (["vsep"], "there is no preset 'vsep': did you mean vsepp"),
        (["vsepp"], "OUTPUT is missing"),
        (["vsepp", "out"], "--captions is missing"),
        (["vsepp", "out", "--captions", "c", "--features", "f"], "--vocabulary is missing"),
        (
            ["scan/t2i-avg", "out", "--captions", "c", "--features", "f", "--vocabulary", "v", "--compile"],
            "--compile gains nothing with a model of the kind 'scan'.* Leave --compile out",
        ),
        (["vsepp", "out", "--set", "loss.margin"], "--set 'loss.margin' is not KEY=VALUE"),
        (["vsepp", "out", "--set", "=3"], "--set '=3' is not KEY=VALUE"),
        (["vsepp", "out", "--set", "loss.marign=3"], r"vsepp: unknown key loss.marign: did you mean 'loss.margin'\?"),
    ],
)
def test_wrong_usage(command, arguments, message):
    with pytest.raises(UsageError, match=message):
        command(*arguments)


def test_a_missing_dataset_is_refused(command, datasets, tmp_path):
    with pytest.raises(DatasetError, match=r"nowhere.* is not a dataset"):
        command("vsepp", str(tmp_path / "run"), *datasets, "--features", str(tmp_path / "nowhere"))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_it_says_what_it_leaves_out(command, datasets, gappy, tmp_path):
    (tmp_path / "small.toml").write_text(SMALL)
    given = [str(tmp_path / "small.toml"), str(tmp_path / "run"), *datasets, "--features", gappy.features, "--device", "cpu"]
    with pytest.raises(DatasetError, match=r"lacks the features of 2 of 12 images .* with --allow-missing-features"):
        command(*given, "--max-steps", "3")
    output = command(*given, "--max-steps", "3", "--no-tensorboard", "--allow-missing-features")
    assert "left out of split 'train': 21 captions of 7 images without features: train-003, train-005, train-007, " in output
    assert "left out of split 'val': 6 captions of 2 images without features: val-002, val-009\n" in output
    assert open_run(tmp_path / "run").missing_features["val"]["images"] == 2


@pytest.mark.slow
def test_it_starts_from_another_run(command, datasets, tmp_path):
    (tmp_path / "small.toml").write_text(SMALL)
    given = [str(tmp_path / "small.toml"), *datasets, "--device", "cpu", "--no-tensorboard", "--max-steps", "3"]
    command(*given, str(tmp_path / "first"))
    output = command(*given, str(tmp_path / "second"), "--from", str(tmp_path / "first"))
    assert f"started from '{tmp_path / 'first'}' (best.pt, step 3): 7 of 7 parameters taken, with the vectors of " in output
    assert open_run(tmp_path / "second").started_from["run"] == str(tmp_path / "first")
