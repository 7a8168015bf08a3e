from __future__ import annotations

import io
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from extractors.images.preprocessing import Preprocessing, cropped_pixels
from pipelines.datasets import view
from pipelines.datasets.view import LabelledBox, center_crop_box, colour_of, draw_boxes, read_pictures
from pipelines.inputs.images.opening import open_images
from pipelines.jobs import ViewJob
from schemas.dataset import open_dataset
from schemas.errors import InputError, UsageError
from schemas.features import FeatureSpec
from tests import builders
from tests.builders import write_rows
from tests.pages import width_of

CAFFE = {
    "resize_short": 256,
    "crop": 224,
    "interpolation": "bilinear",
    "antialias": False,
    "channel_order": "BGR",
    "divisor": 1.0,
    "mean": [103.939, 116.779, 123.68],
    "std": [1.0, 1.0, 1.0],
    "resize_with": "imagepivot",
    "crops": 10,
    "center": "floor",
}


def write(folder: Path, kind: str, columns: dict[str, dict], spec: FeatureSpec, extractor=None, files=None, failures=()):
    """Write a dataset of two shards whose rows are given by image id."""
    rows = [{**row, "image_id": image_id} for image_id, row in columns.items()]
    parameters = {"extractor": extractor} if extractor else {}
    write_rows(folder, kind, rows, spec, parameters=parameters, shards=2, files=files, failures=failures)
    return open_dataset(folder)


def region_row(size_wh=(640, 480), used=3, scores=(0.25, 0.75, 0.5), classes=(1, 2, 2), attributes=(0, 1, 3)) -> dict:
    boxes = np.array([[10, 20, 110, 220], [200, 30, 400, 300], [5, 5, 635, 475], [0, 0, 0, 0]], np.float32)
    labels = {"class_ids": [*classes, 0], "class_scores": [*scores, 0], "attribute_ids": [*attributes, 0]}
    width, height = size_wh
    return builders.region_row("", boxes, np.zeros((4, 2), np.float32), used, width=width, height=height, **labels)


REGIONS = FeatureSpec("fake-regions", (4, 2))
FAILED = {"key": "broken", "uri": "broken.jpg", "stage": "decode", "reason": "truncated", "message": "ends too early"}


@pytest.fixture(scope="module")
def photo_files() -> dict[str, bytes]:
    generator = np.random.default_rng(1)
    files = {}
    for name, (width, height) in {"cat": (640, 480), "dog-01": (900, 600)}.items():
        small, file = generator.integers(0, 256, (5, 5, 3), dtype=np.uint8), io.BytesIO()
        Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC).save(file, "PNG", compress_level=1)
        files[f"{name}.png"] = file.getvalue()
    return files


@pytest.fixture
def photos_here(tmp_path, photo_files) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    for name, data in photo_files.items():
        (folder / name).write_bytes(data)
    return folder


@pytest.fixture(scope="module")
def regions(tmp_path_factory):
    rows = {"cat": region_row(), "nowhere": region_row(), "dog-01": region_row((900, 600), used=0)}
    return write(tmp_path_factory.mktemp("viewing") / "regions", "regions", rows, REGIONS, failures=[FAILED])


