import json

import pytest
from typer.testing import CliRunner

import extractors
from pipelines.commands import app as cli
from schemas.errors import UsageError

RUNNER = CliRunner()


@pytest.mark.slow
def test_the_help_has_a_panel_for_workers_elsewhere(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = RUNNER.invoke(cli.app, ["features", "--help"]).output
    panel = text[text.index("─ Workers on other machines ─") :].partition("╰")[0]
    assert all(option in panel for option in ("--gpu ", "--gpus-per-worker ", "--worker-machine "))


def test_the_help_names_extractors_and_kinds_of_source(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = " ".join(RUNNER.invoke(cli.app, ["features", "--help"]).output.replace("│", " ").split())
    for name in (*extractors.names(), "timm:NAME", "detectron2:CONFIG+WEIGHTS"):
        assert name in text
    for source in ("folder", "pattern", "table", "tar", "Parquet"):
        assert source in text


@pytest.mark.slow
def test_extractors_are_listed(monkeypatch):
    listed = json.loads(RUNNER.invoke(cli.app, ["extractors", "--json"]).stdout)
    assert listed == [entry.to_json() for entry in extractors.entries()]
    monkeypatch.setattr(cli.console, "_width", 80)
    text = RUNNER.invoke(cli.app, ["extractors"]).stdout
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    squeezed = " ".join(text.split())
    assert "resnet50-pool" in squeezed
    assert "│ makes │ regions, 36×2048, float32 │" in squeezed
    assert "│ mean │ 103.939, 116.779, 123.68 │" in squeezed
    assert "│ makes │ features, shape depends on the model, float32 │" in squeezed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["photos", "out", "--gpus-per-worker", "2"], "--gpus-per-worker needs --gpu: give --gpu, too"),
        (["photos", "out", "--gpu", "nvidia-l4", "--gpus-per-worker", "0"], "--gpus-per-worker is 0, expected 1 or more"),
        (["photos", "out", "--gpu", "nvidia-l4"], "--gpu is 'nvidia-l4', and the workers run on this machine"),
        (["photos", "out", "--gpu", "nvidia-l4", "--task", "0/2"], "--gpu is 'nvidia-l4', and the workers run on this machine"),
        (["photos", "out", "--worker-machine", "m"], "--worker-machine needs --gpu: give --gpu, too"),
    ],
)
def test_wrong_usage(arguments, message):
    result = RUNNER.invoke(cli.app, ["features", *arguments])
    assert isinstance(result.exception, UsageError)
    assert message in str(result.exception)
