"""``imagepivot features``: images in, features in shards out. The unit of work is a shard, not an image.

Beam moves references only. One call of one function reads, decodes, runs the model and writes a shard: features never pass
through a shuffle, a retry makes one shard again, and a run that was killed goes on with the shards that are missing.
``RunInference`` is not used: its dead letter holds whole batches, it decodes and runs the model in one thread in turn, and
its results would be shuffled to the writer.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace

import apache_beam as beam
from apache_beam.metrics import Metrics
from apache_beam.utils.shared import Shared

import extractors
from extractors.settings import RegionOptions
from pipelines.datasets.region_names import names_files, stored_names
from pipelines.features.forward import Tally
from pipelines.features.shards import make_shard
from pipelines.inputs.images.opening import ImageRef, ImageSource, Listing, sum_digests
from pipelines.running.jobs import CommitDataset, run_job
from pipelines.running.progress import Meter
from pipelines.running.runner import Execution
from schemas.errors import InputError, UsageError
from schemas.fingerprints import Identity
from schemas.keys import check_shards, shard_of
from schemas.manifest import Manifest
from schemas.output import Output
from schemas.shards import Footer
from schemas.storage import Folder

__all__ = ["DEFAULT_SHARDS", "ExtractFeatures", "FeaturesJob", "extract_features", "list_images", "plan_features"]

DEFAULT_SHARDS = 16
_LIBRARIES = ("apache-beam", "pillow", "torch", "torchvision")


@dataclass(frozen=True)
class FeaturesJob:
    """What ``imagepivot features`` does.

    Attributes:
        images: the images.
        output: folder of the dataset.
        extractor: name of the extractor.
        weights: ``default``, a file, or ``random:SEED``.
        device: ``cpu``, ``cuda``, ``cuda:N`` or ``auto``.
        precision: ``fp32``, ``tf32``, ``bf16`` or ``fp16``.
        compile: whether a GPU runs a compiled model.
        regions: which regions to keep, of an extractor that makes some, and what they are called; its defaults when None.
        batch_size: images that the model takes at once; changes speed and memory, not the features. None: the extractor's own
            number.
        shards: number of shards.
        overwrite: replace a dataset of another fingerprint.
        update: add the images that are new in the source to a dataset that is there.
        retry_failed: try the images again that failed before.
    """

    images: ImageSource
    output: str
    extractor: str = "resnet50-pool"
    weights: str = "default"
    device: str = "auto"
    precision: str = "fp32"
    compile: bool = False
    regions: RegionOptions | None = None
    batch_size: int | None = None
    shards: int = DEFAULT_SHARDS
    overwrite: bool = False
    update: bool = False
    retry_failed: bool = False

    def __post_init__(self) -> None:
        check_shards(self.shards)
        if self.batch_size is not None and self.batch_size < 1:
            raise UsageError(f"--batch-size is {self.batch_size}, expected 1 or more")
        if self.overwrite and (self.update or self.retry_failed):
            raise UsageError(
                "--overwrite makes a dataset again, --update and --retry-failed keep what is there: give one of them"
            )

    def describe(self) -> extractors.Description:
        """What the extractor makes; it is not loaded."""
        return extractors.describe(
            self.extractor, weights=self.weights, precision=self.precision, compile=self.compile, regions=self.regions
        )

    def load(self, device: str | None = None) -> extractors.Extractor:
        """Loads the extractor, on another device if one is named."""
        return extractors.load(
            self.extractor,
            weights=self.weights,
            device=device or self.device,
            precision=self.precision,
            compile=self.compile,
            regions=self.regions,
        )

    def check_device(self) -> None:
        """Raise `UsageError` where this machine lacks the device, or the device does not do what is asked of it."""
        from extractors.computing.devices import check_request

        check_request(self.device, self.precision, compile=self.compile)

    def libraries(self) -> tuple[str, ...]:
        """Distributions whose versions matter to the features."""
        backend = self.regions.backend if self.regions is not None else ""
        origin = {self.extractor.partition(":")[0], backend}
        return (*_LIBRARIES, *(name for name in ("timm", "detectron2") if name in origin))

    def gpus(self) -> int:
        """Number of GPUs of this machine that the job may use: all, unless it names a device."""
        import torch

        return torch.cuda.device_count() if self.device in ("auto", "cuda") and torch.cuda.is_available() else 0


def device_of_worker(job: FeaturesJob, worker_id: str) -> str | None:
    """The GPU of a worker process where there are several: workers are numbered, and take them in turn.

    Args:
        job: the job.
        worker_id: as Beam names its local workers, e.g. ``worker_3``.

    Returns:
        ``cuda:N``, or None where the job's own device will do.
    """
    number = re.search(r"(\d+)$", worker_id)
    gpus = job.gpus()
    return f"cuda:{int(number[1]) % gpus}" if gpus > 1 and number else None


def decoding_threads(job: FeaturesJob, cores: int = 0) -> int:
    """Threads that decode in a worker: on a CPU the model needs the cores, and decoding takes a tenth of its time.

    Args:
        job: the job.
        cores: of the worker; 0 for all of the machine.
    """
    import torch

    on_gpu = torch.cuda.is_available() and job.device != "cpu"
    return (cores or os.cpu_count() or 1) if on_gpu else 1


class _Loaded:
    """Holds an extractor: Beam's ``Shared`` keeps weak references, which need a class that allows them."""

    def __init__(self, extractor: extractors.Extractor) -> None:
        self.extractor = extractor


