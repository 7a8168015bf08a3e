"""Pictures of images and their captions for pages."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
from PIL import Image

import extractors
from pipelines.inputs.images.folders import ImagesInFolder
from pipelines.looking.pages import Exhibit, Strip, TextLine, data_address
from schemas.dataset import Dataset
from schemas.errors import DatasetError, InputError
from schemas.keys import normalization_hint

if TYPE_CHECKING:
    from pipelines.inputs.images.base import ImageRef, ImageSource

T = TypeVar("T")
_SIDE = 320  # Pixels of a thumbnail.
_MAX_LINES = 3

FoundImage: TypeAlias = tuple[str, float]
"""Id and score of an image."""

ImageAnswer: TypeAlias = tuple[str, str, Sequence[FoundImage], tuple[int, FoundImage] | None]
"""A sentence, its language, the best images, and rank and image that are right, if known."""


@dataclass(frozen=True)
class Photos:
    """Pictures by image id, read on demand; none without a source."""

    source: ImageSource | None = None

    @cached_property
    def refs(self) -> Mapping[str, ImageRef]:
        """References of all images, by id.

        Raises:
            InputError: the source is damaged, or two images have one id.
        """
        refs = sorted(self.source.refs()) if self.source else []
        if self.source:
            self.source.check_ids(refs)
        return {ref.image_id: ref for ref in refs}

    def check_ids(self, image_ids: Collection[str]) -> None:
        """Raise `InputError` if there are images, but none with one of these ids."""
        if self.source and image_ids and self.refs.keys().isdisjoint(image_ids):
            looks = f"its ids look like {', '.join(map(repr, list(self.refs)[:3]))}"
            hint = normalization_hint(image_ids, self.refs) or looks
            raise InputError(f"{self.source.location!r} has no image of the ids wanted, e.g. {min(image_ids)!r}: {hint}")

    def pictures(self, image_ids: Collection[str], side: int = _SIDE) -> Iterator[tuple[str, Image.Image]]:
        """Yield ids and pictures of at most ``side`` pixels, except for damaged ones."""
        if (source := self.source) is None:
            return
        for ref in source.in_reading_order([self.refs[key] for key in dict.fromkeys(image_ids) if key in self.refs]):
            with suppress(OSError, DatasetError, extractors.DecodeError):
                picture = extractors.decode_image(source.read(ref))
                picture.thumbnail((side, side), Image.Resampling.LANCZOS)
                yield ref.image_id, picture

    def addresses(self, image_ids: Collection[str], side: int = _SIDE) -> dict[str, str]:
        """Return pictures as addresses with data, by id, except for damaged ones."""
        return {image_id: jpeg_address(picture) for image_id, picture in self.pictures(image_ids, side)}

    def links(self, image_ids: Collection[str]) -> dict[str, str]:
        """Return ``file:`` addresses of images in a local folder, by id."""
        if not isinstance(self.source, ImagesInFolder) or not self.source.folder.is_local:
            return {}
        folder = self.source.folder.local_path.absolute()
        return {image_id: (folder / self.refs[image_id].uri).as_uri() for image_id in image_ids if image_id in self.refs}


def jpeg_address(picture: Image.Image) -> str:
    """Return a picture as an address with data."""
    data = io.BytesIO()
    picture.save(data, "JPEG", quality=80)
    return data_address("image/jpeg", data.getvalue())


def caption_lines(captions: Dataset, image_ids: Collection[str]) -> Mapping[str, Sequence[TextLine]]:
    """Return the captions of images as their source has them, in the order of keys."""
    lines: dict[str, list[TextLine]] = defaultdict(list)
    for row in caption_rows_of(captions, image_ids):
        lines[row["image_id"]].append(TextLine(row["text"], row["language"]))
    return lines


def caption_rows_of(captions: Dataset, image_ids: Collection[str]) -> Iterator[dict[str, str]]:
    """Yield keys and texts of the captions of images."""
    wanted = pa.array(sorted(image_ids), pa.string())
    for table in captions.shards(["image_id", "language", "portion", "index", "text"]):
        yield from table.filter(pc.is_in(table["image_id"], wanted)).to_pylist()


def lines_in(lines: Sequence[TextLine], language: str) -> Sequence[TextLine]:
    """Return the first lines in a language, or of any if it has none."""
    return [line for line in lines if line.language == language][:_MAX_LINES] or lines[:_MAX_LINES]


def spread(items: Sequence[T], count: int) -> list[T]:
    """Return at most this many items at equal distances.

    >>> spread("abcdef", 3)
    ['a', 'c', 'e']
    """
    return [items[index * len(items) // count] for index in range(count)] if len(items) > count else list(items)


def answer_strips(
    answers: Iterable[ImageAnswer],
    pictures: Mapping[str, str],
    captions: Mapping[str, Sequence[TextLine]],
) -> list[Strip]:
    """Return queries with their images in the order of rank.

    ``pictures`` are addresses by image id; ``captions`` those of the images, shown in the language of the query.
    """
    strips = []
    for query, language, hits, right in answers:
        exhibits, shown = [], [*enumerate(hits, start=1), *([right] if right is not None and right[0] > len(hits) else [])]
        for rank, (image_id, score) in shown:
            lines = lines_in(captions.get(image_id, ()), language)
            mark = "right" if right is not None and image_id == right[1][0] else ""
            exhibits.append(Exhibit(image_id, pictures.get(image_id, ""), f"rank {rank:,}, score {score:.3f}", lines, mark))
        strips.append(Strip(TextLine(query, language), exhibits))
    return strips
