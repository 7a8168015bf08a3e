import importlib
import shlex
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from pipelines.commands import app as cli
from pipelines.commands.results import finish_dataset
from schemas.errors import DatasetError, UsageError
from schemas.manifest import Manifest, ShardEntry
from schemas.writing.reuse_policy import FailureLimit

COMMANDS = (
    *("captions", "vocabulary", "encode", "word-vectors", "text-features", "features", "extractors", "import", "export"),
    *("inspect", "view", "validate", "publish", "diff", "duplicates", "report", "doctor", "build", "demo"),
    *("train", "evaluate", "compare", "embed", "search", "sts", "figures", "reproduce"),
)
ROOT = Path(cli.__file__).parents[1]


@pytest.fixture(scope="module")
def command():
    """The command line, built once: typer takes some 40 ms for that."""
    return typer.main.get_command(cli.app)


def test_commands_are_listed_in_tests(command):
    assert set(command.commands) == set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_80_columns_and_ends_with_an_example(command, capsys, monkeypatch, name):
    monkeypatch.setenv("COLUMNS", "80")
    assert command.main([name, "--help"], standalone_mode=False) == 0
    shown = capsys.readouterr().out
    assert f"Example: imagepivot {name} " in " ".join(shown.split())
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= 80
    panel = next(lines for lines in shown.split("╭─") if lines.startswith(" Options"))
    help_column = next(line.index("Show this message") for line in panel.splitlines() if "Show this message" in line)
    assert help_column <= 48  # Room for what an option means.


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_can_be_parsed(command, name):
    named = command.commands[name]
    arguments = shlex.split(named.epilog.removeprefix("Example: imagepivot "))
    assert arguments[0] == named.name == name
    assert named.make_context(name, arguments[1:], resilient_parsing=False).params


@pytest.mark.slow
def test_starting_loads_nothing_heavy():
    code = (
        "import sys, pipelines.commands.app; from typer.testing import CliRunner\n"
        "for name in sys.argv[1:]: assert CliRunner().invoke(pipelines.commands.app.app, [name, '--help']).exit_code == 0\n"
        "heavy = {'apache_beam', 'torch', 'torchvision', 'PIL', 'pyarrow', 'numpy', 'sacremoses', 'tomllib', 'pydantic'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *COMMANDS], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


def raising(error: BaseException):
    def broken(*_, **__):
        raise error

    return broken


@pytest.mark.parametrize("error", [DatasetError("a [bold]folder[/bold] is wrong"), UsageError("--x is [0]")])
def test_error_of_the_user_is_one_line(call, monkeypatch, error):
    monkeypatch.setattr("schemas.writing.validation.validate", raising(error))
    assert call("validate", "folder") == (2 if isinstance(error, UsageError) else 1, "", f"Error: {error}\n")


@pytest.mark.parametrize(
    ("words", "place", "module", "extra"),
    [
        (("train", "vsepp", "run"), "train.config.sections.load_config", "torch", "train"),
        (("validate", "folder"), "schemas.writing.validation.validate", "ours", ""),
    ],
)
def test_missing_module_names_its_extra_or_is_raised(call, monkeypatch, words, place, module, extra):
    monkeypatch.setattr(place, raising(ModuleNotFoundError(f"No module named {module!r}", name=module)))
    if extra:
        says = f"Error: this command needs {module}, which is not installed: pip install 'imagepivot[{extra}]'\n"
        assert call(*words) == (1, "", says)
    else:
        monkeypatch.setattr(sys, "argv", ["imagepivot", *words])
        with pytest.raises(ModuleNotFoundError, match=module):
            cli.main()


KEPT = "stopped; finished {} are kept, the same command continues from here\n"
DATA = "--captions c --features f --vocabulary v"


@pytest.mark.parametrize(
    ("words", "place", "says"),
    [
        ("encode captions vocabulary encoded", "schemas.dataset.open_dataset", KEPT.format("shards")),
        (f"reproduce kadar2018 tables {DATA}", "train.reports.row_datasets.corpora_of", KEPT.format("runs")),
        ("validate folder", "schemas.writing.validation.validate", "stopped\n"),
        (f"train vsepp run {DATA}", "train.loop.training.train", "stopped before training began; nothing was changed"),
    ],
)
def test_ctrl_c_reports_kept_work(call, monkeypatch, words, place, says):
    for module in ("pipelines.text.encoding", "train.reports.reproduce"):  # They would keep replaced functions for other tests.
        importlib.import_module(module)
    monkeypatch.setattr(place, raising(KeyboardInterrupt()))
    code, out, err = call(*words.split())
    assert (code, out) == (130, "")
    assert err == says if says.endswith("\n") else says in err


@pytest.mark.parametrize(
    ("error", "first", "last"),
    [
        (DatasetError("'a' is broken"), "'a' is broken\n", "'a' is broken\n"),
        (ValueError("ours"), "Traceback (most recent call last):\n", "ValueError: ours\n"),
    ],
)
def test_torchrun_shows_an_error_and_only_a_bugs_traceback(call, monkeypatch, tmp_path, error, first, last):
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    monkeypatch.setattr("schemas.writing.validation.validate", raising(error))
    with pytest.raises(ValueError, match="ours") if isinstance(error, ValueError) else nullcontext():
        call("validate", "folder")
    summary = str(ChildFailedError("train", {1: ProcessFailure(1, 0, 1, str(file))}))
    assert f"traceback : {first}" in summary
    assert last in summary


def manifest(rows: int, failed: int = 0) -> Manifest:
    entry = ShardEntry("part-00000-of-00001.parquet", 1, "0" * 64, rows)
    failures = (ShardEntry("failures/part-00000-of-00001.parquet", 1, "0" * 64, failed),) if failed else ()
    reasons = {"truncated": 1, "empty": failed - 1} if failed else {}
    return Manifest("features", "abcdef0123456789", {}, (), {}, (entry,), failures, reasons)


def test_finish_dataset_prints_rows_failures_weights_and_changes(capsys):
    finish_dataset(replace(manifest(1234), parameters={"extractor": {"untrained": True}}), "out[1]")
    out, err = capsys.readouterr()
    assert out.startswith("features: 1,234 rows in 1 shard in out[1] (0 failed, 0.0 kB, ")
    assert (out.endswith(", untrained weights)\n"), err) == (True, "")
    finish_dataset(manifest(10), "out", changes={"new": 2, "changed": 1, "removed": 3})
    assert capsys.readouterr().out.splitlines()[1] == "update: 2 new, 1 changed, 3 removed, 7 kept"


@pytest.mark.parametrize(("most", "code"), [(0, 3), (4, 3), (5, None), (6, None)])
def test_more_failures_than_allowed_are_exit_code_3(capsys, most, code):
    if code is None:
        finish_dataset(manifest(7, 5), "o[red]t", FailureLimit(str(most)))
    else:
        with pytest.raises(typer.Exit) as caught:
            finish_dataset(manifest(7, 5), "o[red]t", FailureLimit(str(most)))
        assert caught.value.exit_code == code
    err = capsys.readouterr().err
    assert err == "5 inputs failed: 4 empty, 1 truncated. They are listed by: imagepivot inspect 'o[red]t' --failures\n"
