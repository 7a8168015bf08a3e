"""Byte-exact reimplementation of Pillow's ``Image.resize`` for RGB on torch.

Pillow resamples in two separable passes with 22-bit fixed-point coefficients, and rounds to 8 bits after each
(``src/libImaging/Resample.c`` in github.com/python-pillow/Pillow). Each pass is one call of FBGEMM's embedding bag kernel. Image
rows are the embedding table, an output row is a bag, coefficients are the per-sample weights. Coefficients are split into a
high and a low part, so that float32 sums are exact. The first pass runs on the transposed image.

`can_resize_exactly` is False, and Pillow itself has to resize,

- if the image has more than 4 megapixels, which Pillow stores in several blocks, or is very tall,
- if a side shrinks more than 60 times,
- if Pillow is older than 11.2, or has other results (`_matches_pillow` tests this once per process),
- if torch lacks FBGEMM.

Shapes: ``H`` and ``W`` pixels of an image, ``h`` and ``w`` of the result, ``N`` table rows, ``n`` bags, ``K`` coefficients each.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from math import ceil

import numpy as np
import pyarrow as pa
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

_BITS = 22  # Fractional bits of a coefficient.
_LOW_BITS = 8  # Bits of its low part.
_MAX_DOWNSCALE = 60.0
"""Maximum ratio of a side and the resized side, for which float32 sums of the low parts are exact."""
_MAX_ASPECT = 100  # Pillow resamples columns first if the height exceeds this times the width.
_STRIP = 2**20  # Bytes of rows that are transposed together, near a processor's cache size.
_SCALE_AND_BIAS = np.array([1, 0], np.float32).view(np.int32)  # Last values of a row of FBGEMM's byte tables.
_SUPPORT = {"bilinear": 1.0, "bicubic": 2.0}


@dataclass(frozen=True)
class _Coefficients:
    """Resampling coefficients along one axis, as bags for the embedding bag kernel.

    Attributes:
        first: index of the first input row used.
        stop: index after the last input row used.
        rows: int32 ``[2 * n * K]``, input rows of the bags relative to ``first``, once for each part of the coefficients.
        starts: int32 ``[2 * n]``, offsets of the bags in ``rows``.
        weights: float32 ``[2 * n * K]``, high parts of the coefficients, then low parts (not negative, scaled by 2 ** 14).
        overflows: whether a sum may be below 0 or above 255.
    """

    first: int
    stop: int
    rows: Tensor
    starts: Tensor
    weights: Tensor
    overflows: bool

    @property
    def count(self) -> int:
        """Number of bags, n."""
        return len(self.starts) // 2


def can_resize_exactly(image: Image.Image, size_wh: tuple[int, int]) -> bool:
    """Return whether `resize_exactly` supports an RGB image."""
    if image.height > _MAX_ASPECT * image.width or max(image.width / size_wh[0], image.height / size_wh[1]) > _MAX_DOWNSCALE:
        return False
    return _zero_copy_view(image) is not None and _matches_pillow()


@cache
def _matches_pillow() -> bool:
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        return False  # Other kernels are slow.
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (190, 310, 3), np.uint8))
    for interpolation in _SUPPORT:
        for size_wh in ((97, 61), (400, 201)):
            expected = np.asarray(noise.resize(size_wh, Image.Resampling[interpolation.upper()]))
            if not np.array_equal(resize_exactly(noise, size_wh, interpolation).numpy(), expected):
                return False
    return True


def resize_exactly(
    image: Image.Image, size_wh: tuple[int, int], interpolation: str, box: tuple[int, int, int, int] | None = None
) -> Tensor:
    """Resize an image as Pillow does, and crop it.

    Args:
        image: mode ``RGB``, with `can_resize_exactly`.
        size_wh: width and height of the resized image before the crop.
        interpolation: ``bilinear`` or ``bicubic``.
        box: left, top, right and bottom in the resized image, padded with black; None for no crop.

    Returns:
        uint8 ``[h, w, 3]``.
    """
    width, height = size_wh
    left, top, right, bottom = box or (0, 0, width, height)
    across = _coefficients(image.width, width, interpolation, max(left, 0), min(right, width))
    down = _coefficients(image.height, height, interpolation, max(top, 0), min(bottom, height))
    whole = _zero_copy_view(image)
    if whole is None:
        raise ValueError(f"cannot get a zero-copy view of the image of {image.width}×{image.height} pixels")
    pixels = whole[down.first : down.stop, across.first : across.stop]
    resized_rows = _empty_rows(len(pixels), across.count)
    step = max(1, _STRIP // (pixels.shape[1] * pixels.element_size()))
    for start in range(0, len(pixels), step):
        strip = pixels[start : start + step]
        columns = _empty_rows(strip.shape[1], len(strip))
        columns[:, : len(strip)] = strip.t()
        resized_rows[start : start + step, : across.count] = _weighted_row_sums(columns, across).view(torch.int32).t()
    rgbx = _weighted_row_sums(resized_rows, down).numpy()
    # By Pillow, since torch drops the padding channel byte by byte.
    resized = torch.from_numpy(np.array(Image.frombytes("RGB", (across.count, down.count), rgbx, "raw", "RGBX")))
    if resized.shape[:2] == (bottom - top, right - left):
        return resized
    return F.pad(resized, (0, 0, max(-left, 0), max(right - width, 0), max(-top, 0), max(bottom - height, 0)))


@lru_cache(maxsize=32)  # Images of a collection have few sizes.
def _coefficients(length: int, size: int, interpolation: str, start: int, stop: int) -> _Coefficients:
    """Return Pillow's ``precompute_coeffs`` for outputs ``start`` to ``stop``."""
    scale = length / size
    stretch = max(scale, 1.0)
    support = _SUPPORT[interpolation] * stretch
    centres = (np.arange(start, stop) + 0.5) * scale
    first = np.maximum((centres - support + 0.5).astype(np.int64), 0)
    count = np.minimum((centres + support + 0.5).astype(np.int64), length) - first
    steps = np.arange(min(ceil(support) * 2 + 1, int(count.max())))
    distances = (steps + first[:, None] - centres[:, None] + 0.5) * (1.0 / stretch)
    weights = np.where(steps < count[:, None], _FILTERS[interpolation](np.abs(distances)), 0.0)  # [n, K]
    total = np.zeros(len(weights))
    for column in weights.T:  # In Pillow's order, which determines the last bit.
        total += column
    weights /= total[:, None]
    fixed_point = (weights * 2**_BITS + np.copysign(0.5, weights)).astype(np.int64)
    high = fixed_point >> _LOW_BITS
    low = fixed_point - (high << _LOW_BITS)
    rows = np.minimum(first[:, None] + steps, length - 1)
    begin = int(rows.min())
    parts = np.stack((high * 2.0 ** (_LOW_BITS - _BITS), low * 2.0**-_LOW_BITS))
    return _Coefficients(
        begin,
        int(rows.max()) + 1,
        torch.from_numpy(np.stack((rows, rows)).ravel().astype(np.int32) - begin),
        torch.from_numpy(np.arange(0, parts.size, rows.shape[1], dtype=np.int32)),
        torch.from_numpy(parts.ravel().astype(np.float32)),
        bool((fixed_point < 0).any()),
    )


