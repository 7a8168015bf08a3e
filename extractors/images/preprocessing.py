"""Preprocessing: from an RGB image to the pixels that a model starts from, its crops, and from those to the normalised input.

With antialiasing, resizing and cropping make the same bytes as torchvision's ``Resize`` and ``CenterCrop`` on Pillow images.
Importing this loads no torch: processes that decode do without it.

Letters in shapes: ``B`` images, ``H`` and ``W`` pixels of an image or its crop, ``K`` = 10 crops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from extractors.images.decoding import MAX_PIXELS, DecodeError

_STRIP_VALUES = 2**16  # size of the float64 arrays of `_bilinear`: small enough to stay in the cache of a processor


@dataclass(frozen=True)
class Preprocessing:
    """Every step between an RGB image and the input of a model, as one value that is recorded with the features.

    Attributes:
        resize_short: pixels of the shorter side after resizing; the longer becomes ``int(resize_short * long / short)``. None to
            resize both sides to ``crop``, whatever the aspect ratio.
        crop: width and height of the centre crop in pixels; a smaller image is padded with black.
        interpolation: ``bilinear`` or ``bicubic``.
        antialias: whether the filter widens when an image shrinks, as Pillow's always does; ``False`` only with ``bilinear``.
        channel_order: order of the channels in the input of the model, and of ``mean`` and ``std``: ``RGB`` or ``BGR``.
        divisor: number that 8-bit values are divided by, before the mean is subtracted.
        mean: subtracted from each channel.
        std: divides each channel after that.
    """

    resize_short: int | None
    crop: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    divisor: float = 255.0
    channel_order: str = "RGB"
    interpolation: str = "bilinear"
    antialias: bool = True

    def normalizer(self, device: torch.device) -> Normalizer:
        """Return the last steps, on a device."""
        return Normalizer(self.mean, self.std, device, divisor=self.divisor, channel_order=self.channel_order)

    def parameters(self) -> dict[str, Any]:
        """Return all attributes as JSON values, and the library that resizes; ``resize_hw`` where there is nothing to crop."""
        values = {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(self).items()}
        if values["resize_short"] is None:
            values["resize_hw"] = [values.pop("crop")] * 2
            del values["resize_short"]
        return values | {"resize_with": "pillow" if self.antialias else "imagepivot"}


def resize_and_crop(image: Image.Image, preprocessing: Preprocessing, *, single_threaded: bool = False) -> Tensor:
    """Resize an image and cut out the centre.

    Args:
        image: mode ``RGB``, any size from 1×1.
        preprocessing: its steps.
        single_threaded: whether no other thread does so at the same time; see `extractors.Extractor.preprocess_single_threaded`.

    Returns:
        uint8 ``[3, H, W]`` in 0…255, channels R, G, B, ``H = W = crop``. Equal, byte for byte, to torchvision's ``Resize`` and
        ``CenterCrop``. Channels are innermost in memory, as the models expect them in a batch.

    Raises:
        DecodeError: the image is so thin that resizing its shorter side would make more than `MAX_PIXELS` pixels.
    """
    import torch

    if single_threaded and preprocessing.antialias:
        from extractors.images.resizing import can_resize_exactly, resize_exactly  # Loads torch.

        size_wh = _checked_size(image, preprocessing)
        if can_resize_exactly(image, size_wh):
            box = _crop_box(*size_wh, preprocessing.crop)
            return resize_exactly(image, size_wh, preprocessing.interpolation, box).permute(2, 0, 1)
    return torch.from_numpy(cropped_pixels(image, preprocessing))


def cropped_pixels(image: Image.Image, preprocessing: Preprocessing) -> np.ndarray:
    """Return what `resize_and_crop` does as an array, without torch."""
    image = resize(image, preprocessing)
    pixels = np.array(image.crop(_crop_box(image.width, image.height, preprocessing.crop)))  # [H, W, 3], outside is black
    return pixels.transpose(2, 0, 1)  # [3, H, W]


def resized_pixels(image: Image.Image, preprocessing: Preprocessing) -> np.ndarray:
    """Return what `resize` does as an array: uint8 ``[3, H, W]``, channels R, G, B, innermost in memory."""
    return np.array(resize(image, preprocessing)).transpose(2, 0, 1)


def resize(image: Image.Image, preprocessing: Preprocessing) -> Image.Image:
    """Resize the shorter side and keep the aspect ratio, the longer side rounded down; without ``resize_short`` both to ``crop``.

    With ``antialias`` this is Pillow's ``resize``. Without it, each pixel of the result is the bilinear interpolation of the
    four pixels around its centre (centres lie at halves; beyond the outermost centres the edge is repeated), computed exactly
    and rounded to the nearest 8-bit value, ties to even.

    Args:
        image: mode ``RGB``, any size from 1×1. It is not changed, and is itself returned if it has the size already.
        preprocessing: size, interpolation and antialias.

    Raises:
        DecodeError: the image is so thin that it would have more than `MAX_PIXELS` pixels.
    """
    size_wh = _checked_size(image, preprocessing)
    if size_wh == image.size:
        return image
    if preprocessing.antialias:
        return image.resize(size_wh, Image.Resampling[preprocessing.interpolation.upper()])
    return Image.fromarray(_bilinear(np.asarray(image), size_wh))


def _checked_size(image: Image.Image, preprocessing: Preprocessing) -> tuple[int, int]:
    """Return the width and height to which an image is resized; errors as of `resize`."""
    if image.mode != "RGB":
        raise ValueError(f"image is of mode {image.mode!r}, expected 'RGB'; use `decode`")
    short, crop = preprocessing.resize_short, preprocessing.crop
    size_wh = (crop, crop) if short is None else _resized_wh(*image.size, short)
    check_resized(image, size_wh)
    return size_wh


def check_resized(image: Image.Image, size_wh: tuple[int, int], *, least: int = 1) -> None:
    """Raise `DecodeError` if an image must not be resized to a width and height.

    Args:
        image: the image.
        size_wh: width and height after resizing: at most `MAX_PIXELS` pixels in all.
        least: least length of the shorter side after resizing, in pixels.
    """
    pixels, short = size_wh[0] * size_wh[1], min(size_wh)
    if short >= least and pixels <= MAX_PIXELS:
        return
    raise DecodeError(
        "too_large" if short >= least else "unsupported",
        f"the image of {image.width}×{image.height} pixels would be resized to {size_wh[0]}×{size_wh[1]}, expected at most "
        f"{MAX_PIXELS} pixels in all and no side under {least}: it is too thin for a photograph; crop it or leave it out",
    )


class Normalizer:
    """From 8-bit pixels to the input of a model, on one device.

    All numbers lie on the device. So they are copied once, and a division gives the same bits on every device: dividing by a number
    of the host, CUDA's kernels multiply by its reciprocal, which may differ in the last bit
    (``aten/src/ATen/native/cuda/BinaryDivTrueKernel.cu`` in github.com/pytorch/pytorch).
    """

    def __init__(
        self,
        mean: Sequence[float],
        std: Sequence[float],
        device: torch.device,
        *,
        divisor: float = 255.0,
        channel_order: str = "RGB",
    ) -> None:
        import torch

        self._mean, self._std = (torch.tensor(values, device=device).view(3, 1, 1) for values in (mean, std))
        self._divisor = torch.tensor(divisor, device=device)
        self._reverses = channel_order != "RGB"

    def __call__(self, pixels: Tensor) -> Tensor:
        """Normalise pixels.

        Args:
            pixels: uint8 ``[B, 3, H, W]``, channels R, G, B.

        Returns:
            float32 ``[B, 3, H, W]``, channels in ``channel_order``: ``(pixels / divisor - mean) / std``, in the order of operations
            of torchvision's ``ToTensor`` and ``Normalize``.
        """
        import torch

        pixels = pixels.flip(1) if self._reverses else pixels
        values = pixels.to(torch.float32).div_(self._divisor)
        mean, std, rows = self._mean, self._std, values
        if values.device.type == "cpu" and values.is_contiguous(memory_format=torch.channels_last):
            # By whole rows: by pixels, a processor works at three numbers at a time, and takes five times as long.
            count, _, height, width = values.shape
            rows = values.permute(0, 2, 3, 1).view(count, height, 3 * width)
            mean, std = (numbers.flatten().repeat(width) for numbers in (mean, std))
        rows.sub_(mean).div_(std)
        return values


def _bilinear(pixels: np.ndarray, size_wh: tuple[int, int]) -> np.ndarray:
    """Resize uint8 ``[H, W, 3]`` without antialiasing, exactly rounded; see `resize`.

    Weights are whole numbers over a common denominator. All sums stay below 2**53, so float64 holds them exactly, and the one
    division rounds so little that it can neither make nor break a tie.
    """
    width, height = size_wh
    top, bottom, down = _neighbours(pixels.shape[0], height)
    left, right, across = _neighbours(pixels.shape[1], width)
    down, across = down[:, None, None], across[:, None]
    result = np.empty((height, width, 3), dtype=np.uint8)
    step = max(1, _STRIP_VALUES // (3 * max(width, pixels.shape[1])))
    for start in range(0, height, step):
        rows = slice(start, start + step)
        strip = pixels[top[rows]] * (2 * height - down[rows]) + pixels[bottom[rows]] * down[rows]  # [rows, W, 3]
        strip = strip[:, left] * (2 * width - across) + strip[:, right] * across  # [rows, width, 3]
        result[rows] = np.rint(strip / (4 * height * width))
    return result


def _neighbours(length: int, resized: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return two source positions around the centre of each of ``resized`` positions, and the second's weight times 2 resized."""
    numerators = (2 * np.arange(resized, dtype=np.int64) + 1) * length - resized  # of the centre, over 2 * resized
    first, weight = np.divmod(numerators.clip(0, 2 * resized * (length - 1)), 2 * resized)
    return first, np.minimum(first + 1, length - 1), weight.astype(np.float64)


