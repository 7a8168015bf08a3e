"""The pictures of images in figures. They are read by a function that is handed in: `train` opens no collections of images."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from schemas.dataset import Dataset
from schemas.errors import InputError, UsageError

Picture: TypeAlias = tuple[np.ndarray, tuple[int, int]]
"""Pixels, RGB, uint8 ``[height, width, 3]``, maybe reduced; width and height before that."""

ReadPictures: TypeAlias = Callable[[str, Sequence[str]], Mapping[str, Picture]]
"""From a location and image ids to the pictures by id."""


def pictures_of(location: str, image_ids: Collection[str], read: ReadPictures | None) -> Mapping[str, Picture]:
    """Read pictures; none without a location.

    Raises:
        UsageError: there is a location, but nothing that reads it.
        InputError: an image is not there, or cannot be read.
    """
    if not location:
        return {}
    if read is None:
        raise UsageError(
            f"--images is {location!r}, and reading images needs pip install 'imagepivot[pipelines]': install that, or leave "
            "--images out for figures with ids in place of pictures"
        )
    return read(location, sorted(image_ids))


def check_sizes(features: Dataset, pictures: Mapping[str, Picture], image_ids: Collection[str]) -> None:
    """Check that pictures have the sizes of those in which regions were found.

    Raises:
        InputError: one has another size.
    """
    if features.kind != "regions":
        return
    for image_id in sorted(pictures.keys() & set(image_ids)):
        row: dict[str, Any] = features.get(image_id)
        found, expected = pictures[image_id][1], (row["width"], row["height"])
        if all(expected) and found != expected:
            raise InputError(
                f"image {image_id!r} is {found[0]}×{found[1]} pixels, its regions in {features.folder.location!r} are those of a "
                f"picture of {expected[0]}×{expected[1]}: give the images that the dataset was made of"
            )