class _ExtractShardFn(beam.DoFn):
    def __init__(self, job: FeaturesJob, output: Output, meter: Meter, threads: int) -> None:
        self._job = job
        self._output = output
        self._meter = meter
        self._threads = threads
        self._shared = Shared()
        self._counters = {name: Metrics.counter("ExtractFeatures", name) for name in (*_counts(Tally()), "bytes_written")}

    def setup(self) -> None:
        import torch

        if self._threads:
            torch.set_num_threads(self._threads)
        device = device_of_worker(self._job, os.environ.get("WORKER_ID", ""))
        self._loaded = self._shared.acquire(lambda: _Loaded(self._job.load(device)))
        if self._loaded.extractor.fingerprint != self._output.identity.parameters["extractor_fingerprint"]:
            raise InputError(
                f"a worker loads other weights from {self._job.weights!r}, or has other files or versions, than the machine that "
                "planned the run: give all of them the same"
            )

    def process(self, element: tuple[int, Iterable[ImageRef]]) -> Iterator[int]:
        shard, group = element
        tally = make_shard(
            self._output,
            shard,
            [ref for ref in (ImageRef(*each) for each in group) if ref.image_id],
            images=self._job.images,
            extractor=self._loaded.extractor,
            batch_size=self._job.batch_size or self._loaded.extractor.description.batch_size,
            threads=decoding_threads(self._job, self._threads),
            retry_failed=self._job.retry_failed,
            on_batch=self._show,
        )
        size = self._output.folder.size(self._output.names()[shard]) or 0
        for name, count in {**_counts(tally), "bytes_written": size}.items():
            self._counters[name].inc(count)
        yield shard

    def _show(self, batch: Tally) -> None:
        counts = _counts(batch)
        self._meter.add(
            images=batch.images + len(batch.failures),
            failed=len(batch.failures),
            forward_msec=counts["forward_msec"],
            wait_msec=counts["wait_msec"],
        )


def _counts(tally: Tally) -> dict[str, int]:
    return {
        "images_read": tally.images,
        "images_failed": len(tally.failures),
        "decode_msec": round(tally.decode_seconds * 1000),
        "forward_msec": round(tally.forward_seconds * 1000),
        "wait_msec": round(tally.wait_seconds * 1000),
    }


def _refs_by_shard(
    _impulse: bytes, images: ImageSource, shards: int, finished: frozenset[int]
) -> Iterator[tuple[int, ImageRef]]:
    for ref in images.refs():
        shard = shard_of(ref.image_id, shards)
        if shard not in finished:
            yield shard, ref


