"""The last step of a pipeline, which commits its dataset, and what counts before it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import apache_beam as beam

from schemas.writing.dataset_writer import Statistics, commit
from schemas.writing.output import OutputDataset


class SumCounters(beam.CombineFn):
    """Sum of counters. One accumulator per key holds the distinct items of that key, never the corpus."""

    def create_accumulator(self) -> Counter[str]:
        """Return an empty counter."""
        return Counter()

    def add_input(self, accumulator: Counter[str], element: Mapping[str, int]) -> Counter[str]:
        """Add one counter."""
        accumulator.update(element)
        return accumulator

    def merge_accumulators(self, accumulators: Iterable[Counter[str]]) -> Counter[str]:
        """Merge the counters of several accumulators into one."""
        total: Counter[str] = Counter()
        for accumulator in accumulators:
            total.update(accumulator)
        return total

    def extract_output(self, accumulator: Counter[str]) -> Counter[str]:
        """Return the sum."""
        return accumulator


@dataclass(frozen=True)
class _Commit:
    output: OutputDataset
    libraries: tuple[str, ...]
    statistics: Statistics | None

    def __call__(self, _impulse: bytes, results: Iterable[Any]) -> str:
        # Files whose names are known only at run time, such as one truecaser per language, arrive as elements of `results`.
        files = tuple(name for element in results if isinstance(element, tuple) for name in element)
        return commit(self.output, libraries=self.libraries, files=files, statistics=self.statistics).fingerprint


class CommitDataset(beam.PTransform):
    """Last step of a pipeline: writes the manifest once its input is complete.

    An input element is the number of a finished shard, or a tuple of paths of other files that belong to the dataset.

    Args:
        output: the dataset.
        libraries: distributions whose versions affect the content.
        statistics: as `schemas.writing.dataset_writer.commit` takes it.
    """

    def __init__(self, output: OutputDataset, *, libraries: tuple[str, ...], statistics: Statistics | None = None) -> None:
        super().__init__()
        output = replace(output, listings=None, states=None)  # Only the launcher compares them, and the graph stays small.
        self._commit = _Commit(output=output, libraries=libraries, statistics=statistics)

    def expand(self, results: beam.PCollection) -> beam.PCollection:
        """Wait for all shards, which arrive as a side input of one small element each, and commit."""
        return results.pipeline | "Once" >> beam.Create([b""]) | "Commit" >> beam.Map(self._commit, beam.pvalue.AsList(results))
