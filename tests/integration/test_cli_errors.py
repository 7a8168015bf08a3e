"""Mistakes of users: one clear message on standard error, the right exit code, and no traceback."""

import shutil
import subprocess
from pathlib import Path

import pytest

from schemas.features import FeatureSpec
from tests.builders import write_rows


@pytest.fixture
def fails(imagepivot, caplog):
    """Run the command, and check exit code and message."""

    def run(*arguments: object, code: int = 1, says: str, command=imagepivot) -> subprocess.CompletedProcess[str]:
        done = command(*arguments, code=code)
        assert says in " ".join(done.stderr.replace("│", " ").split()), done.stderr
        # pytest catches the log of this process, which would otherwise reach standard error.
        assert "Traceback" not in done.stderr + done.stdout + caplog.text
        assert "[while running" not in done.stderr
        assert "apache_beam" not in done.stderr
        return done

    return run


def one_line(done) -> None:
    assert done.stderr.startswith("Error: ")
    assert done.stderr.count("\n") == 1


@pytest.fixture(scope="module")
def made(imagepivot, tmp_path_factory) -> Path:
    """Folder with ``table.tsv`` and the datasets ``captions`` and ``vocabulary`` made of it."""
    folder = tmp_path_factory.mktemp("made")
    rows = [f"img{number}\ta dog runs" for number in range(8)]
    (folder / "table.tsv").write_text("\n".join(["image_id\ttext", *rows]) + "\n")
    imagepivot(*captions(folder / "table.tsv", folder / "captions"))
    imagepivot("vocabulary", folder / "captions", folder / "vocabulary")
    return folder


def captions(table: Path, output: Path, *arguments, workers: int = 1):
    return ("captions", table, output, "--format", "table", "--shards", "2", "--workers", workers, *arguments)


# --- the process -----------------------------------------------------------------------------------------------------


@pytest.mark.cluster
def test_exit_codes_of_the_installed_command(installed, tmp_path):
    """1 failed, 2 wrong usage, 3 done but too many inputs failed; the other tests call the command in process."""
    one_line(installed("inspect", tmp_path / "none", code=1))
    assert "Usage: imagepivot" in installed("no-such-command", code=2).stderr
    (tmp_path / "t.tsv").write_text("image_id\ttext\na\tone\nb\t \n")
    done = installed(*captions(tmp_path / "t.tsv", tmp_path / "o"), code=3)
    assert done.stderr.startswith("1 inputs failed: 1 empty_caption. They are listed by: imagepivot inspect ")
    assert done.stderr.count("\n") == 1


# --- arguments of newcomers ------------------------------------------------------------------------------------------


def test_format_of_a_table_is_guessed(imagepivot, made, tmp_path):
    imagepivot("captions", made / "table.tsv", tmp_path / "o", "--shards", "2", "--workers", 1)
    assert (tmp_path / "o/_manifest.json").read_bytes() == (made / "captions/_manifest.json").read_bytes()


@pytest.mark.parametrize("command", ["captions", "features"])
def test_source_and_output_in_the_wrong_order_are_told(fails, made, tmp_path, command):
    name = {"captions": "SOURCE", "features": "IMAGES"}[command]
    words = {"captions": ("--format", "table"), "features": ("--weights", "random:0")}[command]
    for output in ("table.tsv", "captions"):
        one_line(fails(command, tmp_path / "none", made / output, *words, says=f"does: check the path, or give {name} first"))


# --- options ---------------------------------------------------------------------------------------------------------


def test_argument_beyond_the_last_is_refused(fails, made, tmp_path):
    says = "unexpected argument 'extra': flags for Beam follow -- and begin with --"
    fails(*captions(made / "table.tsv", tmp_path / "o", "extra"), code=2, says=says)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("--weights", "none.pth"), 1, "'none.pth'"),
        (("--precision", "fp8"), 2, "precision is 'fp8'"),
        (("--min-regions", "10"), 2, "'resnet50-pool' extracts no regions"),
    ],
)
def test_options_of_features(fails, photos, tmp_path, arguments, code, says):
    fails("features", photos / "images", tmp_path / "f", *arguments, code=code, says=says)
    assert not (tmp_path / "f").exists()


@pytest.mark.parametrize(
    "words",
    [
        ("captions", "table.tsv", "o", "--format", "table"),
        ("vocabulary", "captions", "o"),
        ("encode", "captions", "vocabulary", "o"),
        ("features", "table.tsv", "o", "--weights", "random:0"),
    ],
)
def test_local_paths_of_remote_workers_are_refused(imagepivot, made, words):
    before = sorted(made.rglob("*"))
    done = imagepivot(*words, "--", "--runner=FlinkRunner", code=2, cwd=made)
    assert "is a path on this machine, and the workers of FlinkRunner run on others" in done.stderr
    assert sorted(made.rglob("*")) == before


# --- datasets --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("vocabulary", "made/vocabulary"), "holds vocabulary, expected captions"),
        (("encode", "made/captions", "features"), "holds features, expected vocabulary"),
    ],
)
def test_another_dataset_than_the_command_takes(fails, made, tmp_path, words, says):
    write_rows(tmp_path / "features", "features", [], FeatureSpec("resnet50-pool", (4,)))
    places = [made / word.removeprefix("made/") if "made/" in word else tmp_path / word for word in words[1:]]
    one_line(fails(words[0], *places, tmp_path / "o", says=says))
    assert not (tmp_path / "o").exists()


@pytest.mark.slow
def test_files_of_other_tools_beside_a_dataset(fails, made, imagepivot, tmp_path):
    folder = tmp_path / "c"
    shutil.copytree(made / "captions", folder)
    (folder / "index.json").write_text("{}")  # litdata's index_parquet_dataset writes it.
    note = f"ignored in '{folder}': 'index.json', not part of the dataset"
    done = imagepivot("validate", folder)
    assert ("is valid" in done.stdout, note in done.stderr) == (True, True)
    fails(
        "validate",
        folder,
        "--strict",
        says="is not a valid dataset, see the problem above. Copy damaged files again",
    )
    assert note in imagepivot("validate", folder, "--repair").stderr
    path = next(folder.glob("part-*"))
    path.unlink()
    done = imagepivot(*captions(made / "table.tsv", folder))
    assert (done.returncode, path.exists(), note in done.stderr) == (0, True, True)
    assert (folder / "index.json").read_text() == "{}"
