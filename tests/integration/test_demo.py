import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from schemas.dataset import open_dataset
from schemas.writing.validation import validate
from tests.integration.processes import ForkedSteps
from tests.pages import Page
from train.runs.run import open_run

pytestmark = pytest.mark.cluster

DATASETS = ("captions", "vocabulary", "encoded", "features", "pool", "crops", "regions")


@pytest.fixture(scope="module")
def folder(demo) -> Path:
    return demo.folder / "build" / "demo"


def state(folder: Path) -> dict[str, tuple[bytes, int]]:
    paths = [path for name in DATASETS for path in (folder / name).rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}


def test_demo_warns_of_untrained_features(demo):
    assert "untrained: the weights of resnet50-pool (random:0) are random, the features mean nothing" in demo.stderr
    assert "Traceback" not in demo.stderr


@pytest.mark.parametrize("name", DATASETS)
def test_every_dataset_keeps_every_promise(folder, name):
    assert validate(folder / name) == []


def test_datasets_fit_together(demo, folder):
    captions, vocabulary, encoded, features, pool, crops, regions = (open_dataset(folder / name) for name in DATASETS)
    assert len(features) == demo.scenes
    assert [dataset.spec.name for dataset in (features, pool, crops, regions)] == [
        *("timm:tf_efficientnet_lite0.in1k", "resnet50-pool", "vgg19-10crop", "faster-rcnn-36"),
    ]
    assert [dataset.manifest.parameters["extractor"]["untrained"] for dataset in (features, pool, crops, regions)] == [
        *(False, True, True, True),
    ]
    assert sorted(regions.image_ids()) == [f"scene-0000{number}" for number in range(2)]
    assert regions.get("scene-00001")["features"].shape == (36, 2048)
    assert set(captions.image_ids()) == set(features.image_ids())
    assert set(captions.table(["language"])["language"].to_pylist()) == {"en", "de", "fr", "cs"}
    assert len(encoded) == len(captions)
    assert {entry["name"]: entry["fingerprint"] for entry in encoded.manifest.inputs} == {
        "captions": captions.fingerprint,
        "vocabulary": vocabulary.fingerprint,
    }
    assert captions.num_shards == features.num_shards == encoded.num_shards == regions.num_shards
    assert captions.manifest.failed == features.manifest.failed == 0


def test_model_is_trained_and_queried(demo, folder, imagepivot):
    run = open_run(folder / "run")
    assert (run.model.languages, run.untrained) == (("en", "de", "fr", "cs"), ())
    lines = re.findall("^(cs|de|en|fr) translation +2 images", demo.stdout, flags=re.MULTILINE)
    assert len(lines) == 2 * 2 * 4  # Recalls, and all correct items; of the run, and of the joint model.
    assert re.search("one query in each language: scene-000[01]9, among 2 held-out scenes", demo.stdout)
    assert "The features have random weights" not in demo.stdout


def test_lines_to_try_next_run_as_printed(demo, imagepivot, tmp_path):
    shutil.copytree(demo.folder / "build", tmp_path / "build")
    commands = [shlex.split(line) for line in demo.stdout.partition("Try next:")[2].splitlines() if line]
    assert [words[:2] for words in commands] == [["imagepivot", name] for name in ("search", "inspect", "train")]
    search, inspect, train = [imagepivot(*words[1:], cwd=tmp_path).stdout for words in commands]
    assert search.count("scene-") == 10
    assert inspect.count("scene-") >= 20
    assert re.search(r"run: 600 steps in build/demo/run-2", train)
    assert open_run(tmp_path / "build/demo/run-2").model.languages == ("en", "de")


def test_default_demo_finds_the_scene_first_in_four_languages(imagepivot, tmp_path):
    done = imagepivot("demo", "build/demo", cwd=tmp_path)
    folder = tmp_path / "build" / "demo"
    assert not any((folder / name).exists() for name in ("pool", "crops", "regions"))
    rankings = json.loads((folder / "figures" / "figures.json").read_text(encoding="utf-8"))["retrieval"]
    assert [ranking["language"] for ranking in rankings] == ["en", "de", "fr", "cs"]
    assert len({ranking["caption_id"].partition("/")[0] for ranking in rankings}) == 1
    assert [(ranking["rank"], ranking["images"]) for ranking in rankings] == [(1, 30)] * 4
    assert "\nThe picture: build/demo/figures/retrieval.png\n" in done.stdout
    assert "written: build/demo/report.html" in done.stderr
    report = Page(folder / "report.html")
    assert "worst errors" in report.text
    assert len(report.photos) > 20
    [scene] = re.findall("one query in each language: (scene-[0-9]+), among 30 held-out scenes", done.stdout)
    search = shlex.split(done.stdout.partition("Try next:")[2].splitlines()[1])
    assert re.search(rf"^ *1 +{scene} ", imagepivot(*search[1:], cwd=tmp_path).stdout, flags=re.MULTILINE)


class SilentSteps(ForkedSteps):
    """Steps whose output is not of interest."""

    def __call__(self, words, variables=None, read=None) -> int:
        return super().__call__(words, variables, lambda line: None)


def test_second_run_changes_nothing(demo, folder, imagepivot, tmp_path, monkeypatch):
    monkeypatch.setattr("schemas.process.steps.run_command", SilentSteps())
    shutil.copytree(folder, tmp_path / "build" / "demo")
    before = state(tmp_path / "build" / "demo")
    again = imagepivot("demo", "build/demo", "--all", "--scenes", demo.scenes, cwd=tmp_path)
    assert state(tmp_path / "build" / "demo") == before
    assert "held-out scenes; " in again.stdout
    assert demo.stdout.endswith(again.stdout)  # Before it stands what the processes of the steps print.


def test_tutorial_replaces_no_file_of_the_user(imagepivot, tmp_path):
    (tmp_path / "captions.csv").write_text("image_id,text\n", encoding="utf-8")
    done = imagepivot("demo", ".", "--only", "tutorial", cwd=tmp_path, code=2)
    assert "captions.csv' is not the tutorial's, and stays: give another folder" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["captions.csv"]
    assert (tmp_path / "captions.csv").read_text(encoding="utf-8") == "image_id,text\n"
