"""Pictures of a collection, by image id: decoded as the extractors see them."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

import numpy as np
from PIL import Image

import extractors
from pipelines.inputs.images import ImageSource, open_images
from schemas.errors import InputError
from schemas.keys import normalization_hint

_LONGER_SIDE = 640


class Picture(NamedTuple):
    """A picture for a figure.

    Attributes:
        pixels: RGB, uint8 ``[height, width, 3]``, maybe reduced.
        size_wh: width and height before that, in pixels.
    """

    pixels: np.ndarray
    size_wh: tuple[int, int]


def read_pictures(
    images: str | os.PathLike[str] | ImageSource, image_ids: Sequence[str], *, longer_side: int = _LONGER_SIDE
) -> dict[str, Picture]:
    """Read pictures for a figure, by image id.

    Args:
        images: a location, as `open_images` takes it, or what that returns.
        image_ids: the pictures.
        longer_side: larger pictures are reduced to this many pixels on their longer side.

    Raises:
        InputError: the location does not exist, has no image of an id, or one cannot be read.
    """
    pictures = {}
    opened = open_images(images) if isinstance(images, (str, os.PathLike)) else images
    for image_id, picture in decoded_pictures(opened, image_ids).items():
        size_wh = picture.size
        picture.thumbnail((longer_side, longer_side), Image.Resampling.LANCZOS)
        pictures[image_id] = Picture(np.asarray(picture), size_wh)
    return pictures


def decoded_pictures(images: ImageSource, image_ids: Sequence[str]) -> dict[str, Image.Image]:
    """Read pictures from a collection, mode ``RGB``, by image id.

    Raises:
        InputError: the collection has no image of an id, or two, or one cannot be read.
    """
    wanted = set(image_ids)
    refs = sorted(ref for ref in images.refs() if ref.image_id in wanted)
    images.check_ids(refs)
    found = {ref.image_id: ref for ref in refs}
    hint = " (--id-rule path makes ids of whole paths)" if getattr(images, "ids", "") == "name" else ""
    pictures = {}
    for image_id in image_ids:
        if image_id not in found:
            raise InputError(
                f"image {image_id!r} is not among the images in {images.location!r}"
                f"{alike(image_id, (ref.image_id for ref in images.refs()))}{hint}"
            )
        ref = found[image_id]
        try:
            pictures[image_id] = extractors.decode(images.read(ref))
        except extractors.DecodeError as error:
            raise InputError(f"image {ref.uri!r} cannot be decoded: {error}") from error
        except OSError as error:
            raise InputError(f"image {ref.uri!r} cannot be read: {error.strerror or type(error).__name__}") from error
    return pictures


def alike(image_id: str, known: Iterable[str]) -> str:
    """Return the end of a message: the id in another Unicode normalization, similar ids, or examples of ids."""
    ids = sorted(known)
    if hint := normalization_hint([image_id], ids):
        return f": {hint}"
    without_extension = PurePosixPath(image_id).stem
    close = [without_extension] if without_extension in ids else difflib.get_close_matches(image_id, ids, n=3)
    if close:
        return f": did you mean {' or '.join(map(repr, close))}?"
    return f": its ids are such as {', '.join(map(repr, ids[:3]))}" if ids else ": it has no ids at all"
