"""Images in separate files: below a folder, or listed in a table."""

import errno
import os
import re
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

from pipelines.inputs.ids import IdRule, id_of_path
from pipelines.inputs.images.base import ImageRef, ImageSource, SkippedFiles, crosses_folders, is_image
from pipelines.inputs.tables import InputTable
from pipelines.inputs.web import PARALLEL_READS, PUBLIC_ACCESS, WebAccess, check_proxy, fetch, web_version
from schemas.errors import DatasetError, InputError, UsageError
from schemas.keys import check_image_id
from schemas.storage.folder import FileInfo, Folder, file_at, object_at
from schemas.storage.locations import check_location, is_remote, is_web_address, plain_location

TABLE_COLUMNS = ("image_id", "uri")
"""Our names of the required columns of a table of images."""
_SCHEMES = ("http", "https", "s3", "gs", "gcs")
_FIRST_ROWS = 1000
_RENAME = "rename it, or choose the files with a pattern or a table"


@dataclass(frozen=True)
class FolderSource(ImageSource):
    """Images in files or archives below a folder.

    Attributes:
        pattern: regular expression for paths relative to the folder; None selects files by their extensions.
    """

    folder: Folder
    pattern: str | None = None
    ids: IdRule = "name"

    @property
    def location(self) -> str:
        """The folder."""
        return self.folder.location

    def refs(self) -> Iterator[ImageRef]:
        """List the images, and count skipped files."""
        skipped, has_images = SkippedFiles(descends=crosses_folders(self.pattern)), False
        for ref in self._list(skipped):
            has_images = True
            yield ref
        if not has_images:
            raise skipped.no_images(self.location)
        object.__setattr__(self, "skipped", skipped)  # Not a field, since sources are compared by value.

    def _entries(self, skipped: SkippedFiles) -> Iterator[FileInfo]:
        """Yield the files of the pattern, or those that hold images."""
        matches = re.compile(self.pattern).fullmatch if self.pattern is not None else None
        for entry in self.folder.list(skipped.add_link):
            if matches(entry.name) if matches else self._holds_images(entry.name):
                yield entry
            elif matches:
                skipped.add_unmatched(entry.name)
            else:
                skipped.add(entry.name)

    @abstractmethod
    def _list(self, skipped: SkippedFiles) -> Iterator[ImageRef]: ...

    @abstractmethod
    def _holds_images(self, path: str) -> bool: ...


@dataclass(frozen=True)
class ImagesInFolder(FolderSource):
    """The images below a folder, as separate files."""

    def _list(self, skipped: SkippedFiles) -> Iterator[ImageRef]:
        for entry in self._entries(skipped):
            path = entry.name
            try:
                path.encode()
            except UnicodeEncodeError as error:
                raise InputError(f"{self.location!r} holds the file {path!r}, and its name is not UTF-8: {_RENAME}") from error
            image_id = id_of_path(path, self.ids)
            check_image_id(image_id, place=f"{self.location!r}, file {path!r}", advice=_RENAME)
            yield ImageRef(image_id, path, entry.size, version=entry.version)

    def _holds_images(self, path: str) -> bool:
        return is_image(path)

    def advice_apart(self, first: ImageRef, second: ImageRef) -> str:
        """Return the advice, with ``--id-rule`` if it separates the paths."""
        if self.ids == "name" and id_of_path(first.uri, "path") != id_of_path(second.uri, "path"):
            return "rename one, choose the files with a pattern or a table, or make ids of whole paths with --id-rule path"
        return "rename one, or choose the files with a pattern or a table"

    @property
    def parallel_reads(self) -> int:
        """Many if the folder is in a store."""
        return 1 if self.folder.is_local else PARALLEL_READS

    def read(self, ref: ImageRef) -> bytes:
        """Return the bytes of one file."""
        return self.folder.read(ref.uri)


