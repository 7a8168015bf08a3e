"""Kind ``regions`` through the pipeline, with a tiny extractor whose regions can be computed by hand."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from extractors import Description, Extractor, ExtractorRequest
from extractors.options import RegionOptions
from pipelines.datasets.region_names import RegionNames
from pipelines.features.extraction import extract_features
from pipelines.inputs.images.opening import open_images
from pipelines.jobs import FeaturesJob
from pipelines.running.execution import Execution
from schemas.dataset import open_dataset
from schemas.errors import DatasetError
from schemas.features import FeatureSpec
from schemas.kinds import schema_of
from schemas.writing.validation import validate
from tests.builders import tree
from tests.fake_extractors import picture
from tests.reuse import with_policy

ONE = Execution(workers=1)
R, D, CLASSES, ATTRIBUTES = 3, 5, 4, 2


class FakeRegions(Extractor):
    """An image of one colour has ``red % 4`` regions; region ``r`` has the feature ``green + r + [0, 1, 2, 3, 4]``."""

    batches: list[int] = []  # noqa: RUF012 -- shared on purpose

    def sample(self):
        return np.ones(3)  # Counts as no batch.

    def preprocess(self, image):
        return torch.tensor([*image.getpixel((0, 0)), *image.size])

    def collate(self, images):
        return list(images)

    def extract(self, batch):
        return self.extract_columns(batch)["features"]

    def extract_columns(self, batch):
        FakeRegions.batches.append(len(batch))
        rows = [expected_row(tuple(image[:3].tolist()), tuple(image[3:].tolist())) for image in batch]
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def expected_row(colour: tuple[int, int, int], size_wh: tuple[int, int]) -> dict[str, np.ndarray]:
    red, green, blue = colour
    used = red % (R + 1)
    row = {
        "width": np.int32(size_wh[0]),
        "height": np.int32(size_wh[1]),
        "num_regions": np.int16(used),
        "boxes": np.zeros((R, 4), np.float32),
        "features": np.zeros((R, D), np.float32),
        "class_ids": np.zeros(R, np.int16),
        "class_scores": np.zeros(R, np.float32),
        "attribute_ids": np.zeros(R, np.int16),
        "attribute_scores": np.zeros(R, np.float32),
    }
    for region in range(used):
        row["boxes"][region] = [region, 0, region + 1, blue / 2]
        row["features"][region] = [green + region + k for k in range(D)]
        row["class_ids"][region] = (blue + region) % CLASSES + 1
        row["class_scores"][region] = 0.5 + region / 8
        row["attribute_ids"][region] = (red + region) % (ATTRIBUTES + 1)
        row["attribute_scores"][region] = 0.25
    return row


def describe(request: ExtractorRequest) -> Description:
    regions = request.regions or RegionOptions()
    kept = [regions.min_regions, regions.max_regions]
    parameters = {"name": request.name, "weights": request.weights, "compiled": request.compile, "regions": kept}
    spec = FeatureSpec("fake-regions", (R, D))
    return Description(spec, parameters, kind="regions", batch_size=2, classes=CLASSES, attributes=ATTRIBUTES)


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    monkeypatch.setattr(ExtractorRequest, "describe", describe)
    monkeypatch.setattr(ExtractorRequest, "spec", lambda request: describe(request).spec)
    monkeypatch.setattr(ExtractorRequest, "load", lambda request, device: FakeRegions(describe(request)))
    monkeypatch.setattr(FakeRegions, "batches", [])


@pytest.fixture
def colours() -> dict[str, tuple[int, int, int]]:
    generator = random.Random(36)
    return {f"image{n:02d}": (n % 7, generator.randrange(256), generator.randrange(256)) for n in range(23)}


@pytest.fixture
def images(colours, tmp_path) -> Path:
    (tmp_path / "images").mkdir()
    for number, (name, colour) in enumerate(colours.items()):
        (tmp_path / "images" / f"{name}.png").write_bytes(picture(*colour, size_wh=(4 + number % 3, 3)))
    return tmp_path / "images"


@pytest.fixture
def names(tmp_path) -> RegionOptions:
    (tmp_path / "classes.txt").write_text("sky\r\nbus stop,busstop\r\nman\r\ntree\r\n")
    (tmp_path / "attributes.txt").write_bytes("\ufeffblue\nold".encode())
    return RegionOptions(class_names=str(tmp_path / "classes.txt"), attribute_names=str(tmp_path / "attributes.txt"))


def job_of(images, output, **more) -> FeaturesJob:
    asked = {name: more.pop(name) for name in ("name", "weights", "regions", "compile", "precision") if name in more}
    request = ExtractorRequest(**{"name": "fake-regions", "weights": "0", **asked})
    options = {"device": "cpu", "shards": 3, **more}
    return FeaturesJob(images=open_images(images), output=str(output), extractor=request, **with_policy(options))


@pytest.fixture
def extracted(images, tmp_path) -> Path:
    """Folder ``r`` with the regions of ``images``."""
    extract_features(job_of(images, tmp_path / "r"), ONE)
    return tmp_path / "r"


def shards_of(folder: Path) -> dict[str, tuple[int, int]]:
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.glob("part-*")}


# --- rows ------------------------------------------------------------------------------------------------------------


def test_each_image_has_its_regions(images, colours, tmp_path):
    manifest = extract_features(job_of(images, tmp_path / "r"), ONE)
    assert max(FakeRegions.batches) == 2, "the extractor's own batch size"
    dataset = open_dataset(tmp_path / "r", kind="regions")
    assert validate(tmp_path / "r") == []
    assert (manifest.kind, manifest.rows, manifest.failed) == ("regions", 23, 0)
    assert sorted(dataset.image_ids()) == sorted(colours)
    for number, (name, colour) in enumerate(colours.items()):
        found = dataset.get(name)
        expected = expected_row(colour, (4 + number % 3, 3))
        assert set(found) == {"image_id", *expected}
        for column, values in expected.items():
            np.testing.assert_array_equal(found[column], values, err_msg=f"{name} {column}")
    assert dataset.schema.equals(schema_of("regions", FeatureSpec("fake-regions", (R, D))), check_metadata=True)
    assert dataset.numpy("features").shape == (23, R, D)


def test_update_with_another_batch_size_equals_a_fresh_run(images, extracted, tmp_path):
    for name in ("aaa", "image105", "zzz"):
        (images / f"{name}.png").write_bytes(picture(6, 5, 4))
    FakeRegions.batches.clear()
    extract_features(job_of(images, extracted, update=True), ONE)
    assert sum(FakeRegions.batches) == 3
    extract_features(job_of(images, tmp_path / "s", batch_size=5), ONE)
    assert max(FakeRegions.batches) == 5
    assert tree(extracted) == tree(tmp_path / "s")


def test_libraries_name_the_backend_of_the_extractor(images):
    assert "detectron2" not in job_of(images, "r").libraries()
    assert job_of(images, "r", regions=RegionOptions(backend="detectron2")).libraries()[-1] == "detectron2"
    assert job_of(images, "r", name="detectron2:c.yaml+w.pth").libraries()[-1] == "detectron2"
    assert job_of(images, "r", name="timm:resnet18").libraries()[-1] == "timm"


# --- names -----------------------------------------------------------------------------------------------------------


def test_names_are_files_outside_the_fingerprint(images, names, extracted, tmp_path):
    plain = open_dataset(extracted).manifest
    named = extract_features(job_of(images, tmp_path / "s", regions=names), ONE)
    assert named.fingerprint == plain.fingerprint
    assert [shard.sha256 for shard in named.shards] == [shard.sha256 for shard in plain.shards]
    assert (tmp_path / "s" / "_names/classes").read_bytes() == b"sky\nbus stop,busstop\nman\ntree\n"
    assert (tmp_path / "s" / "_names/attributes").read_bytes() == b"blue\nold\n"
    assert [entry.path for entry in named.files] == ["_names/attributes", "_names/classes"]
    assert validate(tmp_path / "s") == []
    assert RegionNames.of(open_dataset(tmp_path / "s")).classes == ("sky", "bus stop,busstop", "man", "tree")
    assert RegionNames.of(open_dataset(tmp_path / "r")) == RegionNames()


def test_names_can_be_given_later_and_are_kept(images, names, extracted, tmp_path):
    before = shards_of(tmp_path / "r")
    extract_features(job_of(images, tmp_path / "r", regions=names), ONE)
    assert shards_of(tmp_path / "r") == before
    assert RegionNames.of(open_dataset(tmp_path / "r")).attributes == ("blue", "old")
    state = tree(tmp_path / "r")
    extract_features(job_of(images, tmp_path / "r"), ONE)
    assert tree(tmp_path / "r") == state, "a run without names leaves them"
    (images / "new.png").write_bytes(picture(1, 2, 3))
    extract_features(job_of(images, tmp_path / "r", update=True), ONE)
    assert RegionNames.of(open_dataset(tmp_path / "r")).attributes == ("blue", "old")
    assert validate(tmp_path / "r") == []
    Path(names.attribute_names).write_text("blue\nnew\n")
    extract_features(job_of(images, tmp_path / "r", regions=names), ONE)
    assert RegionNames.of(open_dataset(tmp_path / "r")).attributes == ("blue", "new")
    assert validate(tmp_path / "r") == []


def test_region_names_of_another_extractor_are_replaced(images, tmp_path):
    (tmp_path / "r" / "_names").mkdir(parents=True)
    (tmp_path / "r" / "_names" / "classes").write_text("one\nof too few\n")
    (tmp_path / "r" / "_names" / "attributes").write_text("blue\nold\n")
    extract_features(job_of(images, tmp_path / "r"), ONE)
    assert RegionNames.of(open_dataset(tmp_path / "r")) == RegionNames(attributes=("blue", "old"))


def test_names_of_an_overwritten_dataset_go(images, names, tmp_path):
    extract_features(job_of(images, tmp_path / "r", regions=names), ONE)
    with pytest.raises(DatasetError, match="holds another dataset"):
        extract_features(job_of(images, tmp_path / "r", weights="1"), ONE)
    extract_features(job_of(images, tmp_path / "r", weights="1", overwrite=True), ONE)
    assert not (tmp_path / "r" / "_names/classes").exists()
    assert validate(tmp_path / "r") == []
