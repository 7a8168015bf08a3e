"""Pillow's resizing of RGB images, bit for bit, with fewer instructions, and only where the result is wanted.

Pillow adds up 8-bit values times weights of 22 binary digits, along the rows of an image and then along its columns, and rounds
each sum to 8 bits (``src/libImaging/Resample.c`` in github.com/python-pillow/Pillow). Torch's sums of embeddings that are stored as
bytes (FBGEMM) are the same sums for a whole row of values at once. Each weight is cut into two numbers, so that no sum needs more
than the 24 digits of float32; in the first pass columns are turned into rows.

Whether the bytes are Pillow's is tried once in each process. Pillow has to resize where `can_resize_exactly` is False: the bytes
would differ, as with a Pillow that calculates in another way, take longer, as without FBGEMM, or more memory, as of an image of
more than 4 megapixels.

Letters in shapes: ``H`` and ``W`` pixels of an image, ``h`` and ``w`` of the result, ``N`` rows that are added up, ``n`` sums,
``K`` weights of each.
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

_DIGITS = 22  # Binary ones behind the point of a weight.
_LOW = 8  # The last of them, which have sums of their own.
_MAX_DOWNSCALE = 60.0
"""Greatest quotient of a side and the resized one: the sums of the last digits of 255 weights, of which a product has 16, fit."""
_TALL = 100  # Times as high as wide: there Pillow begins with the columns.
_STRIP = 2**20  # Bytes of the columns that are turned into rows at once, near to a processor's cache.
_SCALE_AND_BIAS = np.array([1, 0], np.float32).view(np.int32)  # What a row of bytes ends with.
_SUPPORT = {"bilinear": 1.0, "bicubic": 2.0}


@dataclass(frozen=True)
class _Coefficients:
    """The sums along one axis.

    Attributes:
        first: number of the first row that is in any of them.
        last: of the last, plus one.
        rows: int32 ``[2 * n * K]``, numbers of the rows of each sum, from ``first`` on, for each part of the weights.
        starts: int32 ``[2 * n]``, where the rows of each sum begin.
        weights: float32 ``[2 * n * K]``, first without their last digits, then these, as multiples of the last of the others. None
            of the latter is negative.
        overflows: whether a sum may be less than 0 or more than 255.
    """

    first: int
    last: int
    rows: Tensor
    starts: Tensor
    weights: Tensor
    overflows: bool

    @property
    def count(self) -> int:
        """Number of the sums."""
        return len(self.starts) // 2


def can_resize_exactly(image: Image.Image, size_wh: tuple[int, int]) -> bool:
    """Tell whether `resize_exactly` makes Pillow's bytes of an image in this process, in less time and without a copy of the image.

    Args:
        image: mode ``RGB``.
        size_wh: width and height of the whole resized image.
    """
    if image.height > _TALL * image.width or max(image.width / size_wh[0], image.height / size_wh[1]) > _MAX_DOWNSCALE:
        return False
    return _zero_copy_view(image) is not None and _agrees()


@cache
def _agrees() -> bool:
    """Compare with Pillow, where torch's sums of embeddings are those of FBGEMM: others are slow."""
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        return False
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
    """Resize an image as Pillow does, and cut out a box.

    Args:
        image: mode ``RGB``, for which `can_resize_exactly`.
        size_wh: width and height of the whole resized image.
        interpolation: ``bilinear`` or ``bicubic``.
        box: left, top, right and bottom in the resized image; beyond it the result is black. None for all of it.

    Returns:
        uint8 ``[h, w, 3]``, of memory of its own.
    """
    width, height = size_wh
    left, top, right, bottom = box or (0, 0, width, height)
    across = _coefficients(image.width, width, interpolation, max(left, 0), min(right, width))
    down = _coefficients(image.height, height, interpolation, max(top, 0), min(bottom, height))
    whole = _zero_copy_view(image)
    if whole is None:
        raise ValueError(f"Pillow does not lend the memory of an image of {image.width}×{image.height} pixels")
    pixels = whole[down.first : down.last, across.first : across.last]
    halfway = _empty_rows(len(pixels), across.count)
    step = max(1, _STRIP // (pixels.shape[1] * pixels.element_size()))
    for start in range(0, len(pixels), step):
        strip = pixels[start : start + step]
        columns = _empty_rows(strip.shape[1], len(strip))
        columns[:, : len(strip)] = strip.t()
        halfway[start : start + step, : across.count] = _weighted_row_sums(columns, across).view(torch.int32).t()
    found = _drop_padding_channel(_weighted_row_sums(halfway, down).view(down.count, across.count, 4))
    if found.shape[:2] == (bottom - top, right - left):
        return found
    return F.pad(found, (0, 0, max(-left, 0), max(right - width, 0), max(-top, 0), max(bottom - height, 0)))


@lru_cache(maxsize=32)  # The images of a collection have few sizes.
def _coefficients(length: int, size: int, interpolation: str, start: int, stop: int) -> _Coefficients:
    """Return the sums of ``length`` rows for some of ``size`` positions, as ``precompute_coeffs`` and what follows it in Pillow."""
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
    for column in weights.T:  # In Pillow's order: the last bit depends on it.
        total += column
    weights /= total[:, None]
    whole = (weights * 2**_DIGITS + np.copysign(0.5, weights)).astype(np.int64)
    high = whole >> _LOW
    low = whole - (high << _LOW)
    rows = np.minimum(first[:, None] + steps, length - 1)
    begin = int(rows.min())
    both = np.stack((high * 2.0 ** (_LOW - _DIGITS), low * 2.0**-_LOW))
    return _Coefficients(
        begin,
        int(rows.max()) + 1,
        torch.from_numpy(np.stack((rows, rows)).ravel().astype(np.int32) - begin),
        torch.from_numpy(np.arange(0, both.size, rows.shape[1], dtype=np.int32)),
        torch.from_numpy(both.ravel().astype(np.float32)),
        bool((whole < 0).any()),
    )


def _bilinear(distances: np.ndarray) -> np.ndarray:
    return np.where(distances < 1.0, 1.0 - distances, 0.0)


def _bicubic(distances: np.ndarray) -> np.ndarray:
    """Keys' cubic convolution with a = -0.5, evaluated as Pillow does."""
    x = distances
    near, far = ((-0.5 + 2.0) * x - (-0.5 + 3.0)) * x * x + 1, (((x - 5) * x + 8) * x - 4) * -0.5
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


_FILTERS = {"bilinear": _bilinear, "bicubic": _bicubic}


def _zero_copy_view(image: Image.Image) -> Tensor | None:
    """Return the pixels of an image, of four bytes each, in Pillow's own memory: int32 ``[H, W]``; None if it does not lend it."""
    if not hasattr(image, "__arrow_c_array__"):  # Pillow 11.1 and before.
        return None
    try:
        values = torch.from_dlpack(pa.array(image).flatten())
    except ValueError:  # An image of more than 16 MB has several blocks of memory.
        return None
    return values.view(torch.int32).view(image.height, image.width)


def _empty_rows(rows: int, pixels: int) -> Tensor:
    """Return a table of rows of pixels, to be filled, as torch wants it: each row ends with its scale and its bias."""
    table = torch.empty(rows, pixels + 2, dtype=torch.int32)
    table[:, pixels:] = torch.from_numpy(_SCALE_AND_BIAS)
    return table


def _weighted_row_sums(table: Tensor, sums: _Coefficients) -> Tensor:
    """Add up the rows of a table, ``[N, pixels + 2]``, and round to 8 bits: uint8 ``[n, 4 * pixels]``."""
    found, low = torch.ops.quantized.embedding_bag_byte_rowwise_offsets(
        table.view(torch.uint8), sums.rows, sums.starts, per_sample_weights=sums.weights, include_last_offset=False
    ).split(sums.count)
    # All of it is exact: of the low sums only whole multiples of the last digit of the high ones can change what is rounded.
    found.add_(low.floor_(), alpha=2.0 ** (_LOW - _DIGITS)).add_(0.5)
    if sums.overflows:
        found.clamp_(0, 255)
    return torch.from_numpy(found.numpy().astype(np.uint8))  # Cuts off; torch's own conversion takes seven times as long.


def _drop_padding_channel(pixels: Tensor) -> Tensor:
    """Drop the fourth byte of pixels: uint8 ``[h, w, 4]`` to ``[h, w, 3]``."""
    height, width = pixels.shape[:2]
    # By Pillow: torch copies byte by byte.
    return torch.from_numpy(np.array(Image.frombytes("RGB", (width, height), pixels.numpy(), "raw", "RGBX")))
