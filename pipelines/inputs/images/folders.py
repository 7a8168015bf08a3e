"""Images that are files of their own: below a folder, or listed in a table."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import PurePosixPath

from pipelines.inputs.images.base import IdRule, ImageRef, ImageSource
from pipelines.inputs.images.selection import NotTaken, crosses_folders, is_image
from pipelines.inputs.tables import read_rows
from pipelines.inputs.web import PARALLEL_READS, PUBLIC_ACCESS, WebAccess, check_proxy, fetch, is_web_address
from schemas.errors import InputError, UsageError
from schemas.storage import Folder, is_remote, plain_location

__all__ = ["ImageTable", "ImagesInFolder"]

_COLUMNS = ("image_id", "uri")
_SCHEMES = ("http", "https", "s3", "gs", "gcs")
_FIRST_ROWS = 1000


@dataclass(frozen=True)
class ImagesInFolder(ImageSource):
    """The images below a folder.

    Attributes:
        folder: the folder.
        pattern: regular expression for paths relative to the folder; None selects files by their extensions.
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
        """List the images by walking the folder, and count what is not taken."""
        matches = re.compile(self.pattern).fullmatch if self.pattern is not None else None
        left_out, has_images = NotTaken(descends=crosses_folders(self.pattern)), False
        for path, size, version in self.folder.entries(left_out.add_link):
            if matches(path) if matches else is_image(path):
                _check_name(path, self.folder)
                has_images = True
                pure = PurePosixPath(path)
                yield ImageRef(pure.stem if self.ids == "name" else str(pure.with_suffix("")), path, size, version=version)
            elif matches:
                left_out.add_unmatched(path)
            else:
                left_out.add(path)
        if not has_images:
            raise left_out.no_images(self.location)
        self._note(left_out)

    def read(self, ref: ImageRef) -> bytes:
        """Return the bytes of one file."""
        return self.folder.read(ref.uri)


@dataclass(frozen=True)
class ImageTable(ImageSource):
    """The images in a table (CSV, TSV, JSON lines, Parquet) with the columns ``image_id`` and ``uri``.

    An address is a path, absolute, relative to the table or below ``~``; or begins with ``file://``, ``http://``, ``https://``,
    ``s3://`` or ``gs://``.

    Attributes:
        folder: the folder of the table; relative addresses start here.
        name: file name of the table.
        access: what may be fetched from web servers, and how long it may take.
    """

    folder: Folder
    name: str
    access: WebAccess = PUBLIC_ACCESS

    @property
    def location(self) -> str:
        """The table."""
        return self.folder.path_of(self.name)

    @property
    def parallel_reads(self) -> int:
        """Many if the first rows name web servers."""
        return PARALLEL_READS if _names_web_servers(self.folder, self.name) else 1

    def refs(self) -> Iterator[ImageRef]:
        """List the images by reading the table row by row."""
        for place, row in read_rows(self.folder, self.name, columns=_COLUMNS, required=_COLUMNS):
            image_id, uri = row["image_id"], row["uri"]
            if not isinstance(uri, str) or not uri or image_id is None or image_id == "":
                raise InputError(f"{self.location!r}, {place}: image_id {image_id!r} with uri {uri!r}; expected both")
            if "://" in uri:
                self._check_address(uri, place)
            yield ImageRef(str(image_id), uri)

    def read(self, ref: ImageRef) -> bytes:
        """Return the bytes of one file."""
        if is_web_address(ref.uri):
            return fetch(ref.uri, self.access)
        path = plain_location(ref.uri)
        if is_remote(path) or os.path.isabs(path):  # noqa: PTH117 -- a string, not a path yet
            parent, _, name = path.rpartition("/")
            return Folder(parent or "/").read(name)
        return self.folder.read(path)

    def _check_address(self, uri: str, place: str) -> None:
        """Refuse an address that cannot be read whatever is behind it."""
        if is_web_address(uri):
            check_proxy(uri, self.access)
        elif not is_remote(uri):
            try:
                plain_location(uri)
            except UsageError as error:
                raise InputError(f"{self.location!r}, {place}: {error}") from error
        elif uri.partition("://")[0] not in _SCHEMES:
            raise InputError(
                f"{self.location!r}, {place}: cannot read from {uri!r}, expected a path, file://, or one of "
                f"{', '.join(f'{scheme}://' for scheme in _SCHEMES)}"
            )


@lru_cache(maxsize=64)
def _names_web_servers(folder: Folder, name: str) -> bool:
    """Return whether one of the first rows of a table has a web address."""
    rows = islice(read_rows(folder, name, columns=_COLUMNS, required=_COLUMNS), _FIRST_ROWS)
    return any(isinstance(row["uri"], str) and is_web_address(row["uri"]) for _, row in rows)


def _check_name(path: str, folder: Folder) -> None:
    try:
        path.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{folder.location!r} holds the file {path!r}, whose name is not UTF-8: rename it, or choose the files with a "
            "pattern or a table"
        ) from error
