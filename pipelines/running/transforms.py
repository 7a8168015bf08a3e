"""Transforms that jobs of every kind begin and end with, and the one that writes shards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

import apache_beam as beam
from apache_beam.utils.shared import Shared

from pipelines.running.per_shard import ShardWork
from pipelines.running.preflight import FirstWorker
from schemas.writing.dataset_writer import Statistics, commit, write_shards
from schemas.writing.output import OutputDataset


@dataclass(eq=False)  # Not frozen: Beam sets the label.
class Begin(beam.PTransform):
    """The values that a pipeline begins with, once the first worker has passed its check.

    Attributes:
        check: the check; None for a run on this machine.
        hints: Beam's resource hints for the check, e.g. the GPU that it looks for.
    """

    values: Iterable[Any]
    check: FirstWorker | None
    hints: Mapping[str, str] = field(default_factory=dict)

    def expand(self, begin: beam.pvalue.PBegin) -> beam.PCollection:
        """Check and yield in one function, so that nothing goes on without the check."""
        values = list(self.values)
        if self.check is None:
            return begin | "Values" >> beam.Create(values)
        checked = beam.FlatMap(_checked, values=values, check=self.check).with_resource_hints(**self.hints)
        return begin | "Once" >> beam.Create([b""]) | "FirstWorker" >> checked


def _checked(_impulse: bytes, values: list[Any], check: FirstWorker) -> Iterator[Any]:
    check()
    yield from values


def spread_shards(pipeline: beam.Pipeline, shards: Iterable[int], check: FirstWorker | None) -> beam.PCollection:
    """Begin a pipeline with shard indices, on which all workers work; ``check`` is that of `Begin`."""
    return pipeline | "ListShards" >> Begin(shards, check) | "SpreadShards" >> beam.Reshuffle()  # Fusion break.


class _WriteShardFn(beam.DoFn):
    def __init__(self, output: OutputDataset, work: ShardWork) -> None:
        self._output = output
        self._work = work
        self._shared = Shared()

    def setup(self) -> None:
        self._work.set_up(self._shared.acquire)

    def process(self, shard: int) -> Iterator[int]:
        yield from write_shards(self._output, [shard], self._work.write)


@dataclass(eq=False)
class WriteShards(beam.PTransform):
    """Shard indices to shards on disk, written by ``work``; the output holds the index of each shard once it is written."""

    output: OutputDataset
    work: ShardWork

    def expand(self, shards: beam.PCollection) -> beam.PCollection:
        """Write each shard on its own: those of inputs and output hold the same keys, so nothing is shuffled."""
        return shards | "WriteShard" >> beam.ParDo(_WriteShardFn(self.output, self.work))


@dataclass(eq=False)
class CommitDataset(beam.PTransform):
    """Last step of a pipeline: writes the manifest once its input is complete.

    An input element is the index of a finished shard, or a tuple of paths of other files that belong to the dataset, whose names
    are known only at run time, such as one truecaser per language.

    Attributes:
        libraries: distributions whose versions affect the content.
        statistics: as `schemas.writing.dataset_writer.commit` takes it.
    """

    output: OutputDataset
    _: KW_ONLY
    libraries: tuple[str, ...]
    statistics: Statistics | None = None

    def expand(self, results: beam.PCollection) -> beam.PCollection:
        """Wait for all shards, which arrive as a side input of one small element each, and commit."""
        output = replace(self.output, listings=None, states=None)  # Only the launcher compares them, and the graph stays small.
        once = results.pipeline | "Once" >> beam.Create([b""])
        return once | "Commit" >> beam.Map(_commit, beam.pvalue.AsList(results), output, self.libraries, self.statistics)


def _commit(
    _impulse: bytes,
    results: Iterable[Any],
    output: OutputDataset,
    libraries: tuple[str, ...],
    statistics: Statistics | None,
) -> str:
    files = tuple(name for element in results if isinstance(element, tuple) for name in element)
    return commit(output, libraries=libraries, files=files, statistics=statistics).fingerprint
