"""The checks in their order: of this machine always, of what is asked for besides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from pipelines.doctor.buckets import check_bucket
from pipelines.doctor.credentials import check_credentials, is_store
from pipelines.doctor.disks import check_folder, check_temporary_folder
from pipelines.doctor.findings import Diagnosis, Finding, attempt
from pipelines.doctor.installation import check_extras, check_installation, check_packages, requirements
from pipelines.doctor.machine import check_cores, check_memory, check_open_files, check_shared_memory
from pipelines.doctor.model import ModelCheck
from schemas.errors import UsageError
from schemas.locations import absolute_location, is_remote

if TYPE_CHECKING:
    from extractors import ExtractorRequest
    from pipelines.inputs.dialects import Quoting
    from pipelines.inputs.images import IdRule
    from pipelines.running.execution import Execution

__all__ = ["DoctorJob", "diagnose", "examine"]

_QUICK_BYTES, _MEASURED_BYTES = 4 << 20, 64 << 20


@dataclass(frozen=True)
class DoctorJob:
    """What is to be looked at besides this installation and this machine, which always are.

    Attributes:
        locations: folders and buckets that a run would write to. Small files are written there and deleted again.
        extractor: an extractor, whose weights are fetched, if they are elsewhere, and checked, and which runs on each GPU; None
            for none.
        images: images that a run would read, of which a few are read; empty for none.
        ids: as `pipelines.inputs.images.open_images` takes it.
        columns: for a table of images, our name of a column -> the table's name.
        delimiter: for a table of images, as for `open_images`.
        quoting: for a table of images, as for `open_images`.
        allow_private_addresses: as `pipelines.inputs.images.open_images` takes it.
        device: ``cpu``, ``cuda``, ``cuda:N`` or ``auto``; None where it is not asked for.
        measure: measure for some seconds how fast images are read, decoded and computed, and write more to the locations.
        execution: the runner whose workers are looked at, too; None for none.

    Raises:
        UsageError: there is a runner, but no location by which its workers could tell what they find.
    """

    locations: tuple[str, ...] = ()
    extractor: ExtractorRequest | None = None
    images: str = ""
    ids: IdRule = "name"
    columns: Mapping[str, str] | None = None
    delimiter: str = ""
    quoting: Quoting = "auto"
    allow_private_addresses: bool = False
    device: str | None = None
    measure: bool = False
    execution: Execution | None = None

    def __post_init__(self) -> None:
        if self.execution is not None and not self.locations:
            raise UsageError(
                f"LOCATION is missing: the workers of {self.execution.runner} write what they find to the first one, where it is "
                "deleted again. Give a bucket, or with --shared-disk a folder that all machines see"
            )


def diagnose(job: DoctorJob = DoctorJob()) -> Diagnosis:
    """Find out what this machine, and the locations and the runner of a job, can do.

    Nothing is raised for what does not work: it is a finding of status ``problem``. Without a job only this machine is looked at,
    in a few seconds and without a network.

    Example:
        >>> diagnose(DoctorJob(locations=("gs://bucket/features",))).works  # doctest: +SKIP
        True
    """
    return Diagnosis(tuple(examine(job)))


def examine(job: DoctorJob) -> Iterator[Finding]:
    """Yield the findings of `diagnose` one by one, since some take a while."""
    required = requirements()
    yield from attempt("installation", "imagepivot", check_installation)
    yield from attempt("installation", "packages", lambda: check_packages(required))
    yield from attempt("installation", "extras", lambda: check_extras(required, _needed_extras(job)))
    yield from attempt("machine", "cores", check_cores)
    yield from attempt("machine", "memory", check_memory)
    yield from attempt("machine", "shared memory", check_shared_memory)
    yield from attempt("machine", "open files", check_open_files)
    yield from attempt("machine", "temporary", check_temporary_folder)
    yield from attempt("credentials", "sources", check_credentials)
    fingerprint = ""
    for finding in _examine_model(job):
        fingerprint = finding.values.get("fingerprint", fingerprint)
        yield finding
    for location in job.locations:
        yield from attempt("storage", "location", partial(_check_location, location, measure=job.measure))
    if job.execution is not None:
        yield from attempt("worker", "runner", partial(_check_workers, job, fingerprint))


def _examine_model(job: DoctorJob) -> Iterator[Finding]:
    is_here = job.execution is None or job.execution.runs_here
    check = ModelCheck(job.extractor, job.device if is_here else None)
    yield from attempt("weights", "weights", check.weights)
    if not is_here:  # The workers compute and read.
        return
    yield from attempt("devices", "device", check.devices)
    if job.measure or job.images:
        yield from attempt("rates", "images" if job.images else "rates", partial(_rates, job, check))


def _rates(job: DoctorJob, check: ModelCheck) -> Iterator[Finding]:
    images = None
    if job.images:
        from pipelines.inputs.images import open_images

        images = open_images(
            job.images,
            ids=job.ids,
            columns=job.columns,
            delimiter=job.delimiter,
            quoting=job.quoting,
            allow_private_addresses=job.allow_private_addresses,
        )
    return check.rates(images, whole=job.measure)


def _check_location(location: str, *, measure: bool) -> Iterator[Finding]:
    size = _MEASURED_BYTES if measure else _QUICK_BYTES
    host = location.partition("://")[2].partition("/")[0]
    if is_store(location) and ":" in host and "@" not in host:
        raise UsageError(f"the key in {location!r} holds what stands for something else: write / as %2F, @ as %40 and ? as %3F")
    if is_remote(location) and not is_store(location):
        raise UsageError(f"cannot write to {location!r}: give a local folder, gs://BUCKET/PATH or s3://BUCKET/PATH")
    return check_bucket(location, size) if is_store(location) else check_folder(location, size)


def _check_workers(job: DoctorJob, fingerprint: str) -> Iterator[Finding]:
    """Let a worker make the checks of the same job, and compare the weights and the GPUs that it finds."""
    from pipelines.doctor.cluster import check_cluster

    execution = job.execution
    assert execution is not None
    theirs = replace(
        job,
        execution=None,
        locations=tuple(map(absolute_location, job.locations)),
        extractor=None if job.extractor is None else job.extractor.located(),
        images=absolute_location(job.images) if job.images else "",
        device="cuda" if execution.accelerator is not None else job.device,
    )
    for finding in check_cluster(execution, job.locations[0], partial(examine, theirs), _staged_extras(job)):
        yield finding
        found = finding.values.get("fingerprint", fingerprint)
        if fingerprint and found != fingerprint:
            yield Finding(
                finding.group,
                "weights",
                "problem",
                "the worker finds other weights, or has other versions, than this machine",
                "give all machines the same file, best by its address in a bucket",
                {"here": fingerprint, "there": found},
            )
        if (
            execution.accelerator is not None
            and finding.values.get("gpus", execution.accelerator.count) < execution.accelerator.count
        ):
            words = f"a worker has {finding.values['gpus']} GPUs, and --gpus-per-worker asks for {execution.accelerator.count}"
            yield Finding(finding.group, "gpus", "problem", words, "choose another --worker-machine, or fewer GPUs")


def _staged_extras(job: DoctorJob) -> tuple[str, ...]:
    """Return the extras that workers need which install this package."""
    return ("pipelines", *(extra for extra in _needed_extras(job) if extra in ("extractors", "timm")))


def _needed_extras(job: DoctorJob) -> dict[str, str]:
    """Return what is asked for, in words, by the extra that it needs."""
    needed: dict[str, str] = {}
    if job.extractor is not None or job.measure:
        needed["extractors"] = "an extractor" if job.extractor is None else f"extractor {job.extractor.name!r}"
        if job.extractor is not None and job.extractor.name.startswith("timm:"):
            needed["timm"] = needed["extractors"]
    if job.images:
        needed["pipelines"] = "reading images"
    if job.execution is not None:
        needed["pipelines"] = f"the runner {job.execution.runner}"
        if "dataflow" in job.execution.runner.lower():
            needed["gcp"] = needed["pipelines"]
    return needed
