"""The ten crops of an image.

Letters in shapes: ``K`` = 10 crops, ``H`` and ``W`` pixels of the image that they are cut from.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

CROPS = 10
CENTERS = ("nearest", "floor")


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

    Raises:
        ValueError: the image is smaller than a crop, or ``center`` is unknown.
    """
    if center not in CENTERS:
        raise ValueError(f"center is {center!r}, expected one of {CENTERS}")
    bottom, right = height - crop, width - crop
    if crop < 1 or bottom < 0 or right < 0:
        raise ValueError(f"the image is {width}×{height}, expected at least {crop}×{crop}, the size of a crop")
    corners = [(0, 0), (0, right), (bottom, 0), (bottom, right)]
    if center == "floor":
        middle = mirrored_middle = (bottom // 2, right // 2)
    else:
        middle = (round(bottom / 2), round(right / 2))
        mirrored_middle = (middle[0], right - middle[1])
    upright = [View(*start, mirrored=False) for start in [*corners, middle]]
    return (*upright, *(View(*start, mirrored=True) for start in [*corners, mirrored_middle]))


def ten_crop(pixels: Tensor, *, crop: int, center: str) -> Tensor:
    """Cut the ten crops out of an image, on the device that holds it.

    Args:
        pixels: ``[3, H, W]``, of any type.
        crop: width and height of a crop in pixels.
        center: as `ten_crop_views` takes it.

    Returns:
        ``[K, 3, crop, crop]`` in the order of `ten_crop_views`, of the type of ``pixels``.
    """
    views = ten_crop_views(pixels.shape[1], pixels.shape[2], crop=crop, center=center)
    cuts = [pixels[:, view.top : view.top + crop, view.left : view.left + crop] for view in views]
    return torch.stack([cut.flip(2) if view.mirrored else cut for cut, view in zip(cuts, views, strict=True)])
