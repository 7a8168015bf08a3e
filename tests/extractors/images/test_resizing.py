"""Pillow itself is the truth: every byte must be its own."""

import io
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from PIL import Image

from extractors.images import resizing
from extractors.images.decoding import decode_image
from extractors.images.preprocessing import Preprocessing, cropped_pixels, resize_and_crop
from extractors.images.resizing import can_resize_exactly, resize_exactly

INTERPOLATIONS = ["bilinear", "bicubic"]
NUMBERS = {"mean": (0.5, 0.5, 0.5), "std": (0.2, 0.2, 0.2)}


@pytest.fixture(autouse=True)
def on_this_processor():
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        pytest.skip("torch has no FBGEMM for this processor: Pillow does all resizing")


def noise(width: int, height: int, *, levels: str = "all") -> Image.Image:
    """Return an image of random values; of ``extreme`` ones, a bicubic filter overshoots everywhere."""
    random = np.random.default_rng(width * 7919 + height)
    choices = [0, 255] if levels == "extreme" else range(256)
    return Image.fromarray(random.choice(choices, (height, width, 3)).astype(np.uint8))


def by_pillow(image: Image.Image, size_wh: tuple[int, int], interpolation: str) -> np.ndarray:
    return np.asarray(image.resize(size_wh, Image.Resampling[interpolation.upper()]))


@pytest.mark.slow
@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
@pytest.mark.parametrize("levels", ["all", "extreme"])
@pytest.mark.parametrize(
    ("image_wh", "size_wh"),
    [
        *[((500, 375), (341, 256)), ((375, 500), (256, 341)), ((640, 481), (235, 313)), ((500, 333), (448, 448))],
        *[((256, 256), (256, 256)), ((257, 256), (256, 255)), ((100, 80), (512, 410)), ((1, 1), (224, 224))],
        *[((2, 3), (256, 384)), ((1999, 21), (200, 24)), ((21, 1999), (24, 200)), ((1300, 1290), (23, 22))],
        ((5, 400), (4, 224)),
    ],
)
def test_resize_exactly_equals_pillow(image_wh, size_wh, levels, interpolation):
    image = noise(*image_wh, levels=levels)
    assert can_resize_exactly(image, size_wh)
    found = resize_exactly(image, size_wh, interpolation)
    assert found.dtype == torch.uint8
    np.testing.assert_array_equal(found.numpy(), by_pillow(image, size_wh, interpolation))


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
def test_resize_exactly_random_sizes_equal_pillow(interpolation):
    random = np.random.default_rng(17)
    for _ in range(150):
        image_wh = tuple(int(side) for side in np.exp(random.uniform(0, np.log(700), 2)))
        size_wh = tuple(int(side) for side in np.exp(random.uniform(np.log(8), np.log(500), 2)))
        image = noise(*image_wh, levels=str(random.choice(["all", "extreme"])))
        if not can_resize_exactly(image, size_wh):
            continue
        left, right = sorted(random.integers(0, size_wh[0] + 1, 2))
        top, bottom = sorted(random.integers(0, size_wh[1] + 1, 2))
        box = (int(left), int(top), int(right) + 1, int(bottom) + 1)
        expected = np.asarray(image.resize(size_wh, Image.Resampling[interpolation.upper()]).crop(box))
        np.testing.assert_array_equal(
            resize_exactly(image, size_wh, interpolation, box).numpy(), expected, err_msg=f"{image_wh} {size_wh} {box}"
        )


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
def test_resize_exactly_box_beyond_image_is_black(interpolation):
    image = noise(90, 60)
    for box in ((-7, -3, 60, 40), (10, 5, 75, 50), (-4, -4, 75, 50), (0, 0, 72, 48)):
        expected = np.asarray(image.resize((72, 48), Image.Resampling[interpolation.upper()]).crop(box))
        np.testing.assert_array_equal(resize_exactly(image, (72, 48), interpolation, box).numpy(), expected)


