"""A list of images without the list: counts and digests."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from pipelines.inputs.images.base import ImageRef
from schemas.keys import shard_of

__all__ = ["Listing", "sum_digests"]


@dataclass(frozen=True)
class Listing:
    """The counts and digests of a list of images, in place of the list.

    The digest of a list is the sum of the SHA-256 of each image's id, uri and size, modulo 2**256: it does not depend on the
    order, and the sum of the shards' digests is the digest of the whole. A file that changes without changing its size goes
    unnoticed.

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
        """Make the listing in one pass, in memory that does not grow with the number of images."""
        sums, counts = [0] * shards, [0] * shards
        for ref in refs:
            entry = "\0".join((ref.image_id, ref.uri, str(ref.bytes))).encode()
            shard = shard_of(ref.image_id, shards)
            sums[shard] += int.from_bytes(hashlib.sha256(entry).digest(), "big")
            counts[shard] += 1
        return cls(tuple(counts), tuple(_hexadecimal(total) for total in sums))


def sum_digests(digests: Iterable[str]) -> str:
    """Return the digest of several lists together."""
    return _hexadecimal(sum(int(digest, 16) for digest in digests))


def _hexadecimal(number: int) -> str:
    return f"{number % (1 << 256):064x}"
