import shutil
from pathlib import Path

import pytest
from PIL import Image

from schemas.dataset import open_dataset
from schemas.writing.validation import validate
from train.runs.run import open_run

pytestmark = pytest.mark.cluster

DATASETS = ("captions", "vocabulary", "encoded", "features", "regions")


@pytest.fixture(scope="module")
def folder(demo) -> Path:
    return demo.folder / "build" / "demo"


def state(folder: Path) -> dict[str, tuple[bytes, int]]:
    paths = [path for name in DATASETS for path in (folder / name).rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}


def test_demo_warns_of_untrained_features(demo):
    assert "untrained" in demo.stderr
    assert "untrained: the weights are random, the features mean nothing" in demo.stdout
    assert "Traceback" not in demo.stderr


@pytest.mark.parametrize("name", DATASETS)
def test_every_dataset_keeps_every_promise(folder, name):
    assert validate(folder / name) == []


def test_datasets_fit_together(demo, folder):
    captions, vocabulary, encoded, features, regions = (open_dataset(folder / name) for name in DATASETS)
    assert len(features) == demo.scenes
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


def test_model_is_trained_and_queried(demo, folder):
    assert open_run(folder / "run").model.languages == ("en", "de", "fr", "cs")
    assert "scenes that were held out" in demo.stdout
    assert f"one query in each language: scene-00009, among {demo.scenes} scenes" in demo.stdout
    assert "The extractor's weights are random" in demo.stdout


def test_regions_are_drawn(folder):
    with Image.open(folder / "regions.png") as drawing, Image.open(folder / "scenes/images/scene-00000.jpg") as scene:
        assert max(drawing.size) == max(800, *scene.size)


def test_all_are_shown(demo):
    for name in DATASETS:
        assert f"build/demo/{name}" in demo.stdout.replace("\n", "")


def test_second_run_changes_nothing(demo, folder, imagepivot, tmp_path):
    shutil.copytree(folder, tmp_path / "build" / "demo")
    before = state(tmp_path / "build" / "demo")
    again = imagepivot("demo", "build/demo", "--scenes", demo.scenes, cwd=tmp_path)
    assert state(tmp_path / "build" / "demo") == before
    assert "scenes that were held out" in again.stdout
    assert demo.stdout.endswith(again.stdout)  # Before it stands what the processes of the steps print.


def test_no_scenes_are_wrong_usage(imagepivot, tmp_path):
    done = imagepivot("demo", tmp_path / "none", "--scenes", "0", code=2)
    assert "Traceback" not in done.stderr
