"""List the images of a job before anything is made: how many there are, in which shards, and that no id occurs twice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from pipelines.inputs.ids import KeyHashes
from pipelines.inputs.images import ImageRef, KeptRefs, Listing, kept_refs
from pipelines.jobs import FeaturesJob
from schemas.errors import InputError
from schemas.storage.folder import Folder
from schemas.storage.locations import is_remote
from schemas.writing.shard_count import MOST_CHOSEN, VECTOR_SHARD_BYTES, check_shard_bytes, choose_shards, known_shards


def list_images(job: FeaturesJob, *, keep: bool = False) -> Listing:
    """List the images of a job once, by the shards that it will have. A listing of a store is kept, so that nobody lists it again.

    Args:
        job: what to make.
        keep: keep any listing, for workers on other machines.

    Raises:
        UsageError: the shards would be too large.
        InputError: the source holds no images, or two with the same id.
    """
    ids = KeyHashes()
    folder = Folder(job.output)
    known = known_shards(job.shards, folder, overwrite=job.policy.overwrite)
    images = job.open_images()
    kept = KeptRefs() if keep or is_remote(images.location) else None
    refs = images.refs() if kept is None else kept.passing(images.refs())
    listing = replace(Listing.of(_remember_ids(refs, ids), known or MOST_CHOSEN), kept=kept)
    if not listing.count:
        raise InputError(f"no images found in {images.location!r}: check the path; a folder is searched for known extensions")
    if suspects := ids.suspects():
        again = images.refs() if kept is None else kept_refs(kept.path)
        images.check_ids(sorted(ref for ref in again if hash(ref.image_id) in suspects))
    size = listing.count * job.feature_bytes()
    shards = known or choose_shards(size, VECTOR_SHARD_BYTES)
    check_shard_bytes(shards, size, folder)
    return listing.folded(shards)


def _remember_ids(refs: Iterable[ImageRef], ids: KeyHashes) -> Iterator[ImageRef]:
    for ref in refs:
        ids.add(ref.image_id)
        yield ref
