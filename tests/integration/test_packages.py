"""The names of our packages are generic: what the user's folders hold under the same names must not be imported."""

import os
from pathlib import Path

import pytest

from schemas.dataset import open_dataset
from schemas.validation import validate

RAISES = "raise RuntimeError('this module of the user was imported: ' + __file__)\n"


def trap(folder: Path, *names: str) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(RAISES)
    return folder


@pytest.fixture
def table(tmp_path) -> Path:
    path = tmp_path / "captions.tsv"
    path.write_text("image_id\ttext\n" + "".join(f"img{number}\tA dog runs .\n" for number in range(50)))
    return path


PACKAGES = ("train.py", "schemas/__init__.py", "pipelines/__init__.py", "pipelines/cli.py", "extractors.py", "worker.py")
MODULES = ("train/__init__.py", "schemas.py", "pipelines.py", "extractors/__init__.py", "extractors/base.py")


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("names", [PACKAGES, MODULES], ids=["packages", "modules"])
def test_the_folder_where_the_user_stands(imagepivot, table, tmp_path, names, workers):
    here = trap(tmp_path / "here", *names)
    imagepivot("captions", table, "out", "--format", "table", "--shards", "2", "--workers", workers, cwd=here)
    assert validate(here / "out") == []
    assert len(open_dataset(here / "out")) == 50


@pytest.mark.parametrize("workers", [1, 2])
def test_folders_on_the_path_of_python(imagepivot, table, tmp_path, workers):
    folder = trap(tmp_path / "library", "schemas/__init__.py", "schemas/errors.py", "train.py", "extractors/__init__.py")
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    arguments = ("captions", table, tmp_path / "out", "--format", "table", "--shards", "2", "--workers", workers)
    imagepivot(*arguments, env={"PYTHONPATH": path})
    assert len(open_dataset(tmp_path / "out")) == 50


def test_the_extractors_too(imagepivot, photos, tmp_path):
    here = trap(tmp_path / "here", *PACKAGES)
    library = trap(tmp_path / "library", "schemas/__init__.py", "extractors/__init__.py", "train.py")
    imagepivot(
        *("features", photos / "images" / "cat.jpg", "out", "--weights", "random:0", "--device", "cpu", "--shards", "1"),
        cwd=here,
        env={"PYTHONPATH": str(library)},
    )
    assert open_dataset(here / "out").image_ids() == ["cat"]


@pytest.mark.parametrize("command", ["--version", "--help"])
def test_starting_alone(imagepivot, tmp_path, command):
    here = trap(tmp_path / "here", *PACKAGES)
    imagepivot(command, cwd=here, env={"PYTHONPATH": str(trap(tmp_path / "library", "schemas/__init__.py", "train.py"))})
