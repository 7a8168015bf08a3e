"""Pictures of images and their captions for pages."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
from PIL import Image

import extractors
from pipelines.inputs.images.folders import ImagesInFolder
from pipelines.looking.pages import TextLine, data_address
from schemas.dataset import Dataset
from schemas.errors import DatasetError, InputError
from schemas.keys import normalization_hint

if TYPE_CHECKING:
    from pipelines.inputs.images.base import ImageRef, ImageSource

_SIDE = 320  # Pixels of a thumbnail.
_MAX_LINES = 3


def wanted_refs(images: ImageSource, image_ids: Collection[str]) -> list[ImageRef]:
    """Return the references of some images; images of other ids are left out.

    Raises:
        InputError: none of the ids is among the images, or two images have one.
    """
    refs = sorted(ref for ref in images.refs() if ref.image_id in image_ids)
    images.check_ids(refs)
    if image_ids and not refs:
        found = [ref.image_id for ref in images.refs()]
        hint = normalization_hint(image_ids, found) or f"its ids look like {', '.join(map(repr, sorted(found)[:3]))}"
        raise InputError(f"{images.location!r} has no image of the ids wanted, e.g. {min(image_ids)!r}: {hint}")
    return refs


def readable_pictures(images: ImageSource, refs: Iterable[ImageRef], side: int = _SIDE) -> Iterator[tuple[str, Image.Image]]:
    """Yield ids and pictures of at most ``side`` pixels, except for damaged ones."""
    for ref in refs:
        with suppress(OSError, DatasetError, extractors.DecodeError):
            picture = extractors.decode_image(images.read(ref))
            picture.thumbnail((side, side), Image.Resampling.LANCZOS)
            yield ref.image_id, picture


def jpeg_address(picture: Image.Image) -> str:
    """Return a picture as an address with data."""
    data = io.BytesIO()
    picture.save(data, "JPEG", quality=80)
    return data_address("image/jpeg", data.getvalue())


def file_addresses(images: ImageSource, refs: Iterable[ImageRef]) -> dict[str, str]:
    """Return ``file:`` addresses of the images in a local folder, by image id."""
    if not isinstance(images, ImagesInFolder) or not images.folder.is_local:
        return {}
    folder = images.folder.local_path.absolute()
    return {ref.image_id: (folder / ref.uri).as_uri() for ref in refs}


def caption_lines(captions: Dataset, image_ids: Collection[str]) -> Mapping[str, Sequence[TextLine]]:
    """Return the captions of images as their source has them, in the order of keys."""
    lines: dict[str, list[TextLine]] = defaultdict(list)
    wanted = pa.array(sorted(image_ids), pa.string())
    for table in captions.shards(["image_id", "language", "text"]):
        for row in table.filter(pc.is_in(table["image_id"], wanted)).to_pylist():
            lines[row["image_id"]].append(TextLine(row["text"], row["language"]))
    return lines


def lines_in(lines: Sequence[TextLine], language: str) -> Sequence[TextLine]:
    """Return the first lines in a language, or of any if it has none."""
    return [line for line in lines if line.language == language][:_MAX_LINES] or lines[:_MAX_LINES]
