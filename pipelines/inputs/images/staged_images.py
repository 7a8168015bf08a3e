"""Images that lie in groups, such as the row groups of Parquet, copied to where each of them can be read alone.

An image costs its whole group, and a hash deals out the images to shards, so that nearly every group has images of nearly every
shard. The workers therefore share the groups first: each group is read by one of them, and its images go to files of some dozen
MB, in their order. Then any worker reads the images of its shard by their places, as from a tar.

The files are temporary files of the dataset that is made: its commit deletes them, or the next run into its folder. An image whose
copy is missing is read from the source.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from pipelines.inputs.images.base import ImageRef, ImageSource
from pipelines.inputs.images.row_groups import no_image
from pipelines.inputs.web import PARALLEL_READS
from schemas.errors import DatasetError
from schemas.storage.folder import TEMPORARY_MARK, Folder

STAGED_SCHEMA = pa.schema([("uri", pa.string()), ("name", pa.string()), ("offset", pa.int64()), ("bytes", pa.int64())])
"""Columns of copies in Arrow."""

_FILE_BYTES = 64 << 20


class StagedImage(NamedTuple):
    """The place of an image's copy, by its address in the source: file, position and size; -1 if there is no image there."""

    uri: str
    name: str
    offset: int
    bytes: int


@dataclass(frozen=True)
class StagingArea:
    """The folder of copies, which all workers see, and the name of the run that they belong to.

    Of the disk of a local folder so many bytes are spared: what would take them is not copied.
    """

    folder: Folder
    run: str
    spared: int = 0

    @classmethod
    def of_run(cls, folder: Folder) -> StagingArea:
        """Return the place of a new run's copies, which take half of the room on a local disk at most."""
        spared = 0
        if folder.is_local:
            path = folder.local_path
            spared = shutil.disk_usage(next(parent for parent in (path, *path.parents) if parent.exists())).free // 2
        return cls(folder, uuid.uuid4().hex[:16], spared)

    def write(self, images: ImageSource, refs: Iterable[ImageRef]) -> Iterator[StagedImage]:
        """Copy images, in the order in which their source lists them; those that cannot be read, or find no room, are left out.

        Raises:
            DatasetError: the folder cannot be written.
        """
        name, data, held = self._name(), bytearray(), list[StagedImage]()
        for group in images.groups(refs):
            with suppress(OSError, DatasetError):  # Whoever makes their shards will say so of each.
                for ref, value in zip(group, images.read_group(group), strict=True):
                    held.append(StagedImage(ref.uri, name, len(data), -1 if value is None else len(value)))
                    data += value or b""
            if len(data) >= _FILE_BYTES:
                if not self._write(name, data):
                    return
                yield from held
                name, data, held = self._name(), bytearray(), []
        if held and self._write(name, data):
            yield from held

    def delete(self) -> None:
        """Delete what is left of this run's copies."""
        names = [name for name in self.folder.names() if name.startswith(f".images-{self.run}-")]
        self.folder.map(self.folder.delete, names)

    def _name(self) -> str:
        return f".images-{self.run}-{uuid.uuid4().hex}{TEMPORARY_MARK}0"

    def _write(self, name: str, data: bytearray) -> bool:
        """Write a file if there is room for it; nothing waits for the disk, because no copy is needed after a crash."""
        with self.folder.temporary(name) as file:
            if self.spared and shutil.disk_usage(self.folder.local_path).free - len(data) < self.spared:
                return False
            file.write(data)
            file.flush()
            self.folder.rename(Path(file.name), name)
        return True


class StagedImages(ImageSource):
    """A source of which images have been copied to a folder: the copies by the images' addresses in the source."""

    def __init__(self, images: ImageSource, folder: Folder, copies: Mapping[str, StagedImage]) -> None:
        self._images = images
        self._folder = folder
        self._copies = copies

    @property
    def location(self) -> str:
        """The source."""
        return self._images.location

    def refs(self) -> Iterator[ImageRef]:
        """List the source."""
        return self._images.refs()

    def check_ids(self, refs: Iterable[ImageRef]) -> None:
        """As the source."""
        self._images.check_ids(refs)

    def read(self, ref: ImageRef) -> bytes:
        """Return the bytes of one image: its copy, or if that is not what was written, from the source."""
        copy = self._copies.get(ref.uri)
        if copy is not None and copy.bytes < 0:
            raise no_image()
        if copy is not None:
            with suppress(OSError, DatasetError):
                data = self._folder.read_part(copy.name, copy.offset, copy.bytes)
                if len(data) == copy.bytes:
                    return data
        return self._images.read(ref)

    def with_versions(self, refs: Sequence[ImageRef]) -> list[ImageRef]:
        """As the source."""
        return self._images.with_versions(refs)

    @property
    def parallel_reads(self) -> int:
        """Many if the copies are in a store."""
        return self._images.parallel_reads if self._folder.is_local else PARALLEL_READS

    def in_reading_order(self, refs: Sequence[ImageRef]) -> Sequence[ImageRef]:
        """Return the same list if there are copies of all."""
        return refs if all(ref.uri in self._copies for ref in refs) else self._images.in_reading_order(refs)
