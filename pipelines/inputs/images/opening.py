"""Where images come from: a folder, a pattern, one file, a table of image ids and addresses, or archives of images.

A source lists references, which are small, and opens one image at a time. Listing streams; nothing here grows with the number
of images.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from pipelines.inputs.files import InputFolder, kind_of, locate
from pipelines.inputs.images import archives
from pipelines.inputs.images.base import EXTENSIONS, IdRule, ImageRef, ImageSource
from pipelines.inputs.tables import is_table, read_rows
from schemas.errors import InputError, UsageError
from schemas.keys import shard_of
from schemas.storage import Folder, is_remote

__all__ = ["EXTENSIONS", "ImageRef", "ImageSource", "ImageTable", "ImagesInFolder", "Listing", "open_images", "sum_digests"]

_COLUMNS = ("image_id", "uri")


def _check_name(path: str, folder: Folder) -> None:
    try:
        path.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{folder.location!r} holds the file {path!r}, whose name is not UTF-8: rename it, or choose the files with a "
            "pattern or a table"
        ) from error


@dataclass(frozen=True)
class ImagesInFolder(ImageSource):
    """The images below a folder.

    Attributes:
        folder: the folder.
        pattern: regular expression that the path relative to it must match; None takes the known extensions.
        ids: ``name``: the image id is the file name without extension; ``path``: the relative path without extension.
    """

    folder: Folder
    pattern: str | None = None
    ids: IdRule = "name"

    @property
    def location(self) -> str:
        """The folder."""
        return self.folder.location

    def refs(self) -> Iterator[ImageRef]:
        """Walks the folder."""
        matches = re.compile(self.pattern).fullmatch if self.pattern is not None else None
        for path, size in self.folder.files():
            pure = PurePosixPath(path)
            taken = matches(path) if matches else pure.suffix.lower() in EXTENSIONS and not pure.name.startswith(".")
            if taken:
                _check_name(path, self.folder)
                yield ImageRef(pure.stem if self.ids == "name" else str(pure.with_suffix("")), path, size)

    def read(self, ref: ImageRef) -> bytes:
        """The bytes of one file."""
        return self.folder.read(ref.uri)


@dataclass(frozen=True)
class ImageTable(ImageSource):
    """A table (CSV, TSV, JSON lines, Parquet) with the columns ``image_id`` and ``uri``.

    Attributes:
        folder: the folder of the table; relative addresses start here.
        name: its file name.
    """

    folder: Folder
    name: str

    @property
    def location(self) -> str:
        """The table."""
        return self.folder.path_of(self.name)

    def refs(self) -> Iterator[ImageRef]:
        """Reads the table, row by row."""
        for place, row in read_rows(InputFolder(self.folder.location), self.name, columns=_COLUMNS, required=_COLUMNS):
            image_id, uri = row["image_id"], row["uri"]
            if not isinstance(uri, str) or not uri or image_id is None or image_id == "":
                raise InputError(
                    f"{self.folder.path_of(self.name)!r}, {place}: image_id {image_id!r} with uri {uri!r}; expected both"
                )
            yield ImageRef(str(image_id), uri)

    def read(self, ref: ImageRef) -> bytes:
        """The bytes of one file: a remote address, an absolute path, or a path relative to the table."""
        if is_remote(ref.uri):
            parent, _, name = ref.uri.rpartition("/")
            return Folder(parent).read(name)
        if os.path.isabs(ref.uri):  # noqa: PTH117 -- a string, not a path yet
            parent, _, name = ref.uri.rpartition("/")
            return Folder(parent or "/").read(name)
        return self.folder.read(ref.uri)


def open_images(location: str | os.PathLike[str], *, ids: IdRule = "name") -> ImageSource:
    """Opens a collection of images.

    Args:
        location: a folder (searched recursively; for images, or where there are none for tars or Parquet files with image bytes), a
            pattern with ``*``, ``?``, ``[...]`` or ``**`` for images, ``.tar`` or ``.parquet`` files, a table with the columns
            ``image_id`` and ``uri``, a ``.tar``, a ``.parquet`` file with image bytes, or one image file; local, ``gs://`` or
            ``s3://``.
        ids: how image ids are made of paths.

    Raises:
        UsageError: ``ids`` is neither ``name`` nor ``path``.
        InputError: nothing is there, or it is a compressed tar.
    """
    if ids not in ("name", "path"):
        raise UsageError(f"--ids is {ids!r}, expected 'name' or 'path'")
    where = locate(location)
    kind = kind_of(where)
    if kind == "folder":
        return _open_folder(Folder(where), ids)
    if kind == "file":
        parent, _, name = where.rpartition("/")
        return _open_file(Folder(parent or "/"), name, ids)
    if re.search(r"[*?\[]", where):
        root, pattern = _split_pattern(where)
        archive = archives.archive_kind(where)
        if archive is not None:
            return archives.open_archives(Folder(root), archive, pattern=pattern, ids=ids)
        return ImagesInFolder(Folder(root), pattern=pattern, ids=ids)
    raise InputError(f"the images {where!r} are not there: check the path")


def _open_folder(folder: Folder, ids: IdRule) -> ImageSource:
    archive = archives.archives_in(folder)
    return ImagesInFolder(folder, ids=ids) if archive is None else archives.open_archives(folder, archive, ids=ids)


def _open_file(folder: Folder, name: str, ids: IdRule) -> ImageSource:
    archive = archives.archive_kind(name)
    if archive == "tar" or (archive == "parquet" and archives.holds_image_bytes(folder, name)):
        return archives.open_archives(folder, archive, pattern=re.escape(name), ids=ids)
    if is_table(name):
        return ImageTable(folder, name)
    return ImagesInFolder(folder, pattern=re.escape(name), ids=ids)


def _split_pattern(location: str) -> tuple[str, str]:
    """The folder before the first wildcard, and the rest as a regular expression."""
    parts = location.split("/")
    first = next(number for number, part in enumerate(parts) if re.search(r"[*?\[]", part))
    return "/".join(parts[:first]) or "/", _to_regex("/".join(parts[first:]))


def _to_regex(pattern: str) -> str:
    """A shell pattern as a regular expression: ``*`` and ``?`` stop at ``/``, ``**/`` crosses any number of folders."""
    tokens = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    result = ""
    for piece in re.findall(r"\*\*/|\*\*|\*|\?|\[!?[^\]]+\]|.", pattern):
        if piece.startswith("[") and len(piece) > 1:
            result += "[" + piece[1:-1].replace("\\", r"\\").replace("!", "^", 1 if piece[1] == "!" else 0) + "]"
        else:
            result += tokens.get(piece, re.escape(piece))
    return result


@dataclass(frozen=True)
class Listing:
    """What a list of images is, without holding it.

    The digest of a list is the sum of the SHA-256 of each image's id, uri and size, modulo 2**256: it does not depend on the
    order, and the sum of the shards' digests is that of the whole. A file that changes without changing its size goes unnoticed.

    Attributes:
        counts: number of images of each shard.
        shards: digest of the images of each shard, 64 hexadecimal digits.
    """

    counts: tuple[int, ...]
    shards: tuple[str, ...]

    @property
    def count(self) -> int:
        """Number of images."""
        return sum(self.counts)

    @classmethod
    def of(cls, refs: Iterable[ImageRef], shards: int) -> Listing:
        """Lists images once; takes no more memory for more of them."""
        sums, counts = [0] * shards, [0] * shards
        for ref in refs:
            entry = "\0".join((ref.image_id, ref.uri, str(ref.bytes))).encode()
            shard = shard_of(ref.image_id, shards)
            sums[shard] += int.from_bytes(hashlib.sha256(entry).digest(), "big")
            counts[shard] += 1
        return cls(tuple(counts), tuple(_hexadecimal(each) for each in sums))


def sum_digests(digests: Iterable[str]) -> str:
    """The digest of several lists together."""
    return _hexadecimal(sum(int(digest, 16) for digest in digests))


def _hexadecimal(number: int) -> str:
    return f"{number % (1 << 256):064x}"
