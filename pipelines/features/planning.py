"""Plans of ``imagepivot features``: images by shard, and the dataset."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from math import ceil

from extractors.base import warn_once
from extractors.catalogue import ENTRIES
from pipelines.datasets.region_names import NAMES_FILES, names_files, stored_names
from pipelines.features.ref_chunks import listed_refs
from pipelines.features.shard_worker import count_gpus
from pipelines.inputs.ids import KeyHashes
from pipelines.inputs.images.base import ImageRef
from pipelines.inputs.images.listing import CachedListing, Listing
from pipelines.jobs import FeaturesJob
from pipelines.running.execution import Execution
from schemas.console import events
from schemas.console.events import Remark
from schemas.errors import InputError
from schemas.escapes import counted
from schemas.keys import MAX_SHARDS
from schemas.parameters import FeaturesParameters
from schemas.process.resources import usable_cores
from schemas.storage.folder import Folder
from schemas.storage.locations import is_remote
from schemas.writing.output import OutputDataset
from schemas.writing.shard_count import MAX_CHOSEN, VECTOR_SHARD_BYTES, check_shard_bytes, choose_shards, known_shards

_WORKER_SHARDS = 4
_SHARD_SECONDS = 15 * 60


def plan_features(job: FeaturesJob, listing: Listing, on_warning: Remark = warn_once) -> OutputDataset:
    """Return the dataset that a job writes.

    The fingerprint covers the feature space (extractor, weights, transform, precision) and the shard count. It excludes images:
    a dataset grows, and trained models meet features of other images. Digests in shard footers identify the images. It also
    excludes names of classes and attributes, which a later run keeps unless its job has others.

    ``on_warning`` receives a sentence about a file with several sets of weights.
    """
    description = job.extractor.describe()
    if description.remark:
        on_warning(description.remark)
    folder = Folder(job.output)
    names = names_files(job.extractor.regions, description)
    if description.kind == "regions" and not job.policy.overwrite:
        names = {**stored_names(folder, description), **names}
    return OutputDataset(
        folder=folder,
        kind=description.kind,
        parameters=FeaturesParameters(
            feature=description.spec,
            extractor=description.parameters,
            extractor_fingerprint=description.fingerprint,
            space=job.space or None,
        ).to_json(),
        shards=len(listing.shards),
        listings=listing.shards,
        # If versions cost a request each, only an update compares them; a resumed run compares addresses.
        version_digests=listing.version_digests if job.open_images().has_versions else None,
        files=names,
        other_files=NAMES_FILES,
        notes=job.notes.to_json(),
        sample_outputs=partial(job.extractor.sample_outputs, job.device),
    )


def list_images(job: FeaturesJob, *, keep: bool = False) -> Listing:
    """List the images of a job by shard.

    A listing of an object store is cached for the workers; with ``keep`` any listing, for remote workers.

    Raises:
        UsageError: shards would be too large.
        InputError: the source has no images, or two with the same id.
    """
    ids = KeyHashes()
    folder = Folder(job.output)
    known = known_shards(job.shards, folder, overwrite=job.policy.overwrite)
    images = job.open_images()
    kept = CachedListing() if keep or is_remote(images.location) else None
    refs = images.refs() if kept is None else kept.tee(images.refs())
    skipped = dict.fromkeys(job.skip, 0)
    listing = replace(Listing.of(_remember_ids(refs, ids, skipped), known or MAX_CHOSEN), cached=kept)
    if not listing.count:
        raise InputError(f"no images found in {images.location!r}: check the path; a folder is searched for known extensions")
    if unknown := [image_id for image_id, count in skipped.items() if not count]:
        events.remark(f"--skip names {counted(len(unknown), 'image')} that {images.location!r} lacks, e.g. {unknown[0]!r}")
    if suspects := ids.suspects():
        images.check_ids(sorted(ref for ref in listed_refs(job, listing) if hash(ref.image_id) in suspects))
    size = listing.count * job.feature_bytes()
    shards = known or choose_shards(size, VECTOR_SHARD_BYTES)
    check_shard_bytes(shards, size, folder)
    return listing.folded(shards)


def shards_remark(job: FeaturesJob, listing: Listing, execution: Execution) -> str:
    """Return a remark on too few shards for several machines; empty without one.

    A stopped worker loses the shard that it writes, and at the end others wait for the last one. Rates are
    those of the catalogue; without one, only the number of workers counts.
    """
    gpu, task, shards = execution.accelerator, job.task, len(listing.shards)
    if gpu is None and task is None:
        return ""
    gpus = gpu.count if gpu is not None else count_gpus(job)
    workers = max(1, gpus) * (task.count if task is not None else execution.max_workers)
    entry = ENTRIES.get(job.extractor.name)
    rate = 0.0 if entry is None else entry.gpu_rate if gpus else entry.core_rate * usable_cores()
    seconds = listing.count / rate if rate else 0.0
    wanted = max(_WORKER_SHARDS * workers, ceil(seconds / _SHARD_SECONDS))
    if shards >= min(wanted, MAX_SHARDS):
        return ""
    reasons = []
    if shards < _WORKER_SHARDS * workers:
        reasons.append(f"{shards:,} shards are fewer than {_WORKER_SHARDS} for each of {workers:,} workers")
    if seconds > _SHARD_SECONDS * shards:
        minutes, measured = seconds / shards / 60, "on an H200" if gpus else "on these cores"
        reasons.append(f"a shard takes about {minutes:,.0f} minutes {measured}, at {rate:,.1f} images per second")
    advice = f"give a new dataset --shards {min(1 << (wanted - 1).bit_length(), MAX_SHARDS)}"
    return f"{', and '.join(reasons)}: a stopped worker loses its shard, and others wait for the last one; {advice}"


def _remember_ids(refs: Iterable[ImageRef], ids: KeyHashes, skipped: dict[str, int]) -> Iterator[ImageRef]:
    for ref in refs:
        if ref.image_id in skipped:
            skipped[ref.image_id] += 1
        else:
            ids.add(ref.image_id)
            yield ref
