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
from schemas.errors import DatasetError, InputError, UsageError
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


NO_LABELS = region_row((0, 0), scores=(0, 0, 0), classes=(0, 0, 0), attributes=(0, 0, 0))
NAMES = {"_names/classes": b"sky\nbus stop,busstop\n", "_names/attributes": b"blue\nold\nwet\n"}
SEVEN = builders.region_row("", np.tile([1, 2, 30, 40], (7, 1)), np.zeros((7, 2)), 7, class_ids=[1] * 7, class_scores=[0.5] * 7)


@pytest.mark.parametrize(
    ("row", "files", "max_regions", "labels"),
    [
        (region_row(), NAMES, {"max_regions": 2}, ["blue bus stop 0.75", "wet bus stop 0.50"]),
        (NO_LABELS, None, {}, ["region 1", "region 2", "region 3"]),
        (SEVEN, None, {}, ["class 1 0.50"] * 5),
        (SEVEN, None, {"max_regions": 0}, ["class 1 0.50"] * 7),
    ],
    ids=["names", "no classes", "default number", "all"],
)
def test_labels_of_regions(photos_here, tmp_path, drawn, row, files, max_regions, labels):
    spec = FeatureSpec("fake-regions", row["features"].shape)
    dataset = write(tmp_path / "regions", "regions", {"cat": row}, spec, files=files)
    draw_view(dataset, open_images(photos_here), "cat", str(tmp_path / "out.png"), **max_regions)
    assert [box.label for box in drawn[0][1]] == labels


def test_image_without_regions_is_drawn_as_it_is(regions, photos_here, tmp_path):
    assert draw_view(regions, open_images(photos_here), "dog-01", str(tmp_path / "out.png")) == "0 regions of 'dog-01'"
    np.testing.assert_array_equal(pixels(tmp_path / "out.png"), pixels(photos_here / "dog-01.png"))


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


def test_mirrored_crop_of_other_columns_has_a_box_of_its_own(photos_here, tmp_path, drawn):
    Image.new("RGB", (1364, 1024)).save(photos_here / "cat.png")
    nearest = CAFFE | {"antialias": True, "channel_order": "RGB", "center": "nearest"}
    draw_view(features_of(tmp_path / "f", nearest), open_images(photos_here), "cat", str(tmp_path / "out.png"))
    # torchvision mirrors first: 117 - round(58.5) = 59, and round(58.5) = 58.
    assert [box.xyxy[0] for box in drawn[0][1]] == [0, 117, 0, 117, 58, 59]
    assert drawn[0][1][5].label == "10 centre mirrored"


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
        ({"resize_hw": [448, 448]}, (0, 0, 640, 480), "the whole image"),
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
        ("dog-1", r"'dog-1' is not in '.*regions': did you mean 'dog-01'\?"),
        ("cat.png", r"did you mean 'cat'\?"),
        ("zebra", r"its ids look like 'cat', 'dog-01', 'nowhere'"),
        ("broken", r"'broken' is not in '.*': it failed with truncated, 'ends too early'"),
        ("nowhere", r"'nowhere' is not among the images in '.*photos': its ids look like .*--id-rule path"),
    ],
)
def test_unknown_image(regions, photos_here, tmp_path, image, message):
    with pytest.raises(InputError, match=message):
        draw_view(regions, open_images(photos_here), image, str(tmp_path / "out.png"))
    assert not (tmp_path / "out.png").exists()


def test_unknown_image_of_whole_paths_has_no_advice_about_paths(regions, photos_here, tmp_path):
    with pytest.raises(InputError, match=r"'nowhere' is not among the images in '.*': its ids look like 'cat', 'dog-01'$"):
        draw_view(regions, open_images(photos_here, id_rule="path"), "nowhere", str(tmp_path / "out.png"))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path.write_bytes(b"no picture"), "'cat.png' cannot be decoded"),
        (lambda path: (path.unlink(), path.symlink_to("nowhere")), "'cat.png' cannot be read: No such file"),
        (lambda path: Image.new("RGB", (480, 640)).save(path), "'cat' is 480×640 pixels, .* picture of 640×480"),
        (lambda path: path.with_suffix(".jpg").touch(), r"image id 'cat' belongs to two files, 'cat.jpg' and 'cat.png'"),
    ],
)
def test_draw_view_refuses_unreadable_pictures(regions, photos_here, tmp_path, spoil, message):
    spoil(photos_here / "cat.png")
    with pytest.raises(InputError, match=message):
        draw_view(regions, open_images(photos_here), "cat", str(tmp_path / "out.png"))


@pytest.mark.parametrize("name", ["view.png", "view.jpg", "view.JPEG", "new/view.webp", "view.pdf", "view.svg"])
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