@dataclass(frozen=True)
class ImageTable(ImageSource):
    """The images in a table with the columns ``image_id`` and ``uri``.

    An address is a path (absolute, relative to the table, or below ``~``) or a URL with the scheme ``file``,
    ``http``, ``https``, ``s3`` or ``gs``.

    Attributes:
        table: the table; relative addresses start in its folder.
    """

    table: InputTable
    access: WebAccess = PUBLIC_ACCESS

    @property
    def location(self) -> str:
        """The table."""
        return self.table.folder.path_of(self.table.name)

    @property
    def parallel_reads(self) -> int:
        """Many if the first addresses are remote."""
        return 1 if self.has_versions else PARALLEL_READS

    @property
    def has_versions(self) -> bool:
        """False if the first addresses are remote, where each costs a request."""
        return self.table.folder.is_local and not any(map(is_remote, _first_addresses(self.table)))

    def listed_locations(self) -> Sequence[str]:
        """Return the first addresses."""
        return [uri if is_web_address(uri) else self._path_of(uri) for uri in _first_addresses(self.table)]

    def refs(self) -> Iterator[ImageRef]:
        """List the images row by row; local images with size and modification time."""
        has_versions = self.has_versions
        for place, row in self.table.rows():
            image_id, uri = row["image_id"], row["uri"]
            for column, value in (("image_id", image_id), ("uri", uri)):
                if value is None or value == "" or (column == "uri" and not isinstance(value, str)):
                    raise InputError(
                        f"{self.location!r}, {place}: {column!r} is {value!r}, expected an image id and an "
                        "address: fill it in or remove the row"
                    )
            if "://" in uri or not uri.isprintable():
                self._check_address(uri, place)
            size, version = self._status(uri) if has_versions else (-1, "")
            image_id = str(image_id) if type(image_id) is int else image_id
            yield ImageRef(check_image_id(image_id, place=f"{self.location!r}, {place}"), uri, size, version=version)

    def with_versions(self, refs: Sequence[ImageRef]) -> list[ImageRef]:
        """Look up ETags on web servers, else sizes and modification times."""
        if self.has_versions:
            return list(refs)
        with ThreadPoolExecutor(PARALLEL_READS, thread_name_prefix="versions") as pool:
            return [ref._replace(version=version) for ref, version in zip(refs, pool.map(self._version, refs), strict=True)]

    def _version(self, ref: ImageRef) -> str:
        if is_web_address(ref.uri):
            return web_version(ref.uri, self.access)
        size, version = self._status(ref.uri)
        return f"{version} {size}" if version else ""

    def _path_of(self, uri: str) -> str:
        """Return the full path or address of an image that is not on a web server."""
        path = plain_location(uri)
        return path if is_remote(path) or os.path.isabs(path) else self.table.folder.path_of(path)  # noqa: PTH117

    def _find(self, uri: str) -> tuple[Folder, str]:
        """Return folder and name of an image that is not on a web server."""
        path = plain_location(uri)
        if is_remote(path):
            return object_at(path)
        return file_at(path) if os.path.isabs(path) else (self.table.folder, path)  # noqa: PTH117

    def _status(self, uri: str) -> tuple[int, str]:
        """Return size and version of a file; -1 and empty if unknown."""
        try:
            folder, name = self._find(uri)
            entry = folder.stat(name)
        except (DatasetError, UsageError, FileNotFoundError):
            return -1, ""
        return (-1, "") if entry is None else (entry.size, entry.version)

    def read(self, ref: ImageRef) -> bytes:
        """Return the bytes of one file."""
        if is_web_address(ref.uri):
            return fetch(ref.uri, self.access)
        folder, name = self._find(ref.uri)
        try:
            return folder.read(name)
        except FileNotFoundError as error:
            if "\\" not in ref.uri:
                raise
            raise FileNotFoundError(errno.ENOENT, f"{error.strerror}; it has a backslash, expected / between folders") from None

    def _check_address(self, uri: str, place: str) -> None:
        """Check the form of an address."""
        if is_web_address(uri):
            check_proxy(uri, self.access)
        elif is_remote(uri) and uri.partition("://")[0] not in _SCHEMES:
            raise InputError(
                f"{self.location!r}, {place}: uri is {uri!r}, expected a path, file://, or one of "
                f"{', '.join(f'{scheme}://' for scheme in _SCHEMES)}"
            )
        else:
            try:
                check_location(uri)
                check_location(plain_location(uri))
            except UsageError as error:
                raise InputError(f"{self.location!r}, {place}: {error}") from error


@lru_cache(maxsize=64)
def _first_addresses(table: InputTable) -> tuple[str, ...]:
    """Return the addresses in the first rows of a table."""
    return tuple(row["uri"] for _, row in islice(table.rows(), _FIRST_ROWS) if isinstance(row["uri"], str))
