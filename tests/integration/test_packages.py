"""The names of our packages are generic: what the user's folders hold under the same names must not be imported.

A folder cannot hold a module and a package of one name, so there are two sets of traps: one lies where the user stands, the
other on ``PYTHONPATH``, and the other way round.
"""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from schemas.dataset import open_dataset
from schemas.writing.validation import validate

RAISES = "raise RuntimeError('this module of the user was imported: ' + __file__)\n"
PACKAGES = (
    "train.py",
    "schemas/__init__.py",
    "pipelines/__init__.py",
    "pipelines/commands/app.py",
    "extractors.py",
    "worker.py",
)

pytestmark = pytest.mark.cluster
MODULES = ("train/__init__.py", "schemas.py", "pipelines.py", "extractors/__init__.py", "extractors/base.py")


def trap(folder: Path, *names: str) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(RAISES)
    return folder


def trapped(folder: Path, standing: tuple[str, ...], on_path: tuple[str, ...]) -> dict[str, object]:
    """Return the folder to stand in and the environment of a command, both full of traps.

    ``pipelines`` is none of those on ``PYTHONPATH``: the console script imports it before anything of ours runs.
    """
    library = trap(folder / "library", *(name for name in on_path if not name.startswith("pipelines")))
    path = os.pathsep.join([str(library), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return {"cwd": trap(folder / "standing", *standing), "env": {"PYTHONPATH": path}}


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_captions(installed, tmp_path, workers):
    table = tmp_path / "captions.tsv"
    table.write_text("image_id\ttext\n" + "".join(f"img{number}\tA dog runs .\n" for number in range(50)))
    arguments = ("captions", table, "out", "--format", "table", "--shards", "2", "--workers", workers)
    assert installed(*arguments, **trapped(tmp_path, PACKAGES, MODULES)).stderr == ""
    assert validate(tmp_path / "standing" / "out") == []
    assert len(open_dataset(tmp_path / "standing" / "out")) == 50


@pytest.mark.slow
def test_features(installed, photos, tmp_path):
    arguments = ("--weights", "random:0", "--device", "cpu", "--shards", "1", "--workers", "1")
    source = photos / "images" / "cat.jpg"
    installed("features", source, "out", *arguments, **trapped(tmp_path, MODULES, PACKAGES))
    assert open_dataset(tmp_path / "standing" / "out").image_ids() == ["cat"]


@pytest.mark.parametrize("command", ["--version", "--help"])
def test_command_starts_beside_foreign_modules_of_our_names(installed, tmp_path, command):
    installed(command, **trapped(tmp_path, PACKAGES, MODULES))


def test_wheel_holds_every_file_of_the_packages(tmp_path):
    root = Path(__file__).parents[2]
    names = ("schemas", "extractors", "pipelines", "train")
    ours = {path.relative_to(root).as_posix() for name in names for path in (root / name).rglob("*") if path.is_file()}
    ours = {name for name in ours if "__pycache__" not in name} | {"imagepivot.py"}
    ours.remove("pipelines/text/letters.pl")  # Only `make letters` runs it, in a checkout.
    source = tmp_path / "source"
    for name in (*ours, "pyproject.toml", "README.md", "LICENSE"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((root / name).read_bytes())
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path)
    words = [sys.executable, "-m", "pip", "wheel", *options, source]
    subprocess.run(words, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        assert {name for name in file.namelist() if ".dist-info/" not in name} == ours