INVALID_TRANSFORMS = [
    {"resize_short": 256},
    {"crop": 224, "resize_short": None},
    {"input_size": [3, 224], "crop_pct": 0.9},
    {"input_size": [3, 224, 224], "crop_pct": 0},
    {"crops": 10, "crop": 224},
]
CAPTION = {
    "language": "de",
    "portion": "comparable",
    "index": 0,
    "split": "train",
    "text": "Eine Katze",
    "tokens": ["eine", "katze"],
}


@pytest.mark.parametrize(
    ("make", "name", "error", "message"),
    [
        *((lambda f: features_of(f, CAFFE), name, UsageError, r"ends in \.png, \.jpg, .*\.svg") for name in ("out", "out.gif")),
        (lambda f: features_of(f, None), "out.png", DatasetError, "has imported features without a transform"),
        (lambda f: write(f, "captions", {"cat": CAPTION}, None), "out.png", DatasetError, "expected features or regions"),
        *(
            (
                lambda f, transform=transform: features_of(f, transform),
                "out.png",
                DatasetError,
                r"cannot be drawn \(\w+: .*changed",
            )
            for transform in INVALID_TRANSFORMS
        ),
    ],
)
def test_draw_view_refuses_other_names_and_datasets(photos_here, tmp_path, make, name, error, message):
    with pytest.raises(error, match=message):
        draw_view(make(tmp_path / "f"), open_images(photos_here), "cat", str(tmp_path / name))
    assert not (tmp_path / name).exists()


GREY = (127, 127, 127)


def plain(width: int, height: int) -> Image.Image:
    return Image.new("RGB", (width, height), GREY)


@pytest.mark.slow
def test_command(regions, photos_here, tmp_path, call):
    places = (regions.folder.location, photos_here, "--image", "cat", "-o", tmp_path / "out.png")
    arguments = ("view", *places, "--max-regions", "1")
    assert call(*arguments) == (0, f"{tmp_path / 'out.png'}: 1 region of 'cat'\n", "")
    assert call(*arguments)[0] == 2
    assert call(*arguments, "--overwrite")[0] == 0
    with Image.open(io.BytesIO((tmp_path / "out.png").read_bytes())) as image:
        assert image.size == (800, 600)


def of_colour(image: Image.Image, colour: tuple[int, int, int]) -> np.ndarray:
    """Return the mask of the pixels of exactly this colour, ``[H, W]``."""
    return (np.asarray(image) == colour).all(axis=2)


def test_colours_differ():
    colours = [colour_of(group) for group in range(1601)]
    nearest = min(np.abs(np.subtract(a, b)).sum() for n, a in enumerate(colours[:12]) for b in colours[:n])
    assert nearest > 40
    assert all(max(colour) > 200 for colour in colours), "strong on any photograph"


def test_box_has_four_sides_of_its_colour_and_leaves_the_rest():
    drawing = draw_boxes(plain(800, 600), [LabelledBox((100, 50, 300, 250), "", 5)])
    expected = np.zeros((600, 800), dtype=bool)
    expected[50:251, 100:301] = True
    expected[52:249, 102:299] = False
    np.testing.assert_array_equal(of_colour(drawing, colour_of(5)), expected)
    assert of_colour(drawing, GREY).sum() == 800 * 600 - expected.sum()


