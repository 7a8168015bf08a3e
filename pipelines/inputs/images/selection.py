"""Which files count as images, and what is left out: counted, so that nothing is skipped in silence."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from schemas.errors import InputError

EXTENSIONS = frozenset(
    {
        *(".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".png", ".apng", ".webp", ".gif", ".bmp", ".tif", ".tiff"),
        *(".avif", ".heic", ".heif", ".hif", ".jp2", ".j2k", ".j2c", ".jpc", ".jpf", ".jpx"),
        *(".ppm", ".pgm", ".pbm", ".pnm", ".tga", ".ico"),
    }
)
"""Extensions of the files of a folder that count as images. A pattern selects whatever it matches."""

HIDDEN = "hidden"
"""Kind of files whose name begins with a dot."""

NO_EXTENSION = "no extension"
"""Kind of files without an extension."""

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
    """Files that a listing of images skips. A kind of file is its extension in lower case, `NO_EXTENSION` or `HIDDEN`.

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
        """Return the error of a source that holds no images at all.

        Args:
            location: the source.
        """
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
    kind = HIDDEN if path.name.startswith(".") else extension or NO_EXTENSION
    kinds[kind if kind in kinds or len(kinds) < _MOST_KINDS else _OTHER] += 1


def _files(kinds: Counter[str]) -> str:
    """Return ``5 files (.heic 3, .txt 2)``: the most frequent kinds first, then by name."""
    ordered = sorted(kinds.items(), key=lambda item: (-item[1], item[0]))
    shown = [f"{kind} {count:,}" for kind, count in ordered[:_SHOWN_KINDS]]
    if len(ordered) > _SHOWN_KINDS:
        shown.append(f"{len(ordered) - _SHOWN_KINDS} more kinds")
    total = sum(kinds.values())
    return f"{total:,} file{'s' * (total > 1)} ({', '.join(shown)})"
