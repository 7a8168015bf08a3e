"""Rows of two versions of a model's code do not mix: a stand-in extractor, the code of which changes."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from extractors import Description, ExtractorRequest
from extractors.sample_outputs import sample_outputs
from pipelines.features.extraction import extract_features
from pipelines.jobs import FeaturesJob
from pipelines.running.execution import Execution
from schemas.dataset import open_dataset
from schemas.errors import DatasetError, InputError
from schemas.features import FeatureSpec
from schemas.manifest import Manifest
from schemas.process.shutdown import DetachedError
from schemas.sample_outputs import NUM_OUTPUTS, TOLERANCES, are_equal
from schemas.storage.folder import Folder
from schemas.writing.output_state import OutputState
from schemas.writing.records import read_record, record_name, write_record
from schemas.writing.reuse_policy import ArrayTask, ReusePolicy
from schemas.writing.validation import validate
from tests.builders import tree
from tests.fake_extractors import ColourExtractor, picture

ONE = Execution(workers=1)
OTHER = r"was computed by another version of the model's code .*nothing was written.* --overwrite"


class Model(ColourExtractor):
    """A model with a version: features are the colour times fixed weights, plus a shift."""

    shift, noise = 0.0, 0.0

    def __init__(self, precision="fp32"):
        super().__init__(Description(FeatureSpec("fake", (64,)), {"name": "fake", "precision": precision}))

    def extract(self, batch):
        weights = np.random.default_rng(1).normal(size=(3, 64)) + self.shift
        rounding = 1 + self.noise * np.random.default_rng(2).choice([-1, 1], size=64)
        return (batch.numpy() @ weights * rounding).astype(np.float32)


@pytest.fixture
def job(tmp_path, monkeypatch):
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(8):
        (folder / f"{number}.png").write_bytes(picture(number, 2 * number, 255 - number))
    monkeypatch.setattr(ExtractorRequest, "describe", lambda request: Model().description)
    monkeypatch.setattr(ExtractorRequest, "load", lambda request, device: Model())
    return FeaturesJob(str(folder), str(tmp_path / "out"), device="cpu", shards=2)


@pytest.fixture
def other_code(monkeypatch):
    """Function that installs another version of the model's code."""
    return lambda shift=0.5: monkeypatch.setattr(Model, "shift", shift)


def add_image(job: FeaturesJob, name: str = "new") -> FeaturesJob:
    (Path(job.images) / f"{name}.png").write_bytes(picture(9, 9, 9))
    return replace(job, policy=ReusePolicy(update=True))


def forget(job: FeaturesJob) -> None:
    """Remove all sample outputs, as if an earlier version of imagepivot had written the dataset."""
    folder = Folder(job.output)
    for name in [name for name in folder.names() if name.startswith("part-")]:
        write_record(folder, name, replace(read_record(folder, name, whole=True), sample_outputs=()))
    if folder.stat("_manifest.json") is not None:
        folder.put("_manifest.json", replace(Manifest.read(folder), sample_outputs=()).to_json().encode())


def interrupt(job: FeaturesJob) -> None:
    """Delete a shard and the manifest, as a killed run leaves the folder."""
    folder, name = Folder(job.output), "part-00001-of-00002.parquet"
    for path in (name, record_name(name), "_manifest.json"):
        folder.delete(path)


def test_records_and_manifest_hold_sample_outputs(job):
    manifest = extract_features(job, ONE)
    assert len(manifest.sample_outputs) == NUM_OUTPUTS
    assert are_equal(manifest.sample_outputs, sample_outputs(Model()), manifest.parameters)
    assert all(
        read_record(Folder(job.output), shard.path).sample_outputs == manifest.sample_outputs for shard in manifest.shards
    )
    assert open_dataset(job.output).manifest == manifest
    assert validate(job.output) == []


@pytest.mark.parametrize("way", ["update", "resume", "retry failed"])
def test_other_code_is_refused_before_anything_is_written(job, other_code, way):
    if way == "retry failed":
        (Path(job.images) / "broken.png").write_bytes(b"")
    extract_features(job, ONE)
    other_code()
    extract_features(job, ONE)  # Up to date: nothing is computed, so nothing can mix.
    if way == "update":
        job = add_image(job)
    elif way == "resume":
        interrupt(job)
    else:
        job = replace(job, policy=ReusePolicy(retry_failed=True))
    before = tree(Path(job.output))
    with pytest.raises(DatasetError, match=OTHER):
        extract_features(job, ONE)
    assert tree(Path(job.output)) == before
    manifest = extract_features(replace(job, policy=ReusePolicy(overwrite=True)), ONE)
    assert are_equal(manifest.sample_outputs, sample_outputs(Model()), manifest.parameters)


