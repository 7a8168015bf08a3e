"""Number of shards of a dataset: requested, from a dataset, or chosen by size.

The chosen count depends on the data alone, never on the machine. Of two counts one divides the other, since they are powers of
two: datasets of the same images can then be joined by groups of whole shards.
"""

from collections import Counter

from schemas.errors import UsageError
from schemas.keys import AUTO, LIKE, SHARD_NAME, ShardsRequest
from schemas.kinds import belongs_to_images
from schemas.manifest import Manifest
from schemas.storage.folder import Folder

VECTOR_SHARD_BYTES = 512 << 20
"""Maximum vector bytes per shard when the shard count is chosen: the work lost by a kill, and the memory of readers."""

TEXT_SHARD_BYTES = 64 << 20
"""Maximum bytes of raw captions per shard when the shard count is chosen: about a million captions. Features are far larger, so
that small shards of captions bring the counts of both datasets closer together."""

_MIN_CHOSEN = 16  # Enough for the cores of one machine.

MAX_CHOSEN = 8192
"""Reached at 4 TiB of vectors; shards of larger datasets are larger."""

_MAX_BYTES = 4 << 30  # Size of a shard, for any count: readers of whole shards hold one in memory.


def known_shards(shards: ShardsRequest, folder: Folder, *, overwrite: bool) -> int | None:
    """Return the number of shards; None if `choose_shards` has to choose it.

    ``auto`` keeps the count of shards in the folder unless they will be replaced, so that runs can be continued and updated.

    Raises:
        UsageError: the dataset after ``like:`` has no images.
        DatasetError: the dataset after ``like:`` does not exist.
    """
    if isinstance(shards, int):
        return shards
    if shards == AUTO:
        return None if overwrite else _stored_shards(folder)
    location = shards.removeprefix(LIKE)
    manifest = Manifest.read(Folder(location))
    if not belongs_to_images(manifest.kind):
        raise UsageError(
            f"{location!r} holds {manifest.kind}, which has no images: name captions, features or the like after '{LIKE}'"
        )
    return len(manifest.shards)


def choose_shards(size: int, shard_bytes: int) -> int:
    """Return the smallest power of two from 16 to 8,192 that fits ``shard_bytes``."""
    shards = _MIN_CHOSEN
    while shards < MAX_CHOSEN and size > shards * shard_bytes:
        shards *= 2
    return shards


def check_shard_bytes(shards: int, size: int, folder: Folder | None) -> None:
    """Check the size of the shards, unless the folder already has this number.

    Raises:
        UsageError: a shard would have more than 4 GiB.
    """
    if size > shards * _MAX_BYTES and (folder is None or _stored_shards(folder) != shards):
        raise UsageError(
            f"{_gib(size)} GiB in {shards:,} shards make {_gib(size / shards)} GiB each, expected at most {_gib(_MAX_BYTES)}, "
            f"because readers hold a shard in memory: give --shards {-(-size // _MAX_BYTES)} or more, or {AUTO}"
        )


def _stored_shards(folder: Folder) -> int | None:
    """Return the number of shards of the dataset in a folder; None without shards."""
    counts = Counter(int(match[1]) for name in folder.names() if (match := SHARD_NAME.fullmatch(name)))
    return max(counts, key=lambda shards: (counts[shards], shards), default=None)


def _gib(size: float) -> str:
    return f"{size / 2**30:,.1f}".removesuffix(".0")
