import re

import pytest

from schemas.dataset import open_dataset
from schemas.diagnosis import diagnose
from schemas.errors import DatasetError
from schemas.features import FeatureSpec
from schemas.manifest import MANIFEST_NAME, MANIFEST_NAMES
from schemas.storage.folder import Folder
from schemas.writing.validation import validate
from tests.builders import write_rows

SPEC = FeatureSpec("toy", (2,))


def refused(folder) -> str:
    with pytest.raises(DatasetError, match=re.escape(f"'{folder}' is not a dataset")) as caught:
        open_dataset(folder)
    assert str(caught.value) == diagnose(Folder(str(folder)), MANIFEST_NAMES)
    return str(caught.value).partition("is not a dataset")[2]


def test_a_folder_of_datasets(tmp_path):
    for name in ("images", "captions"):
        write_rows(tmp_path / name, "features", [], SPEC)
    (tmp_path / "notes").mkdir()
    assert refused(tmp_path) == f" but a folder of datasets: give one of '{tmp_path}/captions', '{tmp_path}/images'"


def test_a_folder_of_one_dataset(tmp_path):
    write_rows(tmp_path / "features", "features", [], SPEC)
    assert refused(tmp_path) == f" but a folder of datasets: give '{tmp_path}/features'"


def test_a_folder_of_many_datasets_names_a_few(tmp_path):
    for number in range(7):
        write_rows(tmp_path / str(number), "features", [], SPEC)
    assert refused(tmp_path).endswith(f", '{tmp_path}/4' or another of its 7")


@pytest.mark.parametrize("name", ["best.pt", "last.pt", "log.jsonl"])
def test_a_run(tmp_path, name):
    (tmp_path / "config.toml").touch()
    assert "but a run" not in refused(tmp_path)
    (tmp_path / name).touch()
    assert refused(tmp_path).startswith(
        " but a run of imagepivot train, which imagepivot evaluate, embed and search take: give "
    )


def test_shards_without_a_manifest(tmp_path):
    write_rows(tmp_path, "features", [], SPEC)
    (tmp_path / MANIFEST_NAME).unlink()
    assert refused(tmp_path).startswith(f": it holds no {MANIFEST_NAME}, which is written last, but shards. Run the")


def test_nothing_a_file_and_anything_else(tmp_path):
    assert refused(tmp_path / "none").endswith("because it does not exist. Check the path")
    (tmp_path / "photo.jpg").touch()
    assert refused(tmp_path).startswith(f": it holds no {MANIFEST_NAME}. Either the path is wrong or the run")
    assert diagnose(Folder(str(tmp_path / "photo.jpg")), MANIFEST_NAMES).endswith("but a file: give the folder of a dataset")


def test_validation_says_the_same(tmp_path):
    write_rows(tmp_path / "features", "features", [], SPEC)
    with pytest.raises(DatasetError, match=r"but a folder of datasets: give '.*/features'"):
        validate(tmp_path)
