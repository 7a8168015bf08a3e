"""The interface of a collection of images: it lists small references and reads one image at a time.

What a listing leaves out is counted, so that nothing is skipped in silence.
"""

from __future__ import annotations

import re
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
"""Extensions of the files of a folder that count as images. A pattern selects whatever it matches."""

_OTHER = "other extensions"
_MOST_KINDS = 1000
_SHOWN_KINDS = 8

# Files that lie beside images on purpose: texts, tables, labels, arrays, and what operating systems and tools leave behind.
_COMPANIONS = frozenset(
    {
        *(".txt", ".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".xml", ".html", ".htm", ".md", ".rst"),
        *(".yaml", ".yml", ".toml", ".ini", ".log", ".db", ".py", ".sh", ".md5", ".sha256"),
        *(".cls", ".id", ".idx", ".index", ".caption", ".captions", ".text", ".npy", ".npz", ".pyd", ".pth"),
    }
)
_COMPANION_NAMES = re.compile(r"(README|LICEN[CS]E|COPYING|CHANGELOG|MANIFEST)|_.*", re.IGNORECASE)


def is_image(path: str) -> bool:
    """Return whether a file of a folder or an archive counts as an image: by its extension, unless it is hidden."""
    pure = PurePosixPath(path)
    return pure.suffix.lower() in EXTENSIONS and not pure.name.startswith(".")


def crosses_folders(pattern: str | None) -> bool:
    """Return whether the regular expression that a shell pattern became can match a file of a subfolder; None matches any file."""
    return pattern is None or "/" in pattern.replace("[^/]", "") or ".*" in pattern


@dataclass
class SkippedFiles:
    """Files that a listing of images skips. A kind of file is its extension in lower case, ``no extension`` or ``hidden``.

    Attributes:
        files: number of files of each kind that may be images all the same.
        companions: number of files of each kind that lie beside images on purpose, such as texts and tables.
        unmatched: number of files of each kind outside the pattern that was given.
        links: number of links to folders, which are not followed, because they may lead back.
        file: the first of `files` by name.
        link: the first of `links` by name.
        descends: whether files of subfolders are looked for at all; otherwise links to folders do not matter.
    """

    files: Counter[str] = field(default_factory=Counter)
    companions: Counter[str] = field(default_factory=Counter)
    unmatched: Counter[str] = field(default_factory=Counter)
    links: int = 0
    file: str = ""
    link: str = ""
    descends: bool = True

    def add(self, path: str) -> None:
        """Count a file that does not count as an image."""
        pure = PurePosixPath(path)
        extension = pure.suffix.lower()
        if pure.name.startswith("."):
            is_companion = extension not in EXTENSIONS
        else:
            is_companion = extension in _COMPANIONS or (not extension and bool(_COMPANION_NAMES.fullmatch(pure.name)))
        if is_companion:
            _count(self.companions, pure)
        else:
            _count(self.files, pure)
            self.file = min(self.file or path, path)

    def add_unmatched(self, path: str) -> None:
        """Count a file outside the pattern."""
        _count(self.unmatched, PurePosixPath(path))

    def add_link(self, path: str) -> None:
        """Count a link to a folder."""
        if self.descends:
            self.links += 1
            self.link = min(self.link or path, path)

    @property
    def warning(self) -> str:
        """What a user should look at, as one line; empty if there is nothing."""
        parts = []
        if self.files:
            parts.append(f"{_files(self.files)}, e.g. {self.file!r}")
        if self.links:
            parts.append(f"{self.links:,} linked folder{'s' * (self.links > 1)}, e.g. {self.link!r} (links are not followed)")
        return f"skipped: {'; '.join(parts)}" if parts else ""

    @property
    def remark(self) -> str:
        """What lies beside the images as it should, as one line; empty if there is nothing."""
        return f"beside the images: {_files(self.companions)}" if self.companions else ""

    def no_images(self, location: str) -> InputError:
        """Return the error of a source that holds no images at all."""
        message = f"no images found in {location!r}: check the path"
        if found := self.files + self.companions:
            message += f"; it holds {_files(found)}, and images are known by {', '.join(sorted(EXTENSIONS))}"
        elif self.unmatched:
            message += f"; it holds {_files(self.unmatched)}, none of which matches the pattern"
        else:
            message += "; it holds no files at all"
        if self.links:
            message += f"; {self.links:,} linked folder{'s' * (self.links > 1)}, e.g. {self.link!r}: links are not followed"
        return InputError(message)


def _count(kinds: Counter[str], path: PurePosixPath) -> None:
    # A name that is not UTF-8 could not be printed.
    extension = path.suffix.lower().encode("utf-8", "backslashreplace").decode()
    kind = "hidden" if path.name.startswith(".") else extension or "no extension"
    kinds[kind if kind in kinds or len(kinds) < _MOST_KINDS else _OTHER] += 1


def _files(kinds: Counter[str]) -> str:
    """Return ``5 files (.heic 3, .txt 2)``: the most frequent kinds first, then by name."""
    ordered = sorted(kinds.items(), key=lambda item: (-item[1], item[0]))
    shown = [f"{kind} {count:,}" for kind, count in ordered[:_SHOWN_KINDS]]
    if len(ordered) > _SHOWN_KINDS:
        shown.append(f"{len(ordered) - _SHOWN_KINDS} more kinds")
    total = sum(kinds.values())
    return f"{total:,} file{'s' * (total > 1)} ({', '.join(shown)})"


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
        """Check that every image has an id of its own, given the references sorted by image id.

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
    def has_versions(self) -> bool:
        """Whether listing tells the version of every image; if not, `with_versions` asks for them, a request for each."""
        return True

    def with_versions(self, refs: Sequence[ImageRef]) -> list[ImageRef]:
        """Return the references with the versions of their images, empty where nothing tells; listing may have told them."""
        return list(refs)

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
    def has_row_groups(self) -> bool:
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
