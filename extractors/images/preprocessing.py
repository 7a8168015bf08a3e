"""Image preprocessing: resize, crop and normalise.

With antialiasing, results equal torchvision's ``Resize`` and ``CenterCrop`` on Pillow images byte for byte.
Importing this loads no torch, which decoding processes do not need.

Shapes: ``B`` images, ``H`` and ``W`` pixels of an image or its crop, ``K`` = 10 crops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image

from extractors.images.decoding import MAX_PIXELS, DecodeError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_STRIP_VALUES = 2**16  # size of the float64 arrays of `_bilinear`: small enough to stay in the cache of a processor
CROPS = 10


@dataclass(frozen=True)
class Preprocessing:
    """Steps from an RGB image to the input of a model.

    Attributes:
        resize_short: pixels of the shorter side after resizing; the longer becomes ``int(resize_short * long / short)``. None to
            resize both sides to ``crop``, ignoring the aspect ratio.
        crop: width and height of the centre crop in pixels; smaller images are padded with black.
        interpolation: ``bilinear`` or ``bicubic``.
        antialias: widen the filter for downscaling, as Pillow does; ``False`` only with ``bilinear``.
        channel_order: channel order of the model's input, ``mean`` and ``std``: ``RGB`` or ``BGR``.
        divisor: divisor of 8-bit values before normalisation.
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
        """Return the normalisation, on a device."""
        return Normalizer(self.mean, self.std, device, divisor=self.divisor, channel_order=self.channel_order)

    def parameters(self) -> dict[str, Any]:
        """Return the attributes and the resizing library as JSON values."""
        values = {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(self).items()}
        if values["resize_short"] is None:
            values["resize_hw"] = [values.pop("crop")] * 2
            del values["resize_short"]
        return values | {"resize_with": "pillow" if self.antialias else "imagepivot"}


def cropped_pixels(image: Image.Image, preprocessing: Preprocessing) -> np.ndarray:
    """Resize an RGB image and crop its centre.

    Returns:
        uint8 ``[3, H, W]``, channels R, G, B, in channels-last layout, ``H = W = crop``.

    Raises:
        DecodeError: the image is so thin that the resized image would have more than `MAX_PIXELS` pixels.
    """
    image = resize(image, preprocessing)
    pixels = np.array(image.crop(_crop_box(image.width, image.height, preprocessing.crop)))  # [H, W, 3], outside is black
    return pixels.transpose(2, 0, 1)  # [3, H, W]


def resized_pixels(image: Image.Image, preprocessing: Preprocessing) -> np.ndarray:
    """Return `resize` as an array: uint8 ``[3, H, W]``, R, G, B, channels-last."""
    return np.array(resize(image, preprocessing)).transpose(2, 0, 1)


def resize(image: Image.Image, preprocessing: Preprocessing) -> Image.Image:
    """Resize the shorter side, or both sides to ``crop`` without ``resize_short``.

    With ``antialias`` this is Pillow's ``resize``. Otherwise it is bilinear interpolation with half-pixel centres and repeated
    edges, computed exactly and rounded half to even. An image of the right size is returned unchanged.

    Raises:
        DecodeError: see `cropped_pixels`.
    """
    if image.mode != "RGB":
        raise ValueError(f"image is of mode {image.mode!r}, expected 'RGB'; use `decode_image`")
    short, crop = preprocessing.resize_short, preprocessing.crop
    if short is None:
        size_wh = (crop, crop)
    else:
        long = int(short * max(image.size) / min(image.size))
        size_wh = (short, long) if image.width <= image.height else (long, short)
    check_resized(image, size_wh)
    if size_wh == image.size:
        return image
    if preprocessing.antialias:
        return image.resize(size_wh, Image.Resampling[preprocessing.interpolation.upper()])
    return Image.fromarray(_bilinear(np.asarray(image), size_wh))


def check_resized(image: Image.Image, size_wh: tuple[int, int], *, min_side: int = 1) -> None:
    """Raise `DecodeError` for more than `MAX_PIXELS` or a side under ``min_side``."""
    pixels, short = size_wh[0] * size_wh[1], min(size_wh)
    if short >= min_side and pixels <= MAX_PIXELS:
        return
    raise DecodeError(
        "too_large" if short >= min_side else "unsupported",
        f"the image of {image.width}×{image.height} pixels would be resized to {size_wh[0]}×{size_wh[1]}, expected at most "
        f"{MAX_PIXELS} pixels in all and no side under {min_side}: it is too thin for a photograph; crop it or leave it out",
    )


class Normalizer:
    """Normalisation of 8-bit pixels on one device.

    Constants are tensors on the device, for equal bits on all devices: CUDA's kernels divide by a host scalar as a
    multiplication by its rounded reciprocal (``aten/src/ATen/native/cuda/BinaryDivTrueKernel.cu`` in github.com/pytorch/pytorch).
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
        """Compute ``(pixels / divisor - mean) / std`` in torchvision's order.

        The input is uint8 ``[B, 3, H, W]`` in R, G, B, the result is float32 ``[B, 3, H, W]`` in ``channel_order``.
        """
        import torch

        pixels = pixels.flip(1) if self._reverses else pixels
        return pixels.to(torch.float32).div_(self._divisor).sub_(self._mean).div_(self._std)


def _bilinear(pixels: np.ndarray, size_wh: tuple[int, int]) -> np.ndarray:
    """Resize uint8 ``[H, W, 3]`` without antialiasing, exactly rounded; see `resize`.

    Weights are integers over a common denominator. Sums stay below 2**53, so they are exact in float64.
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
    """Return both source positions, and the second's weight times ``2 * resized``."""
    numerators = (2 * np.arange(resized, dtype=np.int64) + 1) * length - resized  # Numerators of the centres, over 2 * resized.
    first, weight = np.divmod(numerators.clip(0, 2 * resized * (length - 1)), 2 * resized)
    return first, np.minimum(first + 1, length - 1), weight.astype(np.float64)


def _crop_box(width: int, height: int, crop: int) -> tuple[int, int, int, int]:
    """Return left, top, right, bottom of ``CenterCrop``, possibly beyond the image."""
    left = round((width - crop) / 2) if width >= crop else -((crop - width) // 2)
    top = round((height - crop) / 2) if height >= crop else -((crop - height) // 2)
    return left, top, left + crop, top + crop


class View(NamedTuple):
    """Crop by its first row and column; ``mirrored`` flips it left-right afterwards."""

    top: int
    left: int
    mirrored: bool


def ten_crop_views(height: int, width: int, *, crop: int, center: str) -> tuple[View, ...]:
    """Return ten crops: four corners row by row, the centre, then all mirrored.

    ``center`` is the rounding of the start of the centre crop, ``(side - crop) / 2``:

    - ``nearest``: as torchvision's ``TenCrop``, which rounds half to even and mirrors the image before cropping. For odd widths the
      mirrored centre is one column away from the centre. (Torchvision orders mirrored corners otherwise.)
    - ``floor``: as Caffe's ``oversample``, which rounds down and mirrors the five crops.

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
    """Crop ``[3, H, W]`` by `ten_crop_views` to ``[K, 3, crop, crop]``."""
    import torch

    views = ten_crop_views(pixels.shape[1], pixels.shape[2], crop=crop, center=center)
    cuts = [pixels[:, view.top : view.top + crop, view.left : view.left + crop] for view in views]
    return torch.stack([cut.flip(2) if view.mirrored else cut for cut, view in zip(cuts, views, strict=True)])
