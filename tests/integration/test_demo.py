"""``imagepivot demo``: everything, on scenes that are drawn."""

from pathlib import Path

import pytest
from PIL import Image

from schemas.dataset import open_dataset
from schemas.validation import validate
from train.runs.run import open_run

pytestmark = pytest.mark.slow

SCENES = 20
DATASETS = ("captions", "vocabulary", "encoded", "features", "regions")


@pytest.fixture(scope="module")
def first(imagepivot, tmp_path_factory):
    output = tmp_path_factory.mktemp("demo") / "out"
    return output, imagepivot("demo", output, "--scenes", SCENES)


def state(folder: Path) -> dict[str, tuple[bytes, int]]:
    paths = [path for name in DATASETS for path in (folder / name).rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}


def test_it_says_that_the_features_are_untrained(first):
    _, done = first
    assert "untrained" in done.stderr
    assert "untrained: the weights are random, the features mean nothing" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", DATASETS)
def test_every_dataset_keeps_every_promise(first, name):
    assert validate(first[0] / name) == []


def test_the_datasets_fit_together(first):
    folder, _ = first
    captions, vocabulary, encoded, features, regions = (open_dataset(folder / name) for name in DATASETS)
    assert len(features) == SCENES
    assert sorted(regions.image_ids()) == [f"scene-0000{number}" for number in range(4)]
    assert regions.get("scene-00002")["features"].shape == (36, 2048)
    assert set(captions.image_ids()) == set(features.image_ids())
    assert set(captions.table(["language"])["language"].to_pylist()) == {"en", "de", "fr", "cs"}
    assert len(encoded) == len(captions)
    assert {entry["name"]: entry["fingerprint"] for entry in encoded.manifest.inputs} == {
        "captions": captions.fingerprint,
        "vocabulary": vocabulary.fingerprint,
    }
    assert captions.num_shards == features.num_shards == encoded.num_shards == regions.num_shards
    assert captions.manifest.failed == features.manifest.failed == 0


def test_a_model_is_trained_and_queried(first):
    folder, done = first
    assert open_run(folder / "run").model.config.languages == ("en", "de", "fr", "cs")
    assert "scenes that were held out" in done.stdout
    assert f"one query in each language: scene-00009, among {SCENES} scenes" in done.stdout
    assert "The extractor's weights are random" in done.stdout


def test_regions_are_drawn(first):
    with Image.open(first[0] / "regions.png") as drawing, Image.open(first[0] / "scenes/images/scene-00000.jpg") as scene:
        assert max(drawing.size) == max(800, *scene.size)


def test_all_are_shown(first):
    for name in DATASETS:
        assert str(first[0] / name) in first[1].stdout.replace("\n", "")


def test_a_second_run_changes_nothing(first, imagepivot):
    folder, done = first
    before = state(folder)
    again = imagepivot("demo", folder, "--scenes", SCENES)
    assert state(folder) == before
    assert again.stdout == done.stdout


def test_no_scenes_are_wrong_usage(imagepivot, tmp_path):
    done = imagepivot("demo", tmp_path / "none", "--scenes", "0", code=2)
    assert "Traceback" not in done.stderr