def pixels(path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


@pytest.fixture
def drawn(monkeypatch) -> list:
    """The picture and boxes of every drawing."""
    seen = []

    def record(image, boxes):
        seen.append((image, list(boxes)))
        return image

    monkeypatch.setattr(view, "draw_boxes", record)
    return seen


def draw_view(dataset, images, image_id: str, output: str, **options) -> str:
    return view.draw_view(ViewJob(dataset.folder.location, images, image_id, output, **options))


# --- regions ---------------------------------------------------------------------------------------------------------


def test_regions_are_drawn_best_first_with_ids(regions, photos_here, tmp_path):
    words = draw_view(regions, open_images(photos_here), "cat", str(tmp_path / "out.png"))
    expected = [
        LabelledBox((200, 30, 400, 300), "class 2, attribute 1 0.75", 0),
        LabelledBox((5, 5, 635, 475), "class 2, attribute 3 0.50", 1),
        LabelledBox((10, 20, 110, 220), "class 1 0.25", 2),
    ]
    with Image.open(photos_here / "cat.png") as picture:
        np.testing.assert_array_equal(pixels(tmp_path / "out.png"), np.asarray(draw_boxes(picture.convert("RGB"), expected)))
    assert words == "3 regions of 'cat'"


NAMES = {"_names/classes": b"sky\nbus stop,busstop\n", "_names/attributes": b"blue\nold\nwet\n"}
SEVEN = builders.region_row("", np.tile([1, 2, 30, 40], (7, 1)), np.zeros((7, 2)), 7, class_ids=[1] * 7, class_scores=[0.5] * 7)


@pytest.mark.parametrize(
    ("row", "files", "max_regions", "labels"),
    [
        (region_row(), NAMES, {"max_regions": 2}, ["blue bus stop 0.75", "wet bus stop 0.50"]),
        (SEVEN, None, {}, ["class 1 0.50"] * 5),
    ],
    ids=["names", "default number"],
)
def test_labels_of_regions(photos_here, tmp_path, drawn, row, files, max_regions, labels):
    spec = FeatureSpec("fake-regions", row["features"].shape)
    dataset = write(tmp_path / "regions", "regions", {"cat": row}, spec, files=files)
    draw_view(dataset, open_images(photos_here), "cat", str(tmp_path / "out.png"), **max_regions)
    assert [box.label for box in drawn[0][1]] == labels


# --- crops -----------------------------------------------------------------------------------------------------------


def features_of(folder: Path, transform: dict | None):
    extractor = {"name": "x", "transform": transform} if transform else None
    return write(folder, "features", {"cat": {"feature": np.zeros(2)}}, FeatureSpec("x", (2,)), extractor)


def test_ten_crops_are_drawn_over_the_resized_picture(photos_here, tmp_path, drawn):
    dataset = features_of(tmp_path / "f", CAFFE)
    words = draw_view(dataset, open_images(photos_here), "cat", str(tmp_path / "out.png"))
    picture, boxes = drawn[0]
    assert picture.size == (341, 256)
    assert words == "ten crops over the 341×256 pixels of 'cat'"
    # 341 - 224 = 117 and 256 - 224 = 32; half of 117, rounded down, is 58.
    corners = [(0, 0), (117, 0), (0, 32), (117, 32), (58, 16)]
    assert [box.xyxy for box in boxes] == [(x, y, x + 223, y + 223) for x, y in corners]
    assert [box.label for box in boxes][:2] == ["1 top left, 6 top left mirrored", "2 top right, 7 top right mirrored"]


@pytest.mark.parametrize("size_wh", [(512, 512), (700, 500), (301, 803), (256, 256)])
def test_center_crop_box_covers_the_pixels_of_the_model(size_wh):
    """The pixels of this picture are their own coordinates: the edges of the crop must be those of the box."""
    width, height = size_wh
    across = np.linspace(0, 255, width, dtype=np.float64)
    down = np.linspace(0, 255, height, dtype=np.float64)
    rows = np.stack(np.broadcast_arrays(across[None, :], down[:, None], 0.0), axis=2)
    preprocessing = Preprocessing(resize_short=256, crop=224, mean=(0, 0, 0), std=(1, 1, 1))
    pixels = cropped_pixels(Image.fromarray(np.rint(rows).astype(np.uint8)), preprocessing)
    crop = torch.from_numpy(pixels).to(torch.float64)
    box = center_crop_box(size_wh, resize_short=256, crop_wh=(224, 224))
    edges = (crop[0, 112, 0], crop[1, 0, 112], crop[0, 112, -1], crop[1, -1, 112])
    for value, edge, side in zip(edges, box, (width, height, width, height), strict=True):
        assert value.item() / 255 * (side - 1) == pytest.approx(edge, abs=2.5 * side / 224)


@pytest.mark.parametrize(
    ("transform", "expected", "words"),
    [
        ({"resize_short": 256, "crop": 224}, (110, 30, 530, 450), "the centre crop"),
        # timm resizes to floor(224 / 0.875) = 256.
        ({"input_size": [3, 224, 224], "crop_pct": 0.875, "crop_mode": "center"}, (110, 30, 530, 450), "the centre crop"),
        ({"input_size": [3, 224, 224], "crop_pct": 1.0, "crop_mode": "squash"}, (0, 0, 640, 480), "the whole image"),
    ],
)
def test_one_crop_is_drawn_over_the_picture(photos_here, tmp_path, drawn, transform, expected, words):
    dataset = features_of(tmp_path / "f", transform)
    assert draw_view(dataset, open_images(photos_here), "cat", str(tmp_path / "out.png")) == f"{words} of 'cat'"
    assert drawn[0][1][0].xyxy == pytest.approx(expected)


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("image", "message"),
    [
        ("broken", r"'broken' is not in '.*': it failed with truncated, 'ends too early'"),
        ("nowhere", r"'nowhere' is not among the images in '.*photos': its ids look like .*--id-rule path"),
    ],
)
def test_unknown_image(regions, photos_here, tmp_path, image, message):
    with pytest.raises(InputError, match=message):
        draw_view(regions, open_images(photos_here), image, str(tmp_path / "out.png"))
    assert not (tmp_path / "out.png").exists()


