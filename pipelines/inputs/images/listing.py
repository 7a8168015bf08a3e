"""A list of images without the list: counts and digests."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

from pipelines.inputs.images.base import ImageRef
from pipelines.inputs.images.kept import KeptRefs
from schemas.fingerprints import sum_digests
from schemas.keys import shard_of


@dataclass(frozen=True)
class Listing:
    """The counts and digests of a list of images, in place of the list.

    The digest of a list is the sum of the SHA-256 of each of its entries, modulo 2**256: it does not depend on the order, and the
    sum of the shards' digests is the digest of the whole.

    Attributes:
        counts: number of images of each shard.
        shards: digest of each shard's images by id, uri and size, 64 hexadecimal digits.
        states: the same by id, uri, size and version. It changes with modification times, so it is for comparing on one machine
            and never part of a dataset.
        kept: the list itself, in a file of this machine; None where listing it again costs little.
    """

    counts: tuple[int, ...]
    shards: tuple[str, ...]
    states: tuple[str, ...]
    kept: KeptRefs | None = field(default=None, compare=False, repr=False)

    @property
    def count(self) -> int:
        """Number of images."""
        return sum(self.counts)

    @classmethod
    def of(cls, refs: Iterable[ImageRef], shards: int) -> Listing:
        """Make the listing in one pass, in memory that does not grow with the number of images."""
        sums, states, counts = [0] * shards, [0] * shards, [0] * shards
        for ref in refs:
            shard = shard_of(ref.image_id, shards) if shards > 1 else 0
            entry = (ref.image_id, ref.uri, str(ref.bytes))
            sums[shard] += _digest(*entry)
            states[shard] += _digest(*entry, ref.version)
            counts[shard] += 1
        return cls(tuple(counts), tuple(map(_hexadecimal, sums)), tuple(map(_hexadecimal, states)))

    def folded(self, shards: int) -> Listing:
        """Return the listing of the same images by another number of shards, which divides the number that it has."""
        own = len(self.counts)
        if shards == own:
            return self
        if own % shards:
            raise ValueError(f"a listing by {own} shards cannot be folded to {shards}")
        return Listing(
            tuple(sum(self.counts[number::shards]) for number in range(shards)),
            tuple(sum_digests(self.shards[number::shards]) for number in range(shards)),
            tuple(sum_digests(self.states[number::shards]) for number in range(shards)),
            self.kept,
        )


def digest_of(entries: Iterable[tuple[str, ...]]) -> str:
    """Return the digest of a list whose entries are tuples of text."""
    return _hexadecimal(sum(_digest(*entry) for entry in entries))


def _digest(*entry: str) -> int:
    return int.from_bytes(hashlib.sha256("\0".join(entry).encode()).digest(), "big")


def _hexadecimal(number: int) -> str:
    return f"{number % (1 << 256):064x}"
