"""A listing that is kept, so that its source is not asked for it again: on disk, and for other machines beside the output."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO, cast

import pyarrow as pa

from pipelines.inputs.images.base import ImageRef, ImageSource
from schemas.fingerprints import sha256_of_file
from schemas.storage.folder import TEMPORARY_MARK, Folder
from schemas.storage.storage_errors import storage_errors

REFS_SCHEMA = pa.schema(
    [("image_id", pa.string()), ("uri", pa.string()), ("bytes", pa.int64()), ("offset", pa.int64()), ("version", pa.string())]
)
"""Columns of references in Arrow."""

_ROWS = 1 << 13
_COPIED_BYTES = 16 << 20
_OPTIONS = pa.ipc.IpcWriteOptions(compression="zstd", use_threads=False)


class KeptRefs:
    """References in a temporary file, compressed: some 20 bytes for an image. The file is deleted with this object.

    Attributes:
        path: the file, for `kept_refs`.
    """

    def __init__(self) -> None:
        with storage_errors(tempfile.gettempdir()):
            self._file = tempfile.NamedTemporaryFile(prefix="imagepivot-listing-", suffix=".arrow")  # noqa: SIM115
        self.path = self._file.name

    def passing(self, refs: Iterable[ImageRef]) -> Iterator[ImageRef]:
        """Yield references, and write them on the way; the file is complete at the end.

        Raises:
            DatasetError: the disk is full.
        """
        refs = iter(refs)
        with storage_errors(self.path), pa.ipc.new_stream(self._file, REFS_SCHEMA, options=_OPTIONS) as writer:
            while some := list(islice(refs, _ROWS)):
                columns = [
                    pa.array(values, field.type) for values, field in zip(zip(*some, strict=True), REFS_SCHEMA, strict=True)
                ]
                writer.write_batch(pa.record_batch(columns, REFS_SCHEMA))
                yield from some
        self._file.flush()

    def share(self, folder: Folder) -> SharedRefs:
        """Copy the file to where other machines find it, under the name of a temporary file of the dataset that is made there.

        The commit of the dataset deletes it, or the next run into the folder.

        Raises:
            DatasetError: the folder cannot be written.
        """
        with Path(self.path).open("rb") as file:
            digest = sha256_of_file(file)
            name = f".listing-{digest[:16]}{TEMPORARY_MARK}0"
            file.seek(0)
            with folder.replace(name) as copy:
                shutil.copyfileobj(file, copy, _COPIED_BYTES)
        return SharedRefs(folder, name, digest)


@dataclass(frozen=True)
class SharedRefs:
    """The place of references that another machine has listed.

    Attributes:
        folder: the folder.
        name: name of the file.
        sha256: its digest.
    """

    folder: Folder
    name: str
    sha256: str

    def refs(self, images: ImageSource) -> Iterator[ImageRef]:
        """Yield the references; where the file is gone or another one, list the images again."""
        with self._fetched() as path:
            yield from images.refs() if path is None else kept_refs(path)

    @contextmanager
    def _fetched(self) -> Iterator[str | None]:
        """Yield a copy on this machine; None where there is none."""
        with tempfile.NamedTemporaryFile(prefix="imagepivot-listing-", suffix=".arrow") as copy:
            with storage_errors(copy.name):
                for start in range(0, self.folder.size(self.name) or 0, _COPIED_BYTES):
                    try:
                        copy.write(self.folder.read_part(self.name, start, _COPIED_BYTES))
                    except FileNotFoundError:
                        break
                copy.flush()
                copy.seek(0)
            yield copy.name if sha256_of_file(cast("BinaryIO", copy)) == self.sha256 else None


def kept_refs(path: str) -> Iterator[ImageRef]:
    """Yield the references in the file of `KeptRefs`, also in another process of this machine."""
    with storage_errors(path), pa.OSFile(path) as file, pa.ipc.open_stream(file) as reader:
        for batch in reader:
            yield from (ImageRef(*fields) for fields in zip(*(column.to_pylist() for column in batch.columns), strict=True))
