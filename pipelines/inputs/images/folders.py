"""Images that are files of their own: below a folder, or listed in a table."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from pipelines.inputs.images.base import EXTENSIONS, IdRule, ImageRef, ImageSource
from pipelines.inputs.tables import read_rows
from schemas.errors import InputError
from schemas.storage import Folder, is_remote

__all__ = ["TABLE_COLUMNS", "ImageTable", "ImagesInFolder"]

TABLE_COLUMNS = ("image_id", "uri")
"""Our names of the columns of a table of images; it needs both."""


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
        """List the images by walking the folder."""
        matches = re.compile(self.pattern).fullmatch if self.pattern is not None else None
        for path, size in self.folder.files():
            pure = PurePosixPath(path)
            selected = matches(path) if matches else pure.suffix.lower() in EXTENSIONS and not pure.name.startswith(".")
            if selected:
                _check_name(path, self.folder)
                yield ImageRef(pure.stem if self.ids == "name" else str(pure.with_suffix("")), path, size)

    def read(self, ref: ImageRef) -> bytes:
        """Return the bytes of one file."""
        return self.folder.read(ref.uri)


@dataclass(frozen=True)
class ImageTable(ImageSource):
    """The images in a table (CSV, TSV, JSON lines, Parquet) with the columns ``image_id`` and ``uri``.

    Attributes:
        folder: the folder of the table; relative addresses start here.
        name: file name of the table.
        columns: pairs (our name, the table's name) of columns, where they differ.
    """

    folder: Folder
    name: str
    columns: tuple[tuple[str, str], ...] = ()

    @property
    def location(self) -> str:
        """The table."""
        return self.folder.path_of(self.name)

    def refs(self) -> Iterator[ImageRef]:
        """List the images by reading the table row by row."""
        for place, row in read_rows(
            self.folder, self.name, columns=TABLE_COLUMNS, required=TABLE_COLUMNS, renamed=dict(self.columns)
        ):
            image_id, uri = row["image_id"], row["uri"]
            if not isinstance(uri, str) or not uri or image_id is None or image_id == "":
                raise InputError(f"{self.location!r}, {place}: image_id {image_id!r} with uri {uri!r}; expected both")
            yield ImageRef(str(image_id), uri)

    def read(self, ref: ImageRef) -> bytes:
        """Return the bytes of one file: a remote address, an absolute path, or a path relative to the table."""
        if is_remote(ref.uri):
            parent, _, name = ref.uri.rpartition("/")
            return Folder(parent).read(name)
        if os.path.isabs(ref.uri):  # noqa: PTH117 -- a string, not a path yet
            parent, _, name = ref.uri.rpartition("/")
            return Folder(parent or "/").read(name)
        return self.folder.read(ref.uri)


def _check_name(path: str, folder: Folder) -> None:
    try:
        path.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{folder.location!r} holds the file {path!r}, whose name is not UTF-8: rename it, or choose the files with a "
            "pattern or a table"
        ) from error