@dataclass(eq=False)
class ExtractFeatures(beam.PTransform):
    """A pipeline's begin to feature shards on disk; gives the numbers of the shards that it wrote.

    Attributes:
        job: images, extractor and how to run it.
        output: the dataset.
        finished: shards that an earlier run finished.
        meter: counts images.
        threads: torch's threads in each worker; 0 leaves torch's own number.
    """

    job: FeaturesJob
    output: Output
    finished: frozenset[int] = frozenset()
    meter: Meter = Meter()
    threads: int = 0

    def expand(self, begin: beam.pvalue.PBegin) -> beam.PCollection:
        """Lists the images on a worker, groups the references by shard, and makes each shard in one call."""
        shards = self.output.identity.shards
        # A reference without an id stands for the shard itself: every shard is written, also one without images.
        todo = [(shard, ImageRef("", "")) for shard in range(shards) if shard not in self.finished]
        refs = (
            begin
            | "Once" >> beam.Impulse()
            | "ListImages" >> beam.FlatMap(_refs_by_shard, self.job.images, shards, self.finished)
        )
        return (
            (refs, begin | "EveryShard" >> beam.Create(todo))
            | "RefsAndShards" >> beam.Flatten()
            | "GroupByShard" >> beam.GroupByKey()  # Also the fusion break before the model.
            | "ExtractShard" >> beam.ParDo(_ExtractShardFn(self.job, self.output, self.meter, self.threads))
        )


def list_images(job: FeaturesJob) -> Listing:
    """Lists the images of a job once.

    Raises:
        InputError: there are none.
    """
    listing = Listing.of(job.images.refs(), job.shards)
    if not listing.count:
        raise InputError(
            f"no images found in {job.images.location!r}: check the path; a folder is searched for known extensions"
        )
    return listing


def plan_features(job: FeaturesJob, listing: Listing) -> Output:
    """Where a job writes, and the identity of what it makes.

    The identity of features is that of the feature space (extractor, weights, transform, precision) and the number of shards. The
    images are not part of it: a dataset grows, and models that were trained on it meet features of other images. Which images
    are in a shard stands in its footer, as the digest of their list. Names of classes and attributes are not part of it either;
    those of an earlier run stay where this one gives none.
    """
    description = job.describe()
    identity = Identity(
        kind=description.kind,
        parameters={
            "feature": {**asdict(description.spec), "shape": list(description.spec.shape)},
            "extractor": description.parameters,
            "extractor_fingerprint": description.fingerprint,
        },
        shards=job.shards,
    )
    folder = Folder(job.output)
    names = names_files(job.regions, description)
    if description.kind == "regions" and not job.overwrite:
        names = {**stored_names(folder, description), **names}
    return Output(folder=folder, identity=identity, listings=listing.shards, files=names)


def _statistics(footers: list[Footer]) -> dict[str, object]:
    counts = {name: sum(footer.statistics[name] for footer in footers) for name in ("images", "failed")}
    return {**counts, "listing": sum_digests(footer.statistics["listing"] for footer in footers)}


def extract_features(
    job: FeaturesJob,
    execution: Execution = Execution(),
    meter: Meter = Meter(),
    *,
    listing: Listing | None = None,
) -> Manifest:
    """Makes a dataset of kind ``features``, or ``regions`` where the extractor makes those.

    Args:
        job: what to make.
        execution: where and how to run. With no number of workers given, one a GPU, or one whose model uses all cores.
        meter: counts images for whoever watches.
        listing: what ``list_images`` gave, to list a large source once less.

    Raises:
        ImagepivotError: the images, weights or device are not there, or the folder cannot be written.
    """
    output = plan_features(job, listing or list_images(job))
    if execution.is_local:
        job.check_device()  # Before anything that lies there is replaced.
    if execution.is_local and not execution.workers:
        execution = replace(execution, workers=max(1, job.gpus()))
    workers = execution.local_workers if execution.is_local else 1
    threads = max(1, (os.cpu_count() or 1) // workers) if workers > 1 else 0

    def build(pipeline: beam.Pipeline, finished: frozenset[int]) -> None:
        extraction = ExtractFeatures(job=job, output=output, finished=finished, meter=meter, threads=threads)
        commit = CommitDataset(output, libraries=job.libraries(), statistics=_statistics)
        _ = pipeline | "ExtractFeatures" >> extraction | "CommitDataset" >> commit

    return run_job(
        output,
        build,
        execution=execution,
        overwrite=job.overwrite,
        update=job.update,
        retry_failed=job.retry_failed,
    )