def test_rounding_of_another_processor_is_accepted_and_more_is_not(job, monkeypatch):
    extract_features(job, ONE)
    monkeypatch.setattr(Model, "noise", 1e-4)  # What `imagepivot doctor` accepts of a device in fp32.
    extract_features(add_image(job), ONE)
    assert validate(job.output) == []
    monkeypatch.setattr(Model, "noise", 1e-2)
    with pytest.raises(DatasetError, match=OTHER):
        extract_features(add_image(job, "newer"), ONE)


def test_worker_refuses_rows_of_other_code(job, other_code, monkeypatch):
    extract_features(job, ONE)
    monkeypatch.setattr(OutputState, "check_model", lambda state: None)  # The launcher has the right version.
    other_code()
    with pytest.raises(InputError, match=r"a worker computes other values than those stored .*finished shards are kept"):
        extract_features(add_image(job), ONE)
    (Path(job.images) / "new.png").unlink()
    interrupt(job)
    with pytest.raises(DatasetError, match=r"cannot be committed: .* computed by different versions of the model's code"):
        extract_features(job, ONE)  # It keeps a whole shard, and copies no row.


def test_task_of_other_code_is_refused(job, other_code):
    with pytest.raises(DetachedError):
        extract_features(replace(job, task=ArrayTask(0, 2)), ONE)
    other_code()
    with pytest.raises(DatasetError, match=OTHER):
        extract_features(replace(job, task=ArrayTask(1, 2)), ONE)
    other_code(0.0)
    extract_features(replace(job, task=ArrayTask(1, 2)), ONE)
    assert validate(job.output) == []


def test_mixed_shards_are_neither_committed_nor_valid(job):
    extract_features(job, ONE)
    folder, name = Folder(job.output), "part-00001-of-00002.parquet"
    record = read_record(folder, name, whole=True)
    write_record(folder, name, replace(record, sample_outputs=tuple(-value for value in record.sample_outputs)))
    assert validate(job.output) == [f"{name} was computed by another version of the model's code than the manifest says"]
    folder.delete("_manifest.json")
    with pytest.raises(DatasetError, match=r"cannot be committed: part-00000-of-00002.parquet and .* by different versions"):
        extract_features(job, ONE)


def test_dataset_without_sample_outputs_is_refused_or_accepted(job):
    extract_features(job, ONE)
    forget(job)
    before = tree(Path(job.output))
    job = add_image(job)
    with pytest.raises(DatasetError, match=r"does not say which values .*nothing was written.*--overwrite .*--accept-unknown"):
        extract_features(job, ONE)
    assert tree(Path(job.output)) == before
    manifest = extract_features(replace(job, policy=ReusePolicy(update=True, accept_unknown=True)), ONE)
    assert manifest.rows == 9
    assert manifest.sample_outputs
    extract_features(add_image(job, "another"), ONE)  # The manifest knows its values now.
    assert validate(job.output) == []


def test_values_of_the_manifest_replace_those_of_lost_records(job, other_code):
    extract_features(job, ONE)
    for name in [name for name in Folder(job.output).names() if name.startswith(".records/")]:
        Folder(job.output).delete(name)
    other_code()
    with pytest.raises(DatasetError, match=OTHER):
        extract_features(add_image(job), ONE)


@pytest.mark.parametrize(("precision", "tolerance"), TOLERANCES.items())
def test_tolerance_is_relative_to_the_largest_value(precision, tolerance):
    outputs, parameters = (1000.0, 1.0, -500.0), {"extractor": {"precision": precision}}
    near, far = 1000 * tolerance * 0.9, 1000 * tolerance * 1.1
    assert are_equal(outputs, (1000.0, 1.0 + near, -500.0 - near), parameters)
    assert not are_equal(outputs, (1000.0, 1.0 + far, -500.0), parameters)
    assert not are_equal(outputs, outputs[:2], parameters)
    assert are_equal(outputs, (), parameters)
    assert not are_equal(outputs, (1000.0, math.nan, -500.0), parameters)
