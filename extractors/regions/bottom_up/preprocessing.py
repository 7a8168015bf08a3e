"""The input of the detector, made on the device: the pixels of an image less the mean, then resized.

Faithful to ``cv2.resize(image - mean, None, None, fx=scale, fy=scale)`` of ``lib/fast_rcnn/test.py`` in
github.com/peteanderson80/bottom-up-attention: bilinear without antialiasing. The step from one sample to the next is 1 / scale
even if the size had to be rounded, so at 640 by 360 the lowest row of samples lies within the image, not at its edge. Of 1000
values 999 equal OpenCV's to the last bit; the others differ in that bit.

Letters in shapes: ``H0`` and ``W0`` pixels of the original image, ``H`` and ``W`` of the resized one.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from extractors.computing.devices import upload

_SHORT, _LONG = 600, 1000
_MEAN_BGR = (102.9801, 115.9465, 122.7717)  # ``__C.PIXEL_MEANS`` of lib/fast_rcnn/config.py

LEAST_SIDE = 3
"""Least length of the input's shorter side, in pixels, with which the first convolution and pooling have an output."""

INPUT: dict[str, Any] = {
    "resize_short": _SHORT,
    "resize_long": _LONG,
    "interpolation": "bilinear",
    "antialias": False,
    "channel_order": "BGR",
    "mean": list(_MEAN_BGR),
}
"""The steps as JSON values, for the parameters of an extractor."""


def scale_of(width: int, height: int) -> float:
    """Return the factor that makes the shorter side of an image 600, or the longer side 1000 if that would exceed 1000."""
    scale = _SHORT / min(width, height)
    return _LONG / max(width, height) if round(scale * max(width, height)) > _LONG else scale


def resized_wh(width: int, height: int) -> tuple[int, int]:
    """Return width and height of the detector's input, rounded to the nearest pixel, half to even; a very thin image gets 0."""
    scale = scale_of(width, height)
    return round(width * scale), round(height * scale)


class Original(NamedTuple):
    """An image on the device that resizes it, with the numbers for that.

    Attributes:
        pixels: uint8 ``[3, H0, W0]``, channels R, G, B.
        scale: float64 ``[1]``, pixels of the input per pixel of the image.
        mean: float64 ``[3, 1, 1]``, in B, G, R.
        rows: float64 ``[3, H]``, the rows of the image above and below each row of the input, the bits of int64 numbers, and the
            weight of the latter.
        columns: ``[3, W]``, likewise.
    """

    pixels: Tensor
    scale: Tensor
    mean: Tensor
    rows: Tensor
    columns: Tensor


def send(pixels: Tensor, device: torch.device) -> Original:
    """Send an image to a device, in one copy.

    Args:
        pixels: uint8 ``[3, H0, W0]``, channels R, G, B, on the CPU.
        device: where the input is made.
    """
    height, width = pixels.shape[1:]
    columns, rows = resized_wh(width, height)
    numbers = _numbers(width, height)
    together = torch.cat((numbers.view(torch.uint8), pixels.permute(1, 2, 0).reshape(-1)))
    sent = upload(together, device)
    size = numbers.nbytes
    scale, mean, down, across = sent[:size].view(torch.float64).split((1, 3, 3 * rows, 3 * columns))
    image = sent[size:].view(height, width, 3).permute(2, 0, 1)
    return Original(image, scale, mean.view(3, 1, 1), down.view(3, rows), across.view(3, columns))


@lru_cache(maxsize=64)  # The images of a collection have few sizes.
def _numbers(width: int, height: int) -> Tensor:
    """Return all numbers of an `Original` in a row, float64."""
    scale = scale_of(width, height)
    columns, rows = resized_wh(width, height)
    alone = torch.tensor((scale, *_MEAN_BGR), dtype=torch.float64)
    return torch.cat((alone, _neighbours(rows, height, scale), _neighbours(columns, width, scale)))


def _neighbours(resized: int, length: int, scale: float) -> Tensor:
    """Return two source positions around the centre of each of ``resized`` positions, and the weight of the second."""
    centres = ((torch.arange(resized, dtype=torch.float64) + 0.5) / scale - 0.5).clamp(0, length - 1)
    first = centres.floor()
    second = (first + 1).clamp(max=length - 1)
    weight = (centres - first).to(torch.float32).to(torch.float64)
    return torch.cat((first.long().view(torch.float64), second.long().view(torch.float64), weight))


def prepare(image: Original) -> Tensor:
    """Subtract the mean and resize.

    Returns:
        float32 ``[1, 3, H, W]``, channels B, G, R, on the device of the image.
    """
    top, bottom = image.rows[:2].view(torch.int64)
    left, right = image.columns[:2].view(torch.int64)

    def resized_rows(positions: Tensor) -> Tensor:
        strip = image.pixels.index_select(1, positions).flip(0)  # [3, H, W0], channels B, G, R
        first, second = (strip.index_select(2, ends).to(torch.float64).sub_(image.mean) for ends in (left, right))
        return _between(first.to(torch.float32), second.to(torch.float32), image.columns[2])  # [3, H, W]

    return _between(resized_rows(top), resized_rows(bottom), image.rows[2, :, None])[None]


def _between(first: Tensor, second: Tensor, weight: Tensor) -> Tensor:
    """Return ``first + (second - first) * weight`` in float32, product and sum rounded together as OpenCV does on x86."""
    return torch.addcmul(first.to(torch.float64), (second - first).to(torch.float64), weight).to(torch.float32)
