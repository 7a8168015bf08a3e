"""The interface of a collection of images: it lists small references and reads one image at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import ClassVar, NamedTuple

from pipelines.inputs.images.selection import SkippedFiles
from schemas.errors import InputError


class ImageRef(NamedTuple):
    """A reference to an image.

    Attributes:
        image_id: key of the image.
        uri: address of the image as the source names it, relative to the source if possible.
        bytes: size of the file in bytes; -1 if listing does not tell.
        offset: position in an archive, in the source's own unit; -1 for a file of its own.
        version: modification time of the file (or archive) that holds the image, or its ETag; empty if listing does not tell.
    """

    image_id: str
    uri: str
    bytes: int = -1
    offset: int = -1
    version: str = ""


class ImageSource(ABC):
    """A collection of images: a frozen, picklable value.

    Attributes:
        skipped: what the last complete listing left out; None before there was one, and if nothing can be left out (a table).
    """

    skipped: SkippedFiles | None = None
    _unit: ClassVar[str] = "files"

    @property
    @abstractmethod
    def location(self) -> str:
        """Location of the collection, for messages."""

    def listed_locations(self) -> Sequence[str]:
        """Return where the first images are, for a source that holds only their addresses."""
        return ()

    @abstractmethod
    def refs(self) -> Iterator[ImageRef]:
        """List the images in any order.

        Raises:
            InputError: the source does not exist or is damaged, or a folder or pattern holds no images.
        """

    def check_ids(self, refs: Iterable[ImageRef]) -> None:
        """Check that every image has an id of its own.

        Args:
            refs: references, sorted by image id.

        Raises:
            InputError: two images have one id; the message says what keeps them apart.
        """
        for first, second in pairwise(refs):
            if first.image_id == second.image_id:
                raise InputError(
                    f"image id {first.image_id!r} belongs to two {self._unit}, {first.uri!r} and {second.uri!r}: "
                    f"{self.advice_apart(first, second)}"
                )

    def advice_apart(self, first: ImageRef, second: ImageRef) -> str:
        """Return what keeps two images apart that have one id, as the end of a message."""
        return "remove one, or give each an id of its own"

    @abstractmethod
    def read(self, ref: ImageRef) -> bytes:
        """Return the bytes of one image file.

        Raises:
            OSError: it cannot be read.
            DatasetError: the same, with an OSError as its cause.
        """

    @property
    def tells_versions(self) -> bool:
        """Whether listing tells the version of every image; if not, `versions` asks for them, at the cost of a request each."""
        return True

    def versions(self, refs: Sequence[ImageRef]) -> Sequence[str]:
        """Return the versions of images as they are now; an empty string where nothing tells."""
        return [ref.version for ref in refs]

    def with_versions(self, refs: Sequence[ImageRef]) -> list[ImageRef]:
        """Return the references with the versions of their images, which listing may have told."""
        if self.tells_versions:
            return list(refs)
        return [ref._replace(version=version) for ref, version in zip(refs, self.versions(refs), strict=True)]

    @property
    def parallel_reads(self) -> int:
        """Number of reads that should be under way at once because they wait for other machines; 1 if they do not."""
        return 1

    def _note(self, skipped: SkippedFiles) -> None:
        """Note what a complete listing left out: beside the value, because it does not make two sources different."""
        object.__setattr__(self, "skipped", skipped)

    def in_reading_order(self, refs: Sequence[ImageRef]) -> Sequence[ImageRef]:
        """Return images in the order in which reading them is cheapest; the same list if any order will do."""
        return refs

    @property
    def reads_groups(self) -> bool:
        """Whether an image costs all those in a group with it, so that workers should read the group once for all of them."""
        return False

    def groups(self, refs: Iterable[ImageRef]) -> Iterator[list[ImageRef]]:
        """Cut images, in the order in which they are listed, into the groups in which they lie."""
        return ([ref] for ref in refs)

    def read_group(self, refs: Sequence[ImageRef]) -> Iterator[bytes | None]:
        """Yield the bytes of some images of one group, None where there is no image; the group is read once.

        Raises:
            OSError: it cannot be read.
            DatasetError: the same, with an OSError as its cause.
        """
        return map(self.read, refs)
