"""First and last transforms of all jobs, and the transform that writes shards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

import apache_beam as beam
from apache_beam.utils.shared import Shared

from pipelines.running.preflight import PreflightCheck
from pipelines.running.process_pool import ShardWorker
from schemas.errors import UsageError
from schemas.writing.dataset_writer import commit
from schemas.writing.output import OutputDataset


@dataclass(eq=False)  # Not frozen: Beam sets the label.
class CreateAfterPreflight(beam.PTransform):
    """Create the first values of a pipeline after the preflight check.

    Attributes:
        check: the check; None for a run on this machine.
        hints: Beam's resource hints for the check, e.g. a GPU.
    """

    values: Iterable[Any]
    check: PreflightCheck | None
    hints: Mapping[str, str] = field(default_factory=dict)

    def expand(self, begin: beam.pvalue.PBegin) -> beam.PCollection:
        """Check and yield in one function: no element exists without the check."""
        values = list(self.values)
        if self.check is None:
            return begin | "Values" >> beam.Create(values)
        checked = beam.FlatMap(_yield_after_check, values=values, check=self.check).with_resource_hints(**self.hints)
        return begin | "Once" >> beam.Create([b""]) | "FirstWorker" >> checked


def _yield_after_check(_impulse: bytes, values: list[Any], check: PreflightCheck) -> Iterator[Any]:
    check()
    yield from values


def check_root(begin: Any, transform: beam.PTransform, advice: str) -> None:
    """Check that a transform is the root of a pipeline.

    Raises:
        UsageError: it is applied to a PCollection.
    """
    if not isinstance(begin, beam.pvalue.PBegin):
        raise UsageError(
            f"{type(transform).__name__} is applied to a {type(begin).__name__}, expected the root of a "
            f"pipeline, as in pipeline | {type(transform).__name__}(...): {advice}"
        )


def spread_shards(pipeline: beam.Pipeline, shards: Iterable[int], check: PreflightCheck | None) -> beam.PCollection:
    """Create shard indices, and distribute them to all workers."""
    return pipeline | "ListShards" >> CreateAfterPreflight(shards, check) | "SpreadShards" >> beam.Reshuffle()  # Fusion break.


class WriteShardFn(beam.DoFn):
    """Write a shard, see `ShardWorker`; yields its index."""

    def __init__(self, worker: ShardWorker) -> None:
        self._worker = worker
        self._shared = Shared()

    def setup(self) -> None:
        """Load the state for all shards of this process."""
        self._worker.set_up(self._shared.acquire)

    def process(self, shard: Any) -> Iterator[int]:
        """Write a shard."""
        yield self._worker.write(shard)


@dataclass(eq=False)
class WriteShards(beam.PTransform):
    """Write shards by index; yields the index of each written shard."""

    worker: ShardWorker

    def expand(self, shards: beam.PCollection) -> beam.PCollection:
        """Write each shard from the same shard of the inputs, without a shuffle."""
        return shards | "WriteShard" >> beam.ParDo(WriteShardFn(self.worker))


@dataclass(eq=False)
class CommitDataset(beam.PTransform):
    """Write the manifest when all shards are written.

    An input element is the index of a written shard, or a tuple of paths of other files of the dataset with
    names known only at run time, such as a truecaser per language.

    Attributes:
        libraries: distributions whose versions affect the content.

    Examples:
        >>> output = imagepivot.OutputDataset(imagepivot.Folder("build/committed"), "encoded", {"max_length": 20}, shards=2)
        >>> captions, vocabulary = imagepivot.open_dataset("captions"), imagepivot.open_dataset("vocabulary")
        >>> with beam.Pipeline() as pipeline:
        ...     shards = pipeline | beam.Create(range(2)) | imagepivot.EncodeCaptions(captions, vocabulary, 20, output)
        ...     _ = shards | imagepivot.CommitDataset(output, libraries=("apache-beam",))
    """

    output: OutputDataset
    _: KW_ONLY
    libraries: tuple[str, ...]

    def expand(self, results: beam.PCollection) -> beam.PCollection:
        """Wait for all shards, a side input of small elements, and commit."""
        output = replace(self.output, listings=None, version_digests=None)  # Only the launcher compares these.
        once = results.pipeline | "Once" >> beam.Create([b""])
        return once | "Commit" >> beam.Map(_commit, beam.pvalue.AsList(results), output, self.libraries)


def _commit(_impulse: bytes, results: Iterable[Any], output: OutputDataset, libraries: tuple[str, ...]) -> str:
    files = tuple(name for element in results if isinstance(element, tuple) for name in element)
    return commit(output, libraries=libraries, files=files).fingerprint
