"""The extractor of the documentation, as printed, in a module outside this checkout: every way to run it gives the same bytes."""

import os
import pickle
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from extractors import ExtractorRequest, catalogue
from extractors.registration import register_extractor
from pipelines.features.extraction import extract_features
from pipelines.jobs import FeaturesJob
from pipelines.running.execution import Execution
from schemas.dataset import open_dataset
from schemas.errors import DatasetError, UsageError
from schemas.features import FeatureSpec
from schemas.sample_outputs import NUM_OUTPUTS
from schemas.writing.reuse_policy import ReusePolicy
from tests.beam import BEAM_FLAGS
from tests.builders import tree
from tests.fake_extractors import ColourExtractor

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/how-to/custom-extractor.md").read_text(encoding="utf-8")
(CODE,) = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
OWN = ("--extractor", "mean-colour", "--device", "cpu", "--shards", "2")


class Colours(ColourExtractor):
    def __init__(self, description, device):
        super().__init__(description)


SPEC = FeatureSpec("own-colour", (3,))


@pytest.fixture(autouse=True)
def catalogue_as_before():
    before = dict(catalogue.ENTRIES)
    yield
    catalogue.ENTRIES.clear()
    catalogue.ENTRIES.update(before)


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "photos").mkdir()
    for number in range(5):
        Image.new("RGB", (70, 50), (40 * number, 9, 200)).save(tmp_path / "photos" / f"i{number}.png")
    (tmp_path / "photos" / "broken.png").write_bytes(b"")
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "mean_colour.py").write_text(CODE, encoding="utf-8")
    return tmp_path


