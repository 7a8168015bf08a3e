"""Interface of image collections, which list references and read images."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import PurePosixPath
from typing import ClassVar, NamedTuple

from schemas.errors import InputError

EXTENSIONS = frozenset(
    {
        *(".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".png", ".apng", ".webp", ".gif", ".bmp", ".tif", ".tiff"),
        *(".avif", ".heic", ".heif", ".hif", ".jp2", ".j2k", ".j2c", ".jpc", ".jpf", ".jpx"),
        *(".ppm", ".pgm", ".pbm", ".pnm", ".tga", ".ico"),
    }
)
"""Extensions of images. A pattern selects files of any extension."""

_MAX_KINDS = 1000
_SHOWN_KINDS = 8


def is_image(path: str) -> bool:
    """Return whether a file has the extension of an image and is not hidden."""
    pure = PurePosixPath(path)
    return pure.suffix.lower() in EXTENSIONS and not pure.name.startswith(".")


def crosses_folders(pattern: str | None) -> bool:
    """Return whether the regex of a shell pattern can match files in subfolders."""
    return pattern is None or "/" in pattern.replace("[^/]", "") or ".*" in pattern


@dataclass
class SkippedFiles:
    """Files that a listing of images skips, by kind, e.g. ``.txt`` or ``hidden``.

    Attributes:
        files: number of files of each kind (extension, ``no extension`` or ``hidden``), except for the following.
        unmatched: number of files of each kind outside the pattern.
        links: number of links to folders, which are not followed, because they may be cyclic.
        file: the first of `files` by name.
        link: the first of `links` by name.
        descends: whether the listing includes subfolders; otherwise links to folders do not count.
    """

    files: Counter[str] = field(default_factory=Counter)
    unmatched: Counter[str] = field(default_factory=Counter)
    links: int = 0
    file: str = ""
    link: str = ""
    descends: bool = True

    def add(self, path: str) -> None:
        """Count a file that is not an image."""
        _count_kind(self.files, PurePosixPath(path))
        self.file = min(self.file or path, path)

    def add_unmatched(self, path: str) -> None:
        """Count a file outside the pattern."""
        _count_kind(self.unmatched, PurePosixPath(path))

    def add_link(self, path: str) -> None:
        """Count a link to a folder."""
        if self.descends:
            self.links += 1
            self.link = min(self.link or path, path)

    @property
    def warning(self) -> str:
        """Warning about skipped files and links, as one line; empty without any."""
        parts = []
        if self.files:
            parts.append(f"{_files(self.files)}, e.g. {self.file!r}")
        if self.links:
            parts.append(f"{self._links} (links are not followed)")
        return f"skipped: {'; '.join(parts)}" if parts else ""

    @property
    def _links(self) -> str:
        return f"{self.links:,} linked folder{'s' * (self.links > 1)}, e.g. {self.link!r}"

    def no_images(self, location: str) -> InputError:
        """Return the error for a source without images."""
        message = f"no images found in {location!r}: check the path"
        if self.files:
            message += f"; it holds {_files(self.files)}, and images are known by {', '.join(sorted(EXTENSIONS))}"
        elif self.unmatched:
            message += f"; it holds {_files(self.unmatched)}, none of which matches the pattern"
        else:
            message += "; it holds no files at all"
        if self.links:
            message += f"; {self._links}: links are not followed"
        return InputError(message)


def _count_kind(kinds: Counter[str], path: PurePosixPath) -> None:
    # A name that is not UTF-8 could not be printed.
    extension = path.suffix.lower().encode("utf-8", "backslashreplace").decode()
    kind = "hidden" if path.name.startswith(".") else extension or "no extension"
    kinds[kind if kind in kinds or len(kinds) < _MAX_KINDS else "other extensions"] += 1


def _files(kinds: Counter[str]) -> str:
    """Return e.g. ``5 files (.heic 3, .txt 2)``, the most frequent kinds first."""
    ordered = sorted(kinds.items(), key=lambda item: (-item[1], item[0]))
    shown = [f"{kind} {count:,}" for kind, count in ordered[:_SHOWN_KINDS]]
    if len(ordered) > _SHOWN_KINDS:
        shown.append(f"{len(ordered) - _SHOWN_KINDS} more kinds")
    total = sum(kinds.values())
    return f"{total:,} file{'s' * (total > 1)} ({', '.join(shown)})"


class ImageRef(NamedTuple):
    """A reference to an image.

    Attributes:
        uri: address of the image in the source, relative to the source if possible.
        bytes: size of the file in bytes; -1 if unknown.
        offset: position in an archive, in a unit of the source; -1 for a separate file.
        version: modification time of the file or archive, or its ETag; empty if unknown.
    """

    image_id: str
    uri: str
    bytes: int = -1
    offset: int = -1
    version: str = ""


class ImageSource(ABC):
    """A collection of images: a frozen, picklable value.

    Attributes:
        skipped: files that the last complete listing skipped; None before a listing, and for a table.

    Examples:
        >>> images = imagepivot.open_images("photos")
        >>> sorted(ref.image_id for ref in images.refs())[0]
        'img-00'
    """

    skipped: SkippedFiles | None = None
    _unit: ClassVar[str] = "files"

    @property
    @abstractmethod
    def location(self) -> str:
        """Location of the collection, for messages."""

    def listed_locations(self) -> Sequence[str]:
        """Return the locations of the first images, for a source of addresses."""
        return ()

    @abstractmethod
    def refs(self) -> Iterator[ImageRef]:
        """List the images in any order.

        Raises:
            InputError: the source does not exist or is damaged, or a folder or pattern holds no images.
        """

    def check_ids(self, refs: Iterable[ImageRef]) -> None:
        """Check that the image ids of references, sorted by them, are unique.

        Raises:
            InputError: two images have the same id.
        """
        for first, second in pairwise(refs):
            if first.image_id == second.image_id:
                raise InputError(
                    f"image id {first.image_id!r} belongs to two {self._unit}, {first.uri!r} and "
                    f"{second.uri!r}: {self.advice_apart(first, second)}"
                )

    def advice_apart(self, first: ImageRef, second: ImageRef) -> str:
        """Return the advice for two images of the same id, as the end of a message."""
        return "remove one, or give each an id of its own"

    @abstractmethod
    def read(self, ref: ImageRef) -> bytes:
        """Return the bytes of one image file.

        Raises:
            OSError, DatasetError: it cannot be read; a DatasetError has an OSError as its cause.
        """

    @property
    def has_versions(self) -> bool:
        """Whether references have versions, without a request for each image."""
        return True

    def with_versions(self, refs: Sequence[ImageRef]) -> list[ImageRef]:
        """Return the references with versions; empty if unknown."""
        return list(refs)

    @property
    def parallel_reads(self) -> int:
        """Number of simultaneous reads: more than 1 if reads wait for other machines."""
        return 1

    def in_reading_order(self, refs: Sequence[ImageRef]) -> Sequence[ImageRef]:
        """Return images in the cheapest order; the list itself if any order is."""
        return refs
