import io
from pathlib import Path

import numpy as np
import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from pipelines.commands.exchange import register
from schemas.dataset import open_dataset
from schemas.errors import UsageError


@pytest.fixture
def call():
    """Runs a command of an application that has only these; gives exit code and what was printed."""
    app, file = typer.Typer(), io.StringIO()
    made = []
    console = Console(file=file, width=200)
    register(app, console=console, notes=console, finish=lambda manifest, output: made.append((manifest.rows, output)))

    def run(*arguments: str):
        done = CliRunner().invoke(app, list(arguments), terminal_width=200, env={"COLUMNS": "200"})
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return done.exit_code, file.getvalue() + done.output

    run.made = made
    return run


def write_arrays(folder: Path) -> np.ndarray:
    values = np.random.default_rng(0).standard_normal((4, 6)).astype("float32")
    for name, part, ids in (("train", values[:3], "a.jpg\nb.jpg\nc.jpg\n"), ("val", values[3:], "d.jpg\n")):
        np.save(folder / f"{name}.npy", part)
        (folder / f"{name}.lst").write_text(ids)
    return values


def test_import_export_and_diff_go_round(tmp_path, call):
    values = write_arrays(tmp_path)
    files = [str(tmp_path / f"{name}.npy") for name in ("train", "val")]
    lists = [part for name in ("train", "val") for part in ("--ids", str(tmp_path / f"{name}.lst"))]
    out = str(tmp_path / "features")
    assert call("import", *files, out, "--name", "surrogate", "--source", "made up", "--shards", "2", *lists)[0] == 0
    assert call.made == [(4, out)]
    assert open_dataset(out).spec.source == "made up"
    np.testing.assert_array_equal(open_dataset(out).get("d")["feature"], values[3])

    code, shown = call("export", out, str(tmp_path / "arrays"), "--format", "npy")
    assert (code, "npy: 2 files, " in shown) == (0, True)
    back = str(tmp_path / "back")
    assert call("import", str(tmp_path / "arrays" / "features.npy"), back, "--name", "surrogate")[0] == 0
    code, shown = call("diff", out, back)
    assert (code, f"{out} and {back} hold the same rows" in shown) == (0, True)

    np.save(tmp_path / "arrays" / "features.npy", np.load(tmp_path / "arrays" / "features.npy") + np.float32(0.5))
    other = str(tmp_path / "other")
    assert call("import", str(tmp_path / "arrays" / "features.npy"), other, "--name", "surrogate")[0] == 0
    assert call("diff", out, other)[0] == 1
    assert call("diff", out, other, "--tolerance", "0.6")[0] == 0


def test_wrong_usage_is_an_error_of_ours(tmp_path, call):
    with pytest.raises(UsageError, match="give their dataset with --captions"):
        call("export", "features", str(tmp_path), "--format", "scan")


@pytest.mark.parametrize("name", ["import", "export", "diff"])
def test_help_has_an_example(call, name):
    code, shown = call(name, "--help")
    assert code == 0
    assert f"Example: imagepivot {name} " in " ".join(shown.split())
