"""``imagepivot demo``: everything, on scenes that are drawn."""

from pathlib import Path

import pytest

from schemas.dataset import open_dataset
from schemas.validation import validate

pytestmark = pytest.mark.slow

DATASETS = ("captions", "vocabulary", "encoded", "features")


@pytest.fixture(scope="module")
def first(imagepivot, tmp_path_factory):
    output = tmp_path_factory.mktemp("demo") / "out"
    return output, imagepivot("demo", output, "--scenes", "40")


def state(folder: Path) -> dict[str, tuple[bytes, int]]:
    paths = [path for name in DATASETS for path in (folder / name).rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}


def test_it_says_that_the_features_are_untrained(first):
    _, done = first
    assert "untrained" in done.stderr
    assert "untrained: the weights are random, the features mean nothing" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", DATASETS)
def test_each_dataset_keeps_every_promise(first, name):
    assert validate(first[0] / name) == []


def test_the_datasets_fit_together(first):
    folder, _ = first
    captions, vocabulary, encoded, features = (open_dataset(folder / name) for name in DATASETS)
    assert len(features) == 40
    assert set(captions.image_ids()) == set(features.image_ids())
    assert set(captions.table(["language"])["language"].to_pylist()) == {"en", "de", "fr", "cs"}
    assert len(encoded) == len(captions)
    assert {each["name"]: each["fingerprint"] for each in encoded.manifest.inputs} == {
        "captions": captions.fingerprint,
        "vocabulary": vocabulary.fingerprint,
    }
    assert captions.num_shards == features.num_shards == encoded.num_shards
    assert captions.manifest.failed == features.manifest.failed == 0


def test_all_four_are_shown(first):
    for name in DATASETS:
        assert str(first[0] / name) in first[1].stdout.replace("\n", "")


def test_a_second_run_changes_nothing(first, imagepivot):
    folder, done = first
    before = state(folder)
    again = imagepivot("demo", folder, "--scenes", "40")
    assert state(folder) == before
    assert again.stdout == done.stdout


def test_no_scenes_are_wrong_usage(imagepivot, tmp_path):
    done = imagepivot("demo", tmp_path / "none", "--scenes", "0", code=2)
    assert "Traceback" not in done.stderr