def _resized_wh(width: int, height: int, short: int) -> tuple[int, int]:
    """Return width and height after resizing the shorter side to ``short``; the longer is rounded down."""
    long = int(short * max(width, height) / min(width, height))
    return (short, long) if width <= height else (long, short)


def _crop_box(width: int, height: int, crop: int) -> tuple[int, int, int, int]:
    """Return left, top, right and bottom of the centre crop, which reaches beyond an image that is smaller than the crop.

    Halves are rounded as torchvision rounds them: to the nearest number, ties to even; of an odd padding the smaller half comes
    first.
    """
    left = round((width - crop) / 2) if width >= crop else -((crop - width) // 2)
    top = round((height - crop) / 2) if height >= crop else -((crop - height) // 2)
    return left, top, left + crop, top + crop


CROPS = 10


class View(NamedTuple):
    """One crop: its first row and column in the image, and whether it is mirrored left-right after cutting."""

    top: int
    left: int
    mirrored: bool


def ten_crop_views(height: int, width: int, *, crop: int, center: str) -> tuple[View, ...]:
    """Return the ten crops of an image: top left, top right, bottom left, bottom right, centre; then the mirrored ones.

    Args:
        height: height of the image in pixels.
        width: width of the image in pixels.
        crop: width and height of a crop in pixels.
        center: how ``(side - crop) / 2``, the start of the centre crop, is rounded if ``side - crop`` is odd:

            - ``nearest``: as torchvision's ``TenCrop``, which rounds to the nearest whole number, halves to the even one, and
              mirrors the image before cutting. So in images of odd width the mirrored centre is one column away from the centre.
              (Torchvision's tuple lists the mirrored corners in another order: mirrored top right, top left, bottom right,
              bottom left. The ten are the same.)
            - ``floor``: as Caffe's ``oversample``, which rounds down and mirrors the five crops. It starts one pixel before
              torchvision's if ``side - crop`` is 3 more than a multiple of 4.

    Example:
        >>> [view[:2] for view in ten_crop_views(256, 341, crop=224, center="floor")][:5]
        [(0, 0), (0, 117), (32, 0), (32, 117), (16, 58)]
    """
    bottom, right = height - crop, width - crop
    corners = [(0, 0), (0, right), (bottom, 0), (bottom, right)]
    if center == "floor":
        middle = mirrored_middle = (bottom // 2, right // 2)
    else:
        middle = (round(bottom / 2), round(right / 2))
        mirrored_middle = (middle[0], right - middle[1])
    upright = [View(*start, mirrored=False) for start in [*corners, middle]]
    return (*upright, *(View(*start, mirrored=True) for start in [*corners, mirrored_middle]))


def ten_crop(pixels: Tensor, *, crop: int, center: str) -> Tensor:
    """Cut the crops of `ten_crop_views` out of an image ``[3, H, W]``, on its device: ``[K, 3, crop, crop]`` of its type."""
    views = ten_crop_views(pixels.shape[1], pixels.shape[2], crop=crop, center=center)
    cuts = [pixels[:, view.top : view.top + crop, view.left : view.left + crop] for view in views]
    return torch.stack([cut.flip(2) if view.mirrored else cut for cut, view in zip(cuts, views, strict=True)])
