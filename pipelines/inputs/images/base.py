"""What a collection of images is: small references that are listed, and a way to open one image at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

__all__ = ["EXTENSIONS", "IdRule", "ImageRef", "ImageSource"]

EXTENSIONS = frozenset({".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff"})
"""Files of a folder that are taken for images. A pattern takes whatever it matches."""

IdRule = Literal["name", "path"]
"""How image ids are made of paths: of the file name, or of the whole relative path; without extension."""


class ImageRef(NamedTuple):
    """An image that is to be read.

    Attributes:
        image_id: its key.
        uri: where it is, as the source names it: relative to the source where that is possible.
        bytes: size of the file, -1 where listing does not tell.
        offset: where it begins in an archive, as the source counts; -1 for a file of its own.
    """

    image_id: str
    uri: str
    bytes: int = -1
    offset: int = -1


class ImageSource(ABC):
    """A collection of images: a frozen, picklable value."""

    @property
    @abstractmethod
    def location(self) -> str:
        """Where the collection is, for people."""

    @abstractmethod
    def refs(self) -> Iterator[ImageRef]:
        """Lists the images, in no order that matters.

        Raises:
            InputError: the source is not there, or is broken.
        """

    @abstractmethod
    def read(self, ref: ImageRef) -> bytes:
        """The bytes of one image file.

        Raises:
            OSError: it cannot be read.
            DatasetError: the same, with an OSError as its cause.
        """

    def in_reading_order(self, refs: Sequence[ImageRef]) -> Sequence[ImageRef]:
        """Images in the order in which they are best read; the very same list where any order will do."""
        return refs
