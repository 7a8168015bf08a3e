"""``faster-rcnn-36`` from the command line: photographs in, regions with names out, and a picture of them."""

import re

import pytest

from schemas.dataset import open_dataset
from schemas.writing.validation import validate

pytestmark = pytest.mark.cluster

PHOTO = "cat"  # One, as the detector takes some ten seconds an image.


@pytest.fixture(scope="module")
def extracted(imagepivot, photos, visual_genome, tmp_path_factory):
    """Folder of the regions (``named``), the arguments that made them, and what the command printed."""
    folder = tmp_path_factory.mktemp("regions")
    photo = next((photos / "images").glob(f"{PHOTO}.*"))
    arguments = (
        *("features", photo, folder / "named", "--extractor", "faster-rcnn-36", "--weights", "random:0", "--device", "cpu"),
        *("--shards", "2", "--class-names", visual_genome / "objects_vocab.txt"),
        *("--attribute-names", visual_genome / "attributes_vocab.txt"),
    )
    return folder, arguments, imagepivot(*arguments)


def test_dataset_keeps_every_promise(extracted):
    folder, _, _ = extracted
    assert validate(folder / "named") == []
    dataset = open_dataset(folder / "named", kind="regions")
    assert dataset.image_ids() == [PHOTO]
    row = dataset.get(PHOTO)
    used = row["num_regions"]
    assert 1 <= used <= 36
    boxes = row["boxes"][:used]
    assert (boxes[:, 2:] >= boxes[:, :2]).all()
    assert boxes.min() >= 0
    assert (boxes[:, 2] < row["width"]).all()
    assert (boxes[:, 3] < row["height"]).all()
    assert row["features"].shape == (36, 2048)
    assert (row["features"] >= 0).all()
    assert ((row["class_ids"][:used] >= 1) & (row["class_ids"][:used] <= 1600)).all()
    assert ((row["attribute_ids"] >= 0) & (row["attribute_ids"] <= 400)).all()


def test_names_are_shown(extracted, imagepivot, visual_genome):
    folder, _, _ = extracted
    row = open_dataset(folder / "named").get(PHOTO)
    best = row["class_scores"][: row["num_regions"]].argmax()
    lines = (visual_genome / "objects_vocab.txt").read_text().splitlines()
    name = lines[row["class_ids"][best] - 1].split(",")[0]
    shown = " ".join(imagepivot("inspect", folder / "named").stdout.split())
    assert f"{name} {row['class_scores'][best]:.2f} (" in shown


def test_run_without_names_agrees(extracted, imagepivot):
    _, arguments, done = extracted
    again = imagepivot(*arguments[: arguments.index("--class-names")])
    first, second = (re.sub(r"B, [^,)]+", "B", run.stdout) for run in (done, again))  # Without seconds.
    assert first == second