def test_picture_of_another_size_is_refused(regions, photos_here, tmp_path):
    Image.new("RGB", (480, 640)).save(photos_here / "cat.png")
    with pytest.raises(InputError, match=r"'cat' is 480×640 pixels, .* picture of 640×480"):
        draw_view(regions, open_images(photos_here), "cat", str(tmp_path / "out.png"))


@pytest.mark.parametrize("name", ["view.png", "view.jpg", "new/view.webp", "view.pdf", "view.svg"])
def test_draw_view_replaces_only_its_own_pictures(regions, photos_here, tmp_path, name):
    images, own = open_images(photos_here), tmp_path / name
    draw_view(regions, images, "cat", str(own))
    first = own.read_bytes()
    if own.suffix in (".pdf", ".svg"):
        assert width_of(own) == pytest.approx(3.5)
        written = re.findall("<!-- (.*?) -->", own.read_text(errors="replace"))
        assert set(written) >= ({"class 2, attribute 1 0.75", "class 1 0.25"} if own.suffix == ".svg" else set())
    else:
        with Image.open(own) as image:
            assert image.format == {".png": "PNG", ".webp": "WEBP"}.get(own.suffix, "JPEG")
            assert image.width == 800
    draw_view(regions, images, "cat", str(own), overwrite=True, max_regions=1)
    assert own.read_bytes() != first
    with pytest.raises(UsageError, match=rf"{name}' already exists: give --overwrite"):
        draw_view(regions, images, "cat", str(own))
    (tmp_path / "thesis.png").write_text("my thesis")
    shutil.copy(photos_here / "cat.png", tmp_path / "photo.png")
    (tmp_path / "link.png").symlink_to("thesis.png")
    for other in ("thesis.png", "photo.png", "link.png"):
        content = (tmp_path / other).read_bytes()
        with pytest.raises(UsageError, match=rf"{other}' is not a picture of imagepivot view"):
            draw_view(regions, images, "cat", str(tmp_path / other), overwrite=True)
        assert (tmp_path / other).read_bytes() == content


GREY = (127, 127, 127)


def plain(width: int, height: int) -> Image.Image:
    return Image.new("RGB", (width, height), GREY)


def of_colour(image: Image.Image, colour: tuple[int, int, int]) -> np.ndarray:
    """Return the mask of the pixels of exactly this colour, ``[H, W]``."""
    return (np.asarray(image) == colour).all(axis=2)


def test_box_has_four_sides_of_its_colour_and_leaves_the_rest():
    drawing = draw_boxes(plain(800, 600), [LabelledBox((100, 50, 300, 250), "", 5)])
    expected = np.zeros((600, 800), dtype=bool)
    expected[50:251, 100:301] = True
    expected[52:249, 102:299] = False
    np.testing.assert_array_equal(of_colour(drawing, colour_of(5)), expected)
    assert of_colour(drawing, GREY).sum() == 800 * 600 - expected.sum()


def test_corners_grow_with_the_picture_and_the_first_box_is_on_top():
    drawing = draw_boxes(plain(64, 64), [LabelledBox((16, 8, 32, 24), "", group) for group in (2, 1)])
    rows, columns = np.nonzero(of_colour(drawing, colour_of(2)))
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (100, 300, 200, 400)
    assert not of_colour(drawing, colour_of(1)).any()


def test_pictures_by_id_large_ones_reduced(tmp_path):
    (tmp_path / "below").mkdir()
    Image.new("RGB", (30, 20), (255, 0, 0)).save(tmp_path / "red.png")
    Image.new("RGB", (1000, 500), (0, 0, 255)).save(tmp_path / "below" / "blue.png")
    pictures = read_pictures(tmp_path, ["blue", "red"], longer_side=100)
    assert list(pictures) == ["blue", "red"]
    assert pictures["red"].size_wh == (30, 20)
    assert pictures["blue"].size_wh == (1000, 500)
    assert np.array_equal(pictures["red"].pixels, np.full((20, 30, 3), (255, 0, 0), np.uint8))
    assert np.array_equal(pictures["blue"].pixels, np.full((50, 100, 3), (0, 0, 255), np.uint8))
