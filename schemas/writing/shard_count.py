"""The number of shards of a dataset: as given, as its folder or another dataset has it, or chosen by the size of the work.

A number that is chosen depends on the work alone, never on the machine, and is a power of two: of two such numbers the smaller
one divides the greater one, so that datasets of the same images join by groups of whole shards even where the numbers differ.
"""

from __future__ import annotations

from collections import Counter

from schemas.errors import UsageError
from schemas.keys import AUTO, LIKE, SHARD_NAME, ShardsRequest
from schemas.kinds import belongs_to_images
from schemas.manifest import Manifest
from schemas.storage.folder import Folder

VECTOR_SHARD_BYTES = 512 << 20
"""Most bytes of vectors in a shard of a number that is chosen: the work that is lost if a run is killed, and what a reader of whole
shards holds. Half a million vectors of 2048 numbers fill 16 shards to half; 31,000 images with 36 regions each make 32 shards."""

TEXT_SHARD_BYTES = 64 << 20
"""Most bytes of raw captions: about a million of them, which take a core some minutes. The features of their images take far more
room, so that smaller shards of captions come closer to the number that features have."""

_LEAST_CHOSEN = 16
"""Few enough for a small dataset, and enough for the cores of one machine."""

MOST_CHOSEN = 8192
"""Beyond it shards grow: 4 TiB of vectors have this number."""

_MOST_BYTES = 4 << 30
"""Most bytes of a shard of any number: readers of whole shards hold one in memory."""


def known_shards(shards: ShardsRequest, folder: Folder, *, overwrite: bool) -> int | None:
    """Return the number of shards where it does not depend on the size of the work.

    Args:
        shards: what is asked for.
        folder: where the dataset goes. What is there, complete or not, decides for ``auto``: a run that goes on, and one that
            updates, keep the number.
        overwrite: whether what is there will be replaced.

    Returns:
        The number; None where `choose_shards` has to choose it.

    Raises:
        UsageError: the dataset that is to be followed has no images.
        DatasetError: there is no such dataset.
    """
    if isinstance(shards, int):
        return shards
    if shards != AUTO:
        return _shards_like(shards.removeprefix(LIKE))
    return None if overwrite else _stored_shards(folder)


def choose_shards(size: int, shard_bytes: int) -> int:
    """Return the least power of two, from 16 to 8,192, with which a shard of a dataset of this size has at most ``shard_bytes``."""
    shards = _LEAST_CHOSEN
    while shards < MOST_CHOSEN and size > shards * shard_bytes:
        shards *= 2
    return shards


def check_shard_bytes(shards: int, size: int, folder: Folder | None) -> None:
    """Refuse a number of shards that makes them too large for a dataset of this size, unless the folder has that number already.

    Raises:
        UsageError: a shard would have more than 4 GiB.
    """
    if size > shards * _MOST_BYTES and (folder is None or _stored_shards(folder) != shards):
        raise UsageError(
            f"{_gib(size)} GiB in {shards:,} shards make {_gib(size / shards)} GiB each, expected at most {_gib(_MOST_BYTES)}, "
            f"because readers hold a shard in memory: give --shards {-(-size // _MOST_BYTES)} or more, or {AUTO}"
        )


def _shards_like(location: str) -> int:
    manifest = Manifest.read(Folder(location))
    if not belongs_to_images(manifest.kind):
        raise UsageError(
            f"{location!r} holds {manifest.kind}, which has no images: name captions, features or the like after '{LIKE}'"
        )
    return len(manifest.shards)


def _stored_shards(folder: Folder) -> int | None:
    """Return the number of shards of the dataset in a folder, whether it is complete or not; None if there is none."""
    numbers = Counter(int(match[1]) for name in folder.names() if (match := SHARD_NAME.fullmatch(name)))
    return max(numbers, key=lambda number: (numbers[number], number), default=None)


def _gib(size: float) -> str:
    return f"{size / 2**30:,.1f}".removesuffix(".0")
