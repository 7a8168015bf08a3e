import dataclasses
import json

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms

from extractors.images import DecodeError, decode
from extractors.preprocess import Preprocessing, normalize, resize_and_crop
from extractors.resnet50 import PREPROCESSING

SIZES_WH = [(500, 333), (333, 500), (256, 256), (257, 256), (255, 400), (300, 256), (224, 224), (2000, 20), (20, 2000)]
SIZES_WH += [(1, 1), (2, 1), (1, 3), (3, 2), (341, 256), (343, 257), (479, 640), (640, 481)]


def noise(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(width * 7 + height).integers(0, 256, (height, width, 3), dtype=np.uint8))


def torchvision_crop(image: Image.Image, resize: int = 256, crop: int = 224, mode=transforms.InterpolationMode.BILINEAR):
    steps = [transforms.Resize(resize, mode), transforms.CenterCrop(crop), transforms.PILToTensor()]
    return transforms.Compose(steps)(image)


@pytest.mark.parametrize("size_wh", SIZES_WH)
def test_crop_has_torchvisions_bytes(size_wh):
    ours = resize_and_crop(noise(*size_wh), PREPROCESSING)
    assert ours.dtype == torch.uint8
    assert ours.shape == (3, 224, 224)
    assert torch.equal(ours, torchvision_crop(noise(*size_wh)))


def test_crop_of_photographs_has_torchvisions_bytes(photos):
    files = sorted((photos / "images").iterdir())
    assert len(files) == 18
    for file in files:
        with Image.open(file) as image:
            expected = torchvision_crop(image.convert("RGB"))
        assert torch.equal(resize_and_crop(decode(file.read_bytes()), PREPROCESSING), expected), file.name


@pytest.mark.parametrize("size_wh", [(50, 40), (51, 40), (40, 51), (90, 40), (33, 33)])
def test_crop_larger_than_the_image_is_padded_as_torchvision_pads(size_wh):
    padding = dataclasses.replace(PREPROCESSING, resize_short=40, crop=61)
    assert torch.equal(resize_and_crop(noise(*size_wh), padding), torchvision_crop(noise(*size_wh), 40, 61))


def test_interpolation_has_an_effect():
    bicubic = dataclasses.replace(PREPROCESSING, interpolation="bicubic")
    image = noise(500, 333)
    expected = torchvision_crop(image, mode=transforms.InterpolationMode.BICUBIC)
    assert torch.equal(resize_and_crop(image, bicubic), expected)
    assert not torch.equal(resize_and_crop(image, PREPROCESSING), expected)


def test_normalize_is_to_tensor_and_normalize():
    crop = resize_and_crop(noise(500, 333), PREPROCESSING)
    steps = [transforms.ToTensor(), transforms.Normalize(PREPROCESSING.mean, PREPROCESSING.std)]
    expected = transforms.Compose(steps)(Image.fromarray(crop.permute(1, 2, 0).numpy()))
    assert torch.equal(normalize(crop[None], PREPROCESSING)[0], expected)


def test_channel_order_divisor_and_mean_have_an_effect():
    caffe = Preprocessing(
        resize_short=256, crop=224, mean=(103.939, 116.779, 123.68), std=(1.0, 1.0, 1.0), divisor=1.0, channel_order="BGR"
    )
    red = torch.tensor([255, 0, 10], dtype=torch.uint8).view(1, 3, 1, 1)
    expected = torch.tensor([10 - 103.939, 0 - 116.779, 255 - 123.68]).view(1, 3, 1, 1)
    torch.testing.assert_close(normalize(red, caffe), expected, rtol=0, atol=1e-4)


def test_pure_red_is_red_in_the_first_channel():
    crop = resize_and_crop(Image.new("RGB", (300, 300), (255, 0, 0)), PREPROCESSING)
    assert crop.float().mean(dim=(1, 2)).tolist() == [255.0, 0.0, 0.0]
    values = normalize(crop[None], PREPROCESSING).mean(dim=(0, 2, 3)).tolist()
    assert values == pytest.approx([(1 - 0.485) / 0.229, -0.456 / 0.224, -0.406 / 0.225], abs=1e-4)


def test_pixels_are_copied_not_shared():
    image = noise(256, 256)
    before = np.asarray(image).copy()
    resize_and_crop(image, PREPROCESSING).zero_()
    np.testing.assert_array_equal(np.asarray(image), before)


def test_too_thin_to_resize_is_a_failure_of_the_image():
    with pytest.raises(DecodeError, match="60000×1 pixels would be resized to 15360000×256") as caught:
        resize_and_crop(Image.new("RGB", (60_000, 1)), PREPROCESSING)
    assert caught.value.reason == "too_large"


def test_other_modes_are_refused():
    with pytest.raises(ValueError, match="mode 'L', expected 'RGB'"):
        resize_and_crop(Image.new("L", (9, 9)), PREPROCESSING)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"interpolation": "cubic"}, "interpolation is 'cubic', expected one of"),
        ({"channel_order": "GBR"}, "channel_order is 'GBR', expected one of"),
        ({"antialias": False}, "antialias is False, expected True"),
        ({"crop": 0}, "crop is 0, expected positive pixels"),
        ({"resize_short": 0}, "resize_short is 0"),
    ],
)
def test_nonsense_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(PREPROCESSING, **change)


def test_parameters_are_plain_values():
    parameters = PREPROCESSING.parameters()
    assert json.loads(json.dumps(parameters)) == parameters
    assert parameters == {
        "resize_short": 256,
        "crop": 224,
        "mean": [0.485, 0.456, 0.406],
        "std": [0.229, 0.224, 0.225],
        "divisor": 255.0,
        "channel_order": "RGB",
        "interpolation": "bilinear",
        "antialias": True,
        "resize_with": "pillow",
    }
