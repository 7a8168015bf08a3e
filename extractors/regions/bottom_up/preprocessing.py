"""Preprocessing of the detector's input on its device: mean, then resize.

Equal to ``cv2.resize(image - mean, None, None, fx=scale, fy=scale)`` of ``lib/fast_rcnn/test.py`` in
github.com/peteanderson80/bottom-up-attention, except for rare last bits: bilinear without antialiasing. The sampling step is
1 / scale even if the size is rounded, so the last samples may be inside the image, not at its edge.

Shapes: ``H0`` and ``W0`` pixels of the original image, ``H`` and ``W`` of the resized one.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from schemas.process.devices import upload

_SHORT, _LONG = 600, 1000
_MEAN_BGR = (102.9801, 115.9465, 122.7717)  # ``__C.PIXEL_MEANS`` of lib/fast_rcnn/config.py

MIN_SIDE = 3
"""Minimum shorter side of the input, in pixels, for which the first convolution and pooling have an output."""

INPUT: dict[str, Any] = {
    "resize_short": _SHORT,
    "resize_long": _LONG,
    "interpolation": "bilinear",
    "antialias": False,
    "channel_order": "BGR",
    "mean": list(_MEAN_BGR),
}
"""Steps as JSON values, for the parameters of an extractor."""


def scale_of(width: int, height: int) -> float:
    """Return the scale to 600 pixels of the shorter side, at most 1000 of the longer."""
    scale = _SHORT / min(width, height)
    return _LONG / max(width, height) if round(scale * max(width, height)) > _LONG else scale


def resized_wh(width: int, height: int) -> tuple[int, int]:
    """Return width and height of the input; one is 0 for very thin images."""
    scale = scale_of(width, height)
    return round(width * scale), round(height * scale)


class Original(NamedTuple):
    """Image on a device with its resampling coefficients.

    Attributes:
        pixels: uint8 ``[3, H0, W0]``, channels R, G, B.
        scale: float64 ``[1]``, pixels of the input per pixel of the image.
        mean: float64 ``[3, 1, 1]``, in B, G, R.
        rows: float64 ``[3, H]``, for each row of the input the indices of two rows of the image (int64,
            bit-cast to float64) and the interpolation weight of the second.
        columns: float64 ``[3, W]``, the corresponding indices and weights of columns.
    """

    pixels: Tensor
    scale: Tensor
    mean: Tensor
    rows: Tensor
    columns: Tensor


def send(pixels: Tensor, device: torch.device) -> Original:
    """Upload an RGB image, uint8 ``[3, H0, W0]``, with its coefficients in one copy."""
    height, width = pixels.shape[1:]
    columns, rows = resized_wh(width, height)
    coefficients = _packed_coefficients(width, height)
    packed = upload(torch.cat((coefficients.view(torch.uint8), pixels.permute(1, 2, 0).reshape(-1))), device)
    size = coefficients.nbytes
    scale, mean, down, across = packed[:size].view(torch.float64).split((1, 3, 3 * rows, 3 * columns))
    image = packed[size:].view(height, width, 3).permute(2, 0, 1)
    return Original(image, scale, mean.view(3, 1, 1), down.view(3, rows), across.view(3, columns))


@lru_cache(maxsize=64)  # Images of a collection have few sizes.
def _packed_coefficients(width: int, height: int) -> Tensor:
    """Return scale, mean, rows and columns of an `Original` as one float64 vector."""
    scale = scale_of(width, height)
    columns, rows = resized_wh(width, height)
    scalars = torch.tensor((scale, *_MEAN_BGR), dtype=torch.float64)
    return torch.cat((scalars, _packed_ends(rows, height, scale), _packed_ends(columns, width, scale)))


def _packed_ends(resized: int, length: int, scale: float) -> Tensor:
    centres = ((torch.arange(resized, dtype=torch.float64) + 0.5) / scale - 0.5).clamp(0, length - 1)
    first = centres.floor()
    second = (first + 1).clamp(max=length - 1)
    weight = (centres - first).to(torch.float32).to(torch.float64)
    return torch.cat((first.long().view(torch.float64), second.long().view(torch.float64), weight))


def preprocess_image(image: Original) -> Tensor:
    """Subtract the mean and resize: float32 ``[1, 3, H, W]``, channels B, G, R."""
    top, bottom = image.rows[:2].view(torch.int64)
    left, right = image.columns[:2].view(torch.int64)

    def resized_rows(positions: Tensor) -> Tensor:
        strip = image.pixels.index_select(1, positions).flip(0)  # [3, H, W0], channels B, G, R
        first, second = (strip.index_select(2, ends).to(torch.float64).sub_(image.mean) for ends in (left, right))
        return _interpolate(first.to(torch.float32), second.to(torch.float32), image.columns[2])  # [3, H, W]

    return _interpolate(resized_rows(top), resized_rows(bottom), image.rows[2, :, None])[None]


def _interpolate(first: Tensor, second: Tensor, weight: Tensor) -> Tensor:
    """Interpolate with one rounding (fused multiply-add), as OpenCV does on x86."""
    return torch.addcmul(first.to(torch.float64), (second - first).to(torch.float64), weight).to(torch.float32)