@pytest.mark.slow
def test_resize_exactly_multi_block_image_uses_pillow(monkeypatch):
    large, plan = noise(2600, 2100), Preprocessing(resize_short=256, crop=224, **NUMBERS)  # More than the 16 MB of a block.
    with pytest.raises(ValueError, match="block"):
        large.__arrow_c_array__()
    assert not can_resize_exactly(large, (317, 256))
    np.testing.assert_array_equal(resize_and_crop(large, plan, single_threaded=True).numpy(), cropped_pixels(large, plan))
    with pytest.raises(ValueError, match="cannot get a zero-copy view of the image of 2600×2100 pixels"):
        resize_exactly(large, (317, 256), "bilinear")
    small = noise(300, 200)
    assert can_resize_exactly(small, (384, 256))
    monkeypatch.delattr(Image.Image, "__arrow_c_array__")  # As before Pillow 11.2.
    assert not can_resize_exactly(small, (384, 256))


@pytest.mark.parametrize("strip", [1, 2**12, 2**30])
def test_resize_exactly_does_not_depend_on_strips(strip, monkeypatch):
    image = noise(333, 251)
    monkeypatch.setattr(resizing, "_STRIP", strip)
    np.testing.assert_array_equal(resize_exactly(image, (235, 177), "bicubic").numpy(), by_pillow(image, (235, 177), "bicubic"))


@pytest.mark.slow
def test_resize_and_crop_photographs_equal_pillow(photos):
    files = sorted((photos / "images").iterdir())
    assert len(files) == 18
    for file in files:
        image = decode_image(file.read_bytes())
        for plan in (
            Preprocessing(resize_short=256, crop=224, **NUMBERS),
            Preprocessing(resize_short=235, crop=224, interpolation="bicubic", **NUMBERS),
            Preprocessing(resize_short=None, crop=448, **NUMBERS),
        ):
            np.testing.assert_array_equal(
                resize_and_crop(image, plan, single_threaded=True).numpy(), cropped_pixels(image, plan)
            )


def test_resize_exactly_copies_pixels():
    image = noise(300, 200)
    before = np.array(image)
    found = resize_exactly(image, (300, 200), "bilinear")
    np.testing.assert_array_equal(found.numpy(), before)
    found.zero_()
    np.testing.assert_array_equal(np.asarray(image), before)


def test_resize_exactly_runs_in_several_threads():
    images = [noise(200 + index, 180) for index in range(12)]
    with ThreadPoolExecutor(12) as pool:
        resized = list(pool.map(lambda image: resize_exactly(image, (150, 141), "bicubic").numpy(), images))
    for array, image in zip(resized, images, strict=True):
        np.testing.assert_array_equal(array, by_pillow(image, (150, 141), "bicubic"))


@pytest.mark.parametrize(("image_wh", "size_wh"), [((3, 301), (4, 224)), ((1240, 1000), (20, 16)), ((100, 6200), (50, 100))])
def test_resize_exactly_extreme_aspect_or_scale_uses_pillow(image_wh, size_wh):
    assert not can_resize_exactly(Image.new("RGB", image_wh), size_wh)


@pytest.mark.parametrize("why", ["other bytes", "no FBGEMM"])
def test_can_resize_exactly_other_bytes_or_no_fbgemm_is_false(why, monkeypatch):
    resizing._matches_pillow.cache_clear()
    if why == "other bytes":
        monkeypatch.setattr(resizing, "_BITS", 21)
        resizing._coefficients.cache_clear()
    else:
        monkeypatch.setattr(torch._C, "_supported_qengines", list)
    try:
        assert not can_resize_exactly(noise(500, 375), (341, 256))
        monkeypatch.setattr(resizing, "resize_exactly", lambda *_: pytest.fail("torch resizes"))
        image, plan = noise(500, 375), Preprocessing(resize_short=256, crop=224, **NUMBERS)
        np.testing.assert_array_equal(resize_and_crop(image, plan, single_threaded=True).numpy(), cropped_pixels(image, plan))
    finally:
        resizing._matches_pillow.cache_clear()
        resizing._coefficients.cache_clear()


def test_resize_exactly_image_from_file_equals_pillow():
    file = io.BytesIO()
    noise(80, 60).save(file, "PNG")
    file.seek(0)
    with Image.open(file) as lazy:
        found = resize_exactly(lazy, (40, 30), "bilinear")
    np.testing.assert_array_equal(found.numpy(), by_pillow(noise(80, 60), (40, 30), "bilinear"))
