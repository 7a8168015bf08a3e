"""Listings of images: counts, digests and cached references."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path

import pyarrow as pa

from pipelines.inputs.images.base import ImageRef, ImageSource
from schemas.errors import InputError
from schemas.escapes import redact_address
from schemas.fingerprints import sha256_of_bytes, sha256_of_json, sum_digests
from schemas.keys import shard_of
from schemas.storage.folder import TEMPORARY_MARK, Folder, file_at
from schemas.storage.storage_errors import storage_errors

REFS_SCHEMA = pa.schema(
    [("image_id", pa.string()), ("uri", pa.string()), ("bytes", pa.int64()), ("offset", pa.int64()), ("version", pa.string())]
)
"""Columns of references in Arrow."""

_ROWS = 1 << 13
# The largest batch of `ref_chunks.chunk_refs`: chunks of a part are no smaller than those of a whole listing.
_PART_REFS = 1 << 20
_SAMPLES = 8
_COPIED_BYTES = 16 << 20
_OPTIONS = pa.ipc.IpcWriteOptions(compression="zstd", use_threads=False)


@dataclass(frozen=True)
class Listing:
    """Counts and digests of a list of images.

    The digest of a list is the sum of the SHA-256 of its entries, modulo 2**256: independent of their order, and additive.

    Attributes:
        counts: number of images of each shard.
        shards: digest of each shard's images by id, uri as stored, and size, 64 hexadecimal digits.
        version_digests: digest of each shard's images by id, uri as stored, size and version. Modification
            times change it, so it is only compared on one machine and never part of a dataset.
        cached: the references in a file of this machine; None if listing again is cheap.
        samples: a few references from all parts of the list.
    """

    counts: tuple[int, ...]
    shards: tuple[str, ...]
    version_digests: tuple[str, ...]
    cached: CachedListing | None = field(default=None, compare=False, repr=False)
    samples: tuple[ImageRef, ...] = field(default=(), compare=False, repr=False)

    @property
    def count(self) -> int:
        """Number of images."""
        return sum(self.counts)

    @classmethod
    def of(cls, refs: Iterable[ImageRef], shards: int) -> Listing:
        """Compute the listing in one pass and constant memory."""
        sums, digests, counts = [0] * shards, [0] * shards, [0] * shards
        samples = deque[ImageRef](maxlen=_SAMPLES)
        for number, ref in enumerate(refs, start=1):
            shard = shard_of(ref.image_id, shards) if shards > 1 else 0
            entry = (ref.image_id, redact_address(ref.uri), str(ref.bytes))
            sums[shard] += _digest(*entry)
            digests[shard] += _digest(*entry, ref.version)
            counts[shard] += 1
            if number.bit_count() == 1:  # Powers of two, since the length is unknown.
                samples.append(ref)
        return cls(tuple(counts), tuple(map(_hexadecimal, sums)), tuple(map(_hexadecimal, digests)), samples=tuple(samples))

    def folded(self, shards: int) -> Listing:
        """Return the listing for a divisor of its number of shards."""
        return Listing(
            tuple(sum(self.counts[shard::shards]) for shard in range(shards)),
            tuple(sum_digests(self.shards[shard::shards]) for shard in range(shards)),
            tuple(sum_digests(self.version_digests[shard::shards]) for shard in range(shards)),
            self.cached,
            self.samples,
        )


def digest_of(entries: Iterable[tuple[str, ...]]) -> str:
    """Return the digest of a list of tuples of text."""
    return _hexadecimal(sum(_digest(*entry) for entry in entries))


def _digest(*entry: str) -> int:
    return int.from_bytes(hashlib.sha256("\0".join(entry).encode()).digest(), "big")


def _hexadecimal(number: int) -> str:
    return f"{number % (1 << 256):064x}"


class CachedListing:
    """References in a temporary file, deleted with this object.

    The file consists of parts, which workers read separately.
    """

    def __init__(self) -> None:
        with storage_errors(tempfile.gettempdir()):
            self._file = tempfile.NamedTemporaryFile(prefix="imagepivot-listing-", suffix=".arrow")  # noqa: SIM115
        self.path = self._file.name
        self._ranges: list[tuple[int, int]] = []

    def tee(self, refs: Iterable[ImageRef]) -> Iterator[ImageRef]:
        """Yield references, and write them to the file.

        Raises:
            DatasetError: the disk is full.
        """
        refs = iter(refs)
        with storage_errors(self.path):
            for first in refs:
                part, start = chain([first], islice(refs, _PART_REFS - 1)), self._file.tell()
                with pa.ipc.new_stream(self._file, REFS_SCHEMA, options=_OPTIONS) as writer:
                    while rows := list(islice(part, _ROWS)):
                        columns = dict(zip(ImageRef._fields, zip(*rows, strict=True), strict=True))
                        writer.write_batch(pa.RecordBatch.from_pydict(columns, REFS_SCHEMA))
                        yield from rows
                self._ranges.append((start, self._file.tell() - start))
        self._file.flush()

    def parts(self) -> tuple[ListingPart, ...]:
        """Return the parts of the file, for workers on this machine."""
        folder, name = file_at(self.path)
        digests = (sha256_of_bytes(folder.read(name, *part)) for part in self._ranges)
        is_whole = len(self._ranges) == 1
        return tuple(
            ListingPart(folder, name, *part, digest, is_whole) for part, digest in zip(self._ranges, digests, strict=True)
        )

    def share(self, folder: Folder) -> tuple[ListingPart, ...]:
        """Copy the file into the output folder, for other machines.

        It has the name of a temporary file: the commit of the dataset deletes it, or the next run into the folder.

        Raises:
            DatasetError: the folder cannot be written.
        """
        parts = self.parts()
        name = f".listing-{sha256_of_json([part.sha256 for part in parts])[:16]}{TEMPORARY_MARK}0"
        with Path(self.path).open("rb") as file, folder.replace(name) as copy:
            shutil.copyfileobj(file, copy, _COPIED_BYTES)
        return tuple(replace(part, folder=folder, name=name) for part in parts)


@dataclass(frozen=True)
class ListingPart:
    """Up to a million references of a listing: a range of a file, and its digest.

    Attributes:
        is_whole: whether the listing has no other part.
    """

    folder: Folder
    name: str
    start: int
    size: int
    sha256: str
    is_whole: bool

    def refs(self, images: ImageSource) -> Iterator[ImageRef]:
        """Yield the references; list images again if the only part is missing or changed.

        Raises:
            InputError: one of several parts is.
        """
        data = b""
        with suppress(FileNotFoundError):
            data = self.folder.read(self.name, self.start, self.size)
        if sha256_of_bytes(data) == self.sha256:
            with pa.ipc.open_stream(data) as reader:
                for batch in reader:
                    columns = (column.to_pylist() for column in batch.columns)
                    yield from (ImageRef(*fields) for fields in zip(*columns, strict=True))
        elif self.is_whole:
            yield from images.refs()
        else:
            raise InputError(
                f"{self.folder.path_of(self.name)!r}, the listing of this run, is missing or changed: another run wrote into the "
                "folder, or its rules delete new files. Run the same command again; finished shards are kept"
            )