@pytest.mark.slow
def test_lines_are_thicker_in_a_larger_picture():
    def thickness(width: int) -> int:
        drawing = draw_boxes(plain(width, width // 2), [LabelledBox((10, 10, width - 10, width // 2 - 10), "", 1)])
        return int(of_colour(drawing, colour_of(1))[width // 4].sum()) // 2

    assert (thickness(800), thickness(1600), thickness(4000)) == (2, 4, 10)


@pytest.mark.parametrize(
    ("size_wh", "expected"), [((1, 1), (800, 800)), ((320, 200), (800, 500)), ((20, 2000), (20, 2000)), ((801, 3), (801, 3))]
)
def test_small_pictures_are_enlarged(size_wh, expected):
    image = plain(*size_wh)
    drawing = draw_boxes(image, [LabelledBox((0, 0, *size_wh), "", 3), LabelledBox((0, 0, 0, 0), "", 4)])
    assert drawing.size == expected
    assert of_colour(drawing, colour_of(3)).any()
    assert image.size == size_wh
    assert of_colour(image, GREY).all(), "the picture itself stays"


def test_corners_grow_with_the_picture_and_the_first_box_is_on_top():
    drawing = draw_boxes(plain(64, 64), [LabelledBox((16, 8, 32, 24), "", group) for group in (2, 1)])
    rows, columns = np.nonzero(of_colour(drawing, colour_of(2)))
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (100, 300, 200, 400)
    assert not of_colour(drawing, colour_of(1)).any()


@pytest.mark.parametrize(
    "xyxy", [(-50, -50, 2000, 2000), (700, 500, 100, 100), (790, 590, 799, 599), (900, 700, 950, 750), (3.5, 3.5, 3.5, 3.5)]
)
def test_draw_boxes_clips_boxes_to_the_picture(xyxy):
    drawing = draw_boxes(plain(800, 600), [LabelledBox(xyxy, "label", 7)])
    assert drawing.width == 800
    assert of_colour(drawing, colour_of(7)).sum() > 100


def test_draw_boxes_keeps_labels_within_the_picture():
    def area(xyxy) -> int:
        return int(of_colour(draw_boxes(plain(800, 600), [LabelledBox(xyxy, "blue bus stop 0.93", 8)]), colour_of(8)).sum())

    in_the_middle = area((300, 300, 301, 301))
    for corner in ((799, 599, 799, 599), (0, 0, 0, 0), (799, 0, 799, 0)):
        assert area(corner) == pytest.approx(in_the_middle, abs=12)


@pytest.mark.slow
def test_labels_cover_no_other():
    """Twenty boxes at one place: each label is as large as alone."""
    boxes = [LabelledBox((100, 20, 102, 22), "a label", group) for group in range(20)]
    drawing = draw_boxes(plain(800, 600), boxes)
    alone = of_colour(draw_boxes(plain(800, 600), boxes[:1]), colour_of(0)).sum()
    shown = [int(of_colour(drawing, colour_of(group)).sum()) for group in range(20)]
    assert min(shown) > 0.9 * alone


def inside(box: tuple[int, ...], mask: np.ndarray) -> int:
    """Count the pixels within the lines of a box."""
    left, top, right, bottom = box
    return int(mask[top + 2 : bottom - 1, left + 2 : right - 1].sum())


def test_no_label_covers_its_box():
    rng = np.random.default_rng(0)
    corners = rng.integers(0, 500, (12, 2))
    boxes = [
        tuple(map(int, (x, y, x + width, y + height)))
        for (x, y), (width, height) in zip(corners, rng.integers(30, 90, (12, 2)), strict=True)
    ]
    drawing = draw_boxes(plain(800, 600), [LabelledBox(box, "a label", group) for group, box in enumerate(boxes)])
    assert drawing.size == (800, 600)
    masks = [of_colour(drawing, colour_of(group)) for group in range(12)]
    lines = [2 * 2 * (right - left + bottom - top) for left, top, right, bottom in boxes]
    assert all(mask.sum() > length + 300 for mask, length in zip(masks, lines, strict=True)), "each has its label"
    assert [inside(box, mask) for box, mask in zip(boxes, masks, strict=True)] == [0] * 12


def test_labels_without_a_place_are_below_the_picture():
    boxes = [LabelledBox((0, 0, 799, 599), f"the label {group}", group) for group in range(20)]
    drawing = draw_boxes(plain(800, 600), boxes)
    assert drawing.width == 800
    assert 640 < drawing.height < 720
    below = np.asarray(drawing)[600:]
    assert all((below == colour_of(group)).all(2).sum() > 800 for group in range(20))
    assert inside((0, 0, 799, 599), of_colour(drawing, GREY)) == 796 * 596


@pytest.fixture
def photos(tmp_path):
    folder = tmp_path / "photos"
    (folder / "below").mkdir(parents=True)
    Image.new("RGB", (30, 20), (255, 0, 0)).save(folder / "red.png")
    Image.new("RGB", (1000, 500), (0, 0, 255)).save(folder / "below" / "blue.png")
    (folder / "broken.jpg").write_bytes(b"\xff\xd8\xff")
    return folder


def test_pictures_by_id_large_ones_reduced(photos):
    pictures = read_pictures(photos, ["blue", "red"], longer_side=100)
    assert list(pictures) == ["blue", "red"]
    assert pictures["red"].size_wh == (30, 20)
    assert pictures["blue"].size_wh == (1000, 500)
    assert np.array_equal(pictures["red"].pixels, np.full((20, 30, 3), (255, 0, 0), np.uint8))
    assert np.array_equal(pictures["blue"].pixels, np.full((50, 100, 3), (0, 0, 255), np.uint8))


def test_ids_of_whole_paths(photos):
    assert set(read_pictures(open_images(photos, id_rule="path"), ["below/blue"])) == {"below/blue"}


@pytest.mark.parametrize(
    ("image_id", "message"),
    [("redd", "image 'redd' is not among the images in .*did you mean 'red'"), ("broken", "broken.jpg' cannot be decoded")],
)
def test_read_pictures_refuses_missing_and_damaged_pictures(photos, image_id, message):
    with pytest.raises(InputError, match=message):
        read_pictures(photos, ["red", image_id])
