"""Transforms that jobs of every kind begin and end with, and the one that writes shards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import apache_beam as beam
from apache_beam.utils.shared import Shared

from pipelines.running.per_shard import ShardWork
from pipelines.running.preflight import FirstWorker
from schemas.writing.dataset_writer import Statistics, commit, write_shards
from schemas.writing.output import OutputDataset


class Begin(beam.PTransform):
    """The values that a pipeline begins with, once the first worker has passed its check.

    Args:
        values: the values.
        check: the check; None for a run on this machine.
        hints: Beam's resource hints for the check, e.g. the GPU that it looks for.
    """

    def __init__(self, values: Iterable[Any], check: FirstWorker | None, hints: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self._hints = hints or {}
        self._values = list(values)
        self._check = check

    def expand(self, begin: beam.pvalue.PBegin) -> beam.PCollection:
        """Check and yield in one function, so that nothing goes on without the check."""
        if self._check is None:
            return begin | "Values" >> beam.Create(self._values)
        checked = beam.FlatMap(_checked, values=self._values, check=self._check).with_resource_hints(**self._hints)
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


class WriteShards(beam.PTransform):
    """Shard indices to shards on disk; the output holds the index of each shard once it is written.

    Args:
        output: the dataset to write.
        work: writes the rows of a shard; it is set up once per process and thread.
    """

    def __init__(self, output: OutputDataset, work: ShardWork) -> None:
        super().__init__()
        self._function = _WriteShardFn(output, work)

    def expand(self, shards: beam.PCollection) -> beam.PCollection:
        """Write each shard on its own: those of inputs and output hold the same keys, so nothing is shuffled."""
        return shards | "WriteShard" >> beam.ParDo(self._function)


class CommitDataset(beam.PTransform):
    """Last step of a pipeline: writes the manifest once its input is complete.

    An input element is the index of a finished shard, or a tuple of paths of other files that belong to the dataset, whose names
    are known only at run time, such as one truecaser per language.

    Args:
        output: the dataset.
        libraries: distributions whose versions affect the content.
        statistics: as `schemas.writing.dataset_writer.commit` takes it.
    """

    def __init__(self, output: OutputDataset, *, libraries: tuple[str, ...], statistics: Statistics | None = None) -> None:
        super().__init__()
        output = replace(output, listings=None, states=None)  # Only the launcher compares them, and the graph stays small.
        self._arguments = output, libraries, statistics

    def expand(self, results: beam.PCollection) -> beam.PCollection:
        """Wait for all shards, which arrive as a side input of one small element each, and commit."""
        once = results.pipeline | "Once" >> beam.Create([b""])
        return once | "Commit" >> beam.Map(_commit, beam.pvalue.AsList(results), *self._arguments)


def _commit(
    _impulse: bytes,
    results: Iterable[Any],
    output: OutputDataset,
    libraries: tuple[str, ...],
    statistics: Statistics | None,
) -> str:
    files = tuple(name for element in results if isinstance(element, tuple) for name in element)
    return commit(output, libraries=libraries, files=files, statistics=statistics).fingerprint
