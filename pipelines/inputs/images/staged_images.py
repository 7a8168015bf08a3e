"""Staging of images from row groups into files with random access.

An image costs its whole row group, and nearly every group has images of nearly every shard. The workers therefore share the groups
first: one worker reads a group once and writes its images to files of 64 MiB, which all workers then read by byte ranges.

The files are temporary files of the output dataset: its commit deletes them, or the next run into its folder.
"""

import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

import pyarrow as pa

from pipelines.inputs.images.archives import ImagesInParquet, no_image
from pipelines.inputs.images.base import ImageRef
from pipelines.inputs.web import PARALLEL_READS
from schemas.errors import DatasetError
from schemas.storage.folder import TEMPORARY_MARK, Folder

STAGED_SCHEMA = pa.schema([("uri", pa.string()), ("name", pa.string()), ("offset", pa.int64()), ("bytes", pa.int64())])
"""Columns of staged images in Arrow."""

_FILE_BYTES = 64 << 20


class StagedImage(NamedTuple):
    """Byte range of a staged image; ``bytes`` is -1 for a null."""

    uri: str
    name: str
    offset: int
    bytes: int


@dataclass(frozen=True)
class StagingArea:
    """A shared folder for the staged images of one run.

    Attributes:
        folder: folder that all workers see.
        run: random name of the run, in file names.
        reserved_bytes: free bytes of a local disk that staging must leave.
    """

    folder: Folder
    run: str
    reserved_bytes: int = 0

    @classmethod
    def of_run(cls, folder: Folder) -> Self:
        """Return the area of a new run, with half of the free space of a local disk."""
        reserved_bytes = 0
        if folder.is_local:
            path = folder.local_path
            reserved_bytes = shutil.disk_usage(next(parent for parent in (path, *path.parents) if parent.exists())).free // 2
        return cls(folder, uuid.uuid4().hex[:16], reserved_bytes)

    def write(self, images: ImagesInParquet, refs: Iterable[ImageRef]) -> Iterator[StagedImage]:
        """Stage images, given in the order of the listing.

        Unreadable images, and all after the disk is full, are skipped.

        Raises:
            DatasetError: the folder cannot be written.
        """
        name, data, staged = self._name(), bytearray(), list[StagedImage]()
        for group in images.groups(refs):
            with suppress(OSError, DatasetError):  # The shard writers report each image.
                for ref, value in zip(group, images.read_group(group), strict=True):
                    staged.append(StagedImage(ref.uri, name, len(data), -1 if value is None else len(value)))
                    data += value or b""
            if len(data) >= _FILE_BYTES:
                if not self._write(name, data):
                    return
                yield from staged
                name, data, staged = self._name(), bytearray(), []
        if staged and self._write(name, data):
            yield from staged

    def delete(self) -> None:
        """Delete the staged images of this run."""
        names = [name for name in self.folder.names() if name.startswith(f".images-{self.run}-")]
        self.folder.map(self.folder.delete, names)

    def _name(self) -> str:
        return f".images-{self.run}-{uuid.uuid4().hex}{TEMPORARY_MARK}0"

    def _write(self, name: str, data: bytearray) -> bool:
        """Write a file if the disk has room, without fsync, as a crash discards it."""
        with self.folder.temporary(name) as file:
            if self.reserved_bytes and shutil.disk_usage(self.folder.local_path).free - len(data) < self.reserved_bytes:
                return False
            file.write(data)
            file.flush()
            self.folder.put(name, Path(file.name))
        return True


@dataclass(frozen=True, kw_only=True)
class StagedImages(ImagesInParquet):
    """Parquet files with staged images, by URI, in a folder."""

    staging: Folder
    staged: Mapping[str, StagedImage]

    def read(self, ref: ImageRef) -> bytes:
        """Return the staged bytes of an image, or read its row group if they are missing."""
        staged = self.staged.get(ref.uri)
        if staged is not None and staged.bytes < 0:
            raise no_image()
        if staged is not None:
            with suppress(OSError, DatasetError):
                data = self.staging.read(staged.name, staged.offset, staged.bytes)
                if len(data) == staged.bytes:
                    return data
        return super().read(ref)

    @property
    def parallel_reads(self) -> int:
        """Many if the staged images are in a store."""
        return 1 if self.staging.is_local else PARALLEL_READS

    def in_reading_order(self, refs: Sequence[ImageRef]) -> Sequence[ImageRef]:
        """Return the list itself if all images are staged."""
        return refs if all(ref.uri in self.staged for ref in refs) else super().in_reading_order(refs)