def run(folder: Path, *words: str, code: int = 3, path: str = "") -> str:
    """Run the command in a new process, in the folder with the module."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), path))), "COLUMNS": "200"}
    command = [sys.executable, "-m", "imagepivot", *words]
    done = subprocess.run(command, cwd=folder / "work", env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def content(folder: Path) -> dict[str, bytes]:
    return {name: data for name, data in tree(folder).items() if not name.endswith(".lock")}


def test_page_has_few_lines_of_code():
    assert len([line for line in CODE.splitlines() if line.strip()]) <= 30


@pytest.mark.cluster
def test_import_and_entry_point_give_the_same_bytes_on_workers_tasks_and_beam(folder):
    module, work = ("--import", "mean_colour"), folder / "work"
    run(folder, "features", "../photos", "one", *OWN, *module, "--workers", "1")
    dataset = open_dataset(work / "one")
    for row in dataset:
        pixels = np.asarray(Image.open(folder / "photos" / f"{row['image_id']}.png").resize((64, 64)), dtype=np.float64)
        np.testing.assert_allclose(row["feature"], pixels.mean(axis=(0, 1)), rtol=1e-6)
    assert (len(dataset), dataset.failures()["reason"].to_pylist()) == (5, ["empty"])
    extractor = dataset.manifest.parameters["extractor"]
    assert (extractor["name"], extractor["version"]) == ("mean-colour", "1")
    assert 0 < len(dataset.manifest.sample_outputs) <= NUM_OUTPUTS
    run(folder, "features", "../photos", "two", *OWN, *module, "--workers", "2")
    run(folder, "features", "../photos", "tasks", *OWN, *module, "--task", "0/2", code=0)
    run(folder, "features", "../photos", "tasks", *OWN, *module, "--task", "1/2")
    run(folder, "features", "../photos", "beam", *OWN, *module, "--", *BEAM_FLAGS)
    expected = content(work / "one")
    assert all(content(work / name) == expected for name in ("two", "tasks"))
    without_samples = {name: data for name, data in expected.items() if name.startswith("part-")}
    assert {name: data for name, data in content(work / "beam").items() if name.startswith("part-")} == without_samples

    site = folder / "site"
    (site / "colours-1.0.dist-info").mkdir(parents=True)
    (site / "colours-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: colours\nVersion: 1.0\n")
    (site / "colours-1.0.dist-info" / "entry_points.txt").write_text("[imagepivot.extractors]\nmean-colour = mean_colour\n")
    (work / "mean_colour.py").rename(site / "mean_colour.py")
    run(folder, "features", "../photos", "site", *OWN, "--workers", "2", path=str(site))
    assert content(work / "site") == expected
    text = run(folder, "features", "../photos", "site", *OWN, code=2)
    assert "there is no extractor 'mean-colour'" in text
    assert "--import MODULE registers one of your own" in text


def test_update_refuses_another_version_and_other_values(folder, monkeypatch):
    job = FeaturesJob(str(folder / "photos"), str(folder / "features"), ExtractorRequest("own-colour"), device="cpu", shards=2)
    register_extractor(SPEC, Colours, version="1")
    extract_features(job, Execution(workers=1))
    expected = content(folder / "features")
    register_extractor(SPEC, Colours, version="2")
    for policy in (ReusePolicy(), ReusePolicy(update=True)):
        with pytest.raises(
            DatasetError, match=r"another dataset \(extractor\.version: stored '1', now '2'\): nothing was written"
        ):
            extract_features(replace(job, policy=policy), Execution(workers=1))
    register_extractor(SPEC, Colours, version="1")
    monkeypatch.setattr(Colours, "extract", lambda self, batch: batch.numpy().astype("f4") + 1)
    (folder / "photos" / "i0.png").write_bytes((folder / "photos" / "i4.png").read_bytes())
    with pytest.raises(DatasetError, match="another version"):
        extract_features(replace(job, policy=ReusePolicy(update=True)), Execution(workers=1))
    assert content(folder / "features") == expected


# --- wrong registrations -----------------------------------------------------------------------------------------------


def test_registered_extractor_is_in_the_catalogue_and_pickled_with_its_request():
    register_extractor(SPEC, Colours, version="a")
    register_extractor(SPEC, Colours, version="b", batch_size=2)  # A notebook's cell that is run again.
    request = ExtractorRequest("own-colour")
    description = request.describe()
    assert description.batch_size == 2
    assert description.parameters == {
        "name": "own-colour",
        "decoding": description.parameters["decoding"],
        "precision": "fp32",
        "untrained": False,
        "version": "b",
    }
    pickled = pickle.dumps(request)
    del catalogue.ENTRIES["own-colour"]
    assert pickle.loads(pickled) == request
    assert request.describe() == description
    assert ExtractorRequest("own-colour", dtype="float16").spec().dtype == "float16"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "random:0"}, r"--weights is 'random:0', but the registered extractor 'own-colour' loads its own"),
        ({"precision": "bf16"}, r"'own-colour' chooses precision and compilation in its code: leave --precision"),
    ],
)
def test_options_that_it_does_not_have_are_refused(options, message):
    register_extractor(SPEC, Colours, version="1")
    with pytest.raises(UsageError, match=message):
        ExtractorRequest("own-colour", **options).describe()


@pytest.mark.parametrize(
    ("name", "version", "message"),
    [
        ("resnet50-pool", "1", "extractor 'resnet50-pool' exists already"),
        ("timm:own", "1", "is no name without colons"),
        ("own-colour", "", "has version '' and batch size 16, expected text"),
    ],
)
def test_wrong_registration_is_refused(name, version, message):
    with pytest.raises(UsageError, match=message):
        register_extractor(FeatureSpec(name, (3,)), Colours, version=version)


def test_name_of_another_class_is_refused():
    register_extractor(SPEC, Colours, version="1")
    with pytest.raises(UsageError, match="extractor 'own-colour' exists already"):
        register_extractor(SPEC, ColourExtractor, version="1")


def test_wrong_array_is_refused_before_a_shard_is_written(folder):
    job = FeaturesJob(str(folder / "photos"), str(folder / "features"), ExtractorRequest("own-colour"), device="cpu")
    for spec, builder, message in (
        (FeatureSpec("own-colour", (4,)), Colours, r"computes float32 \[1, 3\] for one image, expected float32 \[1, 4\]"),
        (FeatureSpec("own-colour", (3, 1)), Colours, r"expected float32 \[1, 3, 1\]: correct extract or the spec"),
    ):
        catalogue.ENTRIES.pop("own-colour", None)
        register_extractor(spec, builder, version="1")
        with pytest.raises(UsageError, match=message):
            extract_features(job, Execution(workers=1))
        assert not list((folder / "features").glob("part-*"))
