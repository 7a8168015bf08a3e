"""List the images of a job before anything is made: how many there are, in which shards, and that no id occurs twice."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np

from pipelines.features.forward import refuse_duplicates
from pipelines.features.job import FeaturesJob
from pipelines.inputs.images import ImageRef, KeptRefs, Listing, kept_refs
from schemas.errors import InputError
from schemas.locations import is_remote
from schemas.sharding import MOST_CHOSEN, VECTOR_SHARD_BYTES, check_shard_bytes, choose_shards, known_shards
from schemas.storage import Folder

__all__ = ["list_images"]


def list_images(job: FeaturesJob, *, keep: bool = False) -> Listing:
    """List the images of a job once, by the shards that it will have. A listing of a store is kept, so that nobody lists it again.

    Args:
        job: what to make.
        keep: keep any listing, for workers on other machines.

    Raises:
        UsageError: the shards would be too large.
        InputError: the source holds no images, or two with the same id.
    """
    ids = array("Q")  # Eight bytes per image: the ids themselves would take ten times as much.
    folder = Folder(job.output)
    known = known_shards(job.shards, folder, overwrite=job.overwrite)
    kept = KeptRefs() if keep or is_remote(job.images.location) else None
    refs = job.images.refs() if kept is None else kept.passing(job.images.refs())
    listing = replace(Listing.of(_remember_ids(refs, ids), known or MOST_CHOSEN), kept=kept)
    if not listing.count:
        raise InputError(
            f"no images found in {job.images.location!r}: check the path; a folder is searched for known extensions"
        )
    _refuse_duplicates(ids, lambda: job.images.refs() if kept is None else kept_refs(kept.path))
    size = listing.count * job.feature_bytes()
    shards = known or choose_shards(size, VECTOR_SHARD_BYTES)
    check_shard_bytes(shards, size, folder)
    return listing.folded(shards)


def _remember_ids(refs: Iterable[ImageRef], ids: array[int]) -> Iterator[ImageRef]:
    for ref in refs:
        ids.append(_short_digest(ref.image_id))
        yield ref


def _short_digest(image_id: str) -> int:
    return int.from_bytes(hashlib.blake2b(image_id.encode(), digest_size=8).digest(), "big")


def _refuse_duplicates(ids: array[int], refs: Callable[[], Iterable[ImageRef]]) -> None:
    """Refuse ids that occur twice, before anything is made; only suspects are looked up."""
    digests = np.sort(np.frombuffer(ids, np.uint64))
    suspects = set(digests[1:][digests[1:] == digests[:-1]].tolist())
    if suspects:
        refuse_duplicates(sorted(ref for ref in refs() if _short_digest(ref.image_id) in suspects))
