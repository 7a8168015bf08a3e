"""The interface of a collection of images: it lists small references and reads one image at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

__all__ = ["EXTENSIONS", "IdRule", "ImageRef", "ImageSource"]

EXTENSIONS = frozenset({".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff"})
"""Extensions of the files of a folder that count as images. A pattern selects whatever it matches."""

IdRule = Literal["name", "path"]
"""How image ids are made from paths: from the file name or the whole relative path, without extension."""


class ImageRef(NamedTuple):
    """A reference to an image.

    Attributes:
        image_id: key of the image.
        uri: address of the image as the source names it, relative to the source if possible.
        bytes: size of the file in bytes; -1 if listing does not tell.
        offset: position in an archive, in the source's own unit; -1 for a file of its own.
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
        """Location of the collection, for messages."""

    @abstractmethod
    def refs(self) -> Iterator[ImageRef]:
        """List the images in any order.

        Raises:
            InputError: the source does not exist or is damaged.
        """

    @abstractmethod
    def read(self, ref: ImageRef) -> bytes:
        """Return the bytes of one image file.

        Raises:
            OSError: it cannot be read.
            DatasetError: the same, with an OSError as its cause.
        """

    @property
    def parallel_reads(self) -> int:
        """Number of reads that should be under way at once because they wait for other machines; 1 if they do not."""
        return 1

    def in_reading_order(self, refs: Sequence[ImageRef]) -> Sequence[ImageRef]:
        """Return images in the order in which reading them is cheapest; the same list if any order will do."""
        return refs
