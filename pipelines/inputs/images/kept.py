"""A listing that is kept on disk, so that a store is not asked for it again."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from itertools import islice

import pyarrow as pa

from pipelines.inputs.images.base import ImageRef
from schemas.filesystems import storage_errors

__all__ = ["REFS_SCHEMA", "KeptRefs", "kept_refs"]

REFS_SCHEMA = pa.schema(
    [("image_id", pa.string()), ("uri", pa.string()), ("bytes", pa.int64()), ("offset", pa.int64()), ("version", pa.string())]
)
"""Columns of references in Arrow."""

_ROWS = 1 << 13
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


def kept_refs(path: str) -> Iterator[ImageRef]:
    """Yield the references in the file of `KeptRefs`, also in another process of this machine."""
    with storage_errors(path), pa.OSFile(path) as file, pa.ipc.open_stream(file) as reader:
        for batch in reader:
            yield from (ImageRef(*fields) for fields in zip(*(column.to_pylist() for column in batch.columns), strict=True))