def _bicubic(distances: np.ndarray) -> np.ndarray:
    """Keys' cubic convolution with a = -0.5, evaluated as Pillow does."""
    x = distances
    near, far = ((-0.5 + 2.0) * x - (-0.5 + 3.0)) * x * x + 1, (((x - 5) * x + 8) * x - 4) * -0.5
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


_FILTERS = {"bilinear": lambda distances: np.maximum(1.0 - distances, 0.0), "bicubic": _bicubic}


def _zero_copy_view(image: Image.Image) -> Tensor | None:
    """Return Pillow's memory as int32 ``[H, W]``, 4 bytes per pixel, or None."""
    if not hasattr(image, "__arrow_c_array__"):  # Pillow 11.1 and before.
        return None
    try:
        values = torch.from_dlpack(pa.array(image).flatten())
    except ValueError:  # Images of more than 16 MB have several blocks of memory.
        return None
    return values.view(torch.int32).view(image.height, image.width)


def _empty_rows(rows: int, pixels: int) -> Tensor:
    """Return an uninitialized table for FBGEMM, scale and bias at each row's end."""
    table = torch.empty(rows, pixels + 2, dtype=torch.int32)
    table[:, pixels:] = torch.from_numpy(_SCALE_AND_BIAS)
    return table


def _weighted_row_sums(table: Tensor, bags: _Coefficients) -> Tensor:
    """Run the kernel on ``[N, pixels + 2]``, rounded to uint8 ``[n, 4 * pixels]``."""
    sums, low = torch.ops.quantized.embedding_bag_byte_rowwise_offsets(
        table.view(torch.uint8), bags.rows, bags.starts, per_sample_weights=bags.weights, include_last_offset=False
    ).split(bags.count)
    # Exact: only multiples of the high parts' last bit can change the rounded result.
    sums.add_(low.floor_(), alpha=2.0 ** (_LOW_BITS - _BITS)).add_(0.5)
    if bags.overflows:
        sums.clamp_(0, 255)
    return torch.from_numpy(sums.numpy().astype(np.uint8))  # Truncates; torch's conversion is slow.
