import numpy as np
import pytest
import torch
from torchvision import transforms

from extractors.images.crops import View, ten_crop, ten_crop_views

SIZES_HW = [(224, 224), (256, 256), (224, 225), (225, 224), (227, 226), (256, 384), (341, 256), (256, 25600), (3413, 256)]


def starts(views: tuple[View, ...]) -> list[tuple[int, int]]:
    return [(view.top, view.left) for view in views]


@pytest.mark.parametrize("center", ["nearest", "floor"])
def test_order_and_places_by_hand(center):
    views = ten_crop_views(256, 340, crop=224, center=center)
    assert starts(views)[:5] == [(0, 0), (0, 116), (32, 0), (32, 116), (16, 58)]
    assert starts(views)[5:] == starts(views)[:5]
    assert [view.mirrored for view in views] == [False] * 5 + [True] * 5


@pytest.mark.parametrize(
    ("width", "nearest", "mirrored_nearest", "floor"),
    [(224, 0, 0, 0), (225, 0, 1, 0), (226, 1, 1, 1), (227, 2, 1, 1), (228, 2, 2, 2), (229, 2, 3, 2), (231, 4, 3, 3)],
)
def test_rounding_of_the_centre_by_hand(width, nearest, mirrored_nearest, floor):
    views = ten_crop_views(224, width, crop=224, center="nearest")
    assert (views[4].left, views[9].left) == (nearest, mirrored_nearest)
    views = ten_crop_views(224, width, crop=224, center="floor")
    assert (views[4].left, views[9].left) == (floor, floor)
    assert ten_crop_views(width, 224, crop=224, center="nearest")[4].top == nearest


def numbered(height: int, width: int) -> torch.Tensor:
    """Pixels whose first channels tell their column, modulo 251, and row, modulo 241."""
    column, row = torch.arange(width) % 251, torch.arange(height) % 241
    planes = [column.expand(height, width), row[:, None].expand(height, width), (column + row[:, None]) % 256]
    return torch.stack(planes).to(torch.uint8)


@pytest.mark.parametrize("size_hw", SIZES_HW)
def test_nearest_is_torchvisions_ten_crop(size_hw):
    pixels = numbered(*size_hw)
    expected = torch.stack(transforms.TenCrop(224)(pixels))
    found = ten_crop(pixels, crop=224, center="nearest")
    assert found.dtype == torch.uint8
    assert torch.equal(found[[0, 1, 2, 3, 4, 6, 5, 8, 7, 9]], expected)


@pytest.mark.parametrize("size_hw", SIZES_HW)
def test_floor_is_caffes_oversample(size_hw):
    """Cut crops with Caffe's arithmetic: the centre minus half a crop, truncated; then the same five mirrored."""
    pixels = numbered(*size_hw)
    image, size = pixels.numpy().transpose(1, 2, 0), np.array(size_hw)
    corners = [(i, j) for i in (0, size[0] - 224) for j in (0, size[1] - 224)]
    first = [*corners, tuple((size / 2.0 - 112).astype(int))]
    crops = [image[i : i + 224, j : j + 224] for i, j in first]
    crops += [crop[:, ::-1] for crop in crops]
    np.testing.assert_array_equal(ten_crop(pixels, crop=224, center="floor").numpy(), np.stack(crops).transpose(0, 3, 1, 2))


def test_image_of_one_crop_gives_it_ten_times():
    pixels = numbered(224, 224)
    for center in ("nearest", "floor"):
        crops = ten_crop(pixels, crop=224, center=center)
        assert all(torch.equal(crop, pixels) for crop in crops[:5])
        assert all(torch.equal(crop, pixels.flip(2)) for crop in crops[5:])


@pytest.mark.parametrize(
    ("size_hw", "center", "message"),
    [
        ((223, 224), "floor", "the image is 224×223, expected at least"),
        ((256, 0), "floor", "the image is 0×256"),
        ((256, 256), "ceil", "center is 'ceil'"),
    ],
)
def test_nonsense_is_refused(size_hw, center, message):
    with pytest.raises(ValueError, match=message):
        ten_crop_views(*size_hw, crop=224, center=center)
