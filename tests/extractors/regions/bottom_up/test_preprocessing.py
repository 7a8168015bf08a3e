import cv2
import numpy as np
import pytest
import torch

from extractors.regions.bottom_up.preprocessing import preprocess_image, scale_of, send
from tests.extractors.regions.reference_detector import resize
from tests.fake_gpu import fake_gpu

SIZES = [(640, 360), (333, 500), (17, 23), (1, 1), (2000, 20), (300, 4000), (800, 600), (2001, 1200), (31, 31)]


def picture(width, height, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def prepared(image):
    return preprocess_image(sent(torch.from_numpy(image).permute(2, 0, 1)))[0].permute(1, 2, 0).numpy()


def sent(pixels, device=None):
    return send(pixels, device or torch.device("cpu"))


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_preprocess_image_equals_reference_and_opencv(width, height):
    image = picture(width, height)
    expected, scale = resize(image)
    found = prepared(image)
    assert scale == scale_of(width, height)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=0, atol=5e-5)
    less_mean = image[:, :, ::-1].astype(np.float32)
    less_mean -= np.array([[[102.9801, 115.9465, 122.7717]]])
    expected = cv2.resize(less_mean, None, None, fx=scale, fy=scale, interpolation=cv2.INTER_LINEAR)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=0, atol=5e-5)


def test_send_uses_one_asynchronous_copy():
    pixels = torch.from_numpy(picture(41, 30)).permute(2, 0, 1)
    with fake_gpu() as gpu:
        image = sent(pixels, torch.device("cuda", 0))
        found = preprocess_image(image)
        assert {tensor.device.type for tensor in (*image, found)} == {"cuda"}
        assert not gpu.waits, gpu.report()
        assert [event.operation for event in gpu.copies.elements()] == ["copy to the GPU"]
        assert torch.equal(image.pixels.cpu(), pixels)
        assert image.scale.tolist() == [scale_of(41, 30)]
        assert torch.equal(found.cpu(), preprocess_image(sent(pixels)))
