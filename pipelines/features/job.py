"""What ``imagepivot features`` is asked to do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from extractors import ExtractorRequest
from extractors.catalogue import entry_of
from pipelines.inputs.images import ImageSource
from schemas.errors import UsageError
from schemas.keys import AUTO, ShardsRequest, check_shards_request
from schemas.kinds import schema_of, vector_bytes
from schemas.writing.output import ArrayTask, ReusePolicy, UpdatePolicy

if TYPE_CHECKING:
    from pipelines.running.execution import Execution

__all__ = ["FeaturesJob", "stored_bytes"]

_LIBRARIES = ("apache-beam", "pillow", "torch", "torchvision")


@dataclass(frozen=True)
class FeaturesJob:
    """A dataset of features to be made from images.

    Attributes:
        images: the images.
        output: folder of the dataset.
        extractor: the extractor, its weights and its options.
        device: ``cpu``, ``cuda``, ``cuda:N`` or ``auto``.
        batch_size: images that the model takes at once; changes speed and memory, not the features. None: the extractor's own
            number on a CPU, and what a GPU is fastest with, see `extractors.batch_sizes`.
        shards: number of shards, see `schemas.writing.shard_count`.
        overwrite: start anew, whatever dataset is there.
        verify: compare the digests of the shards that are there, too, and make those again that are damaged.
        update: bring the dataset in ``output`` up to date with images that are new, changed or gone; None if it must not change.
        retry_failed: try the images again that failed before.
        task: the task of an array job that writes only its own shards; None to write all.

    Raises:
        UsageError: a value is out of range, or two options contradict each other.
    """

    images: ImageSource
    output: str
    extractor: ExtractorRequest = ExtractorRequest("resnet50-pool")
    device: str = "auto"
    batch_size: int | None = None
    shards: ShardsRequest = AUTO
    overwrite: bool = False
    verify: bool = False
    update: UpdatePolicy | None = None
    retry_failed: bool = False
    task: ArrayTask | None = None

    def __post_init__(self) -> None:
        check_shards_request(self.shards)
        if self.batch_size is not None and self.batch_size < 1:
            raise UsageError(f"--batch-size is {self.batch_size}, expected 1 or more")
        if self.overwrite and (self.update or self.retry_failed):
            raise UsageError(
                "--overwrite starts anew, --update and --retry-failed keep what the dataset holds: give one of them"
            )
        if self.task is not None:
            if isinstance(self.shards, int):
                self.task.shards(self.shards)
            if self.overwrite:
                raise UsageError(
                    "--overwrite with --task would delete the shards of the other tasks: delete the folder before the first task, "
                    "or choose another, and leave out --overwrite"
                )

    @property
    def policy(self) -> ReusePolicy:
        """What the run keeps of the dataset in ``output``."""
        return ReusePolicy(overwrite=self.overwrite, verify=self.verify, update=self.update, retry_failed=self.retry_failed)

    def locations(self) -> Iterator[tuple[str, str]]:
        """Yield what the workers read and write: what a location is, in words, and the location."""
        yield from (("IMAGES", self.images.location), ("OUTPUT", self.output))
        yield from (("--weights", location) for location in self.extractor.files())
        yield from (("the image", location) for location in self.images.listed_locations())

    def feature_bytes(self) -> int:
        """Return the bytes of the feature of one image, as far as they are known without the weights.

        Raises:
            UsageError: there is no such extractor.
        """
        spec, regions = self.extractor.spec(), self.extractor.regions
        rows = spec.shape[0] if regions is None else regions.max_regions
        return np.dtype(spec.dtype).itemsize * rows * prod(spec.shape[1:])

    def check_device(self) -> None:
        """Check that this machine has the device, and that the device does what is asked of it.

        Raises:
            UsageError: it has not, or does not.
        """
        self.extractor.check_device(self.device)

    def check_execution(self, execution: Execution) -> None:
        """Check that the job can run where it is to run.

        Raises:
            UsageError: the job is a task of an array job, and the pipeline would run elsewhere; or the workers have GPUs, and the
                job names another device.
        """
        if execution.accelerator is not None and self.device not in ("auto", "cuda"):
            raise UsageError(
                f"--device is {self.device!r}, and --gpu {execution.accelerator.type!r}: the model runs on all GPUs of a worker. "
                "Leave one of the two out"
            )
        if self.task is not None and not execution.is_local:
            raise UsageError(
                f"--task is '{self.task}', and behind -- stands --runner: a task makes its shards on the machine on which it is "
                "started, and a Beam runner deals out all of them by itself. Leave out one of the two"
            )

    def for_workers(self, execution: Execution) -> FeaturesJob:
        """Return the job as the workers of an execution get it: elsewhere, paths are absolute and the GPUs asked for are used."""
        job = self if execution.runs_here else replace(self, extractor=self.extractor.located())
        if execution.accelerator is None:
            return job
        return replace(job, device="cuda")  # Without a GPU there, no worker may fall back to its CPU.

    def extras(self) -> tuple[str, ...]:
        """Return the extras that workers on other machines need; that for HEIC photographs, too, if this process has it."""
        heif = ("heif",) if find_spec("pillow_heif") is not None else ()
        timm = ("timm",) if self.extractor.name.startswith("timm:") else ()
        return "pipelines", "extractors", *timm, *heif

    def libraries(self) -> tuple[str, ...]:
        """Return the distributions whose versions matter to the features."""
        regions = self.extractor.regions
        origins = {self.extractor.name.partition(":")[0], regions.backend if regions is not None else ""}
        return (*_LIBRARIES, *(name for name in ("timm", "detectron2") if name in origins))


def stored_bytes(request: ExtractorRequest) -> int | None:
    """Return the bytes that the vectors of one image take in a dataset; None where only the weights would tell.

    Raises:
        UsageError: there is no such extractor.
    """
    spec, regions = request.spec(), request.regions
    kind = "regions" if entry_of(request.name).makes_regions else "features"
    if not all(spec.shape):
        return None
    if kind == "regions" and regions is not None:
        spec = replace(spec, shape=(regions.max_regions, *spec.shape[1:]))
    return vector_bytes(schema_of(kind, spec))
