from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms

from extractors.images.decoding import DecodeError, decode_image
from extractors.images.preprocessing import cropped_pixels, resize
from extractors.whole_image.resnet50 import PREPROCESSING

CPU = torch.device("cpu")
SIZES_WH = [(500, 333), (333, 500), (256, 256), (257, 256), (255, 400), (300, 256), (224, 224), (2000, 20), (20, 2000)]
SIZES_WH += [(1, 1), (2, 1), (1, 3), (3, 2), (341, 256), (343, 257), (479, 640), (640, 481)]


def noise(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(width * 7 + height).integers(0, 256, (height, width, 3), dtype=np.uint8))


def torchvision_crop(image: Image.Image, resize: int = 256, crop: int = 224, mode=transforms.InterpolationMode.BILINEAR):
    steps = [transforms.Resize(resize, mode), transforms.CenterCrop(crop), transforms.PILToTensor()]
    return transforms.Compose(steps)(image)


def resize_and_crop(image, preprocessing):
    return torch.from_numpy(cropped_pixels(image, preprocessing))


@pytest.mark.parametrize(
    ("size_wh", "resize", "crop", "interpolation"),
    [
        *((size_wh, 256, 224, "bilinear") for size_wh in SIZES_WH),
        ((500, 333), 256, 224, "bicubic"),
        *((size_wh, 40, 61, "bilinear") for size_wh in ((50, 40), (51, 40), (40, 51), (90, 40), (33, 33))),  # Padded.
    ],
)
def test_cropped_pixels_equals_torchvision(size_wh, resize, crop, interpolation):
    plan = dataclasses.replace(PREPROCESSING, resize_short=resize, crop=crop, interpolation=interpolation)
    found, mode = resize_and_crop(noise(*size_wh), plan), transforms.InterpolationMode(interpolation)
    assert (found.dtype, found.shape) == (torch.uint8, (3, crop, crop))
    assert torch.equal(found, torchvision_crop(noise(*size_wh), resize, crop, mode))


@pytest.mark.slow
def test_cropped_pixels_photographs_equal_torchvision(photos):
    files = sorted((photos / "images").iterdir())
    assert len(files) == 18
    for file in files:
        with Image.open(file) as image:
            expected = torchvision_crop(image.convert("RGB"))
        assert torch.equal(resize_and_crop(decode_image(file.read_bytes()), PREPROCESSING), expected), file.name


@pytest.mark.parametrize("order", ["RGB", "BGR"])
def test_normalizer_equals_torchvision(order):
    crop = resize_and_crop(noise(500, 333), PREPROCESSING)
    ordered = crop if order == "RGB" else crop.flip(0)
    steps = [transforms.ToTensor(), transforms.Normalize(PREPROCESSING.mean, PREPROCESSING.std)]
    expected = transforms.Compose(steps)(Image.fromarray(ordered.permute(1, 2, 0).numpy()))
    normalize = dataclasses.replace(PREPROCESSING, channel_order=order).normalizer(CPU)
    for pixels in (crop, crop.contiguous()):
        before = pixels.clone()
        assert torch.equal(normalize(pixels[None])[0], expected)
        assert torch.equal(pixels, before)


def test_cropped_pixels_too_thin_image_raises_decode_error():
    with pytest.raises(DecodeError, match="60000×1 pixels would be resized to 15360000×256") as caught:
        resize_and_crop(Image.new("RGB", (60_000, 1)), PREPROCESSING)
    assert caught.value.reason == "too_large"


ALIASED = dataclasses.replace(PREPROCESSING, antialias=False)


def bilinear(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """Interpolate between the centres of pixels, edges repeated, in the order of the formula; float64 [height, width, 3]."""
    y = np.clip((np.arange(height) + 0.5) * len(pixels) / height - 0.5, 0, len(pixels) - 1)[:, None, None]
    x = np.clip((np.arange(width) + 0.5) * pixels.shape[1] / width - 0.5, 0, pixels.shape[1] - 1)[None, :, None]
    y0, x0 = np.floor(y).astype(int), np.floor(x).astype(int)
    y1, x1 = np.minimum(y0 + 1, len(pixels) - 1), np.minimum(x0 + 1, pixels.shape[1] - 1)
    at = {(i, j): pixels[(y0, y1)[i][:, 0], (x0, x1)[j][:, :, 0]].astype(float) for i in (0, 1) for j in (0, 1)}
    dy, dx = y - y0, x - x0
    return (1 - dy) * ((1 - dx) * at[0, 0] + dx * at[0, 1]) + dy * ((1 - dx) * at[1, 0] + dx * at[1, 1])


@pytest.mark.parametrize("size_wh", [size for size in SIZES_WH if max(size) < 2000])
def test_resize_without_antialias_equals_bilinear_formula(size_wh):
    image = noise(*size_wh)
    ours = np.asarray(resize(image, ALIASED))
    short, long = min(size_wh), max(size_wh)
    assert sorted(ours.shape[:2]) == [256, 256 * long // short]
    exact = bilinear(np.asarray(image), *ours.shape[:2])
    assert np.abs(ours - exact).max() <= 0.5 + 1e-9
    clear = np.abs(exact % 1 - 0.5) > 1e-9
    np.testing.assert_array_equal(ours[clear], np.rint(exact)[clear])


def test_resize_without_antialias_does_not_depend_on_strips(monkeypatch):
    whole = np.asarray(resize(noise(500, 333), ALIASED))
    for values in (1, 10_000, 2**40):
        monkeypatch.setattr("extractors.images.preprocessing._STRIP_VALUES", values)
        np.testing.assert_array_equal(np.asarray(resize(noise(500, 333), ALIASED)), whole)


def test_resize_without_antialias_rounds_half_to_even():
    image = Image.fromarray(np.array([[[0, 1, 2], [1, 2, 3]]] * 2, np.uint8))
    assert np.asarray(resize(image, dataclasses.replace(ALIASED, resize_short=1))).tolist() == [[[0, 2, 2]]]


@pytest.mark.parametrize("size_wh", SIZES_WH)
def test_cropped_pixels_both_sides_equals_torchvision(size_wh):
    warp = dataclasses.replace(PREPROCESSING, resize_short=None)
    expected = transforms.Compose([transforms.Resize((224, 224)), transforms.PILToTensor()])(noise(*size_wh))
    assert torch.equal(resize_and_crop(noise(*size_wh), warp), expected)
    parameters = warp.parameters()
    assert parameters.pop("resize_hw") == [224, 224]
    assert parameters == {
        key: value for key, value in PREPROCESSING.parameters().items() if key not in ("resize_short", "crop")
    }
