"""Jobs that a pipeline does: a dataset whose shards are written by workers, committed at the pipeline's end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import apache_beam as beam

from pipelines.running.runner import Execution, run_pipeline
from schemas.manifest import Manifest
from schemas.output import Output
from schemas.writing import Statistics, commit, complete_dataset

__all__ = ["CommitDataset", "SumCounters", "run_job"]


class SumCounters(beam.CombineFn):
    """Adds up counters. One accumulator per key holds the distinct items of that key, never the corpus."""

    def create_accumulator(self) -> Counter[str]:
        """Return an empty counter."""
        return Counter()

    def add_input(self, accumulator: Counter[str], element: Mapping[str, int]) -> Counter[str]:
        """Add one counter."""
        accumulator.update(element)
        return accumulator

    def merge_accumulators(self, accumulators: Iterable[Counter[str]]) -> Counter[str]:
        """Add all counters."""
        total: Counter[str] = Counter()
        for accumulator in accumulators:
            total.update(accumulator)
        return total

    def extract_output(self, accumulator: Counter[str]) -> Counter[str]:
        """Return the sum."""
        return accumulator


@dataclass(frozen=True)
class _Commit:
    output: Output
    libraries: tuple[str, ...]
    statistics: Statistics | None

    def __call__(self, _impulse: bytes, done: Iterable[Any]) -> str:
        # Files that are known only at run time (one truecaser per language, say) come as elements of `done`.
        files = tuple(name for element in done if isinstance(element, tuple) for name in element)
        return commit(self.output, libraries=self.libraries, files=files, statistics=self.statistics).fingerprint


class CommitDataset(beam.PTransform):
    """Writes the manifest when its input is complete.

    The input's elements are numbers of finished shards, or tuples with paths of other files that belong to the dataset.

    Args:
        output: the dataset.
        libraries: distributions whose versions matter to the content.
        statistics: as `schemas.writing.commit` takes it.
    """

    def __init__(self, output: Output, *, libraries: tuple[str, ...], statistics: Statistics | None = None) -> None:
        super().__init__()
        self._commit = _Commit(output=output, libraries=libraries, statistics=statistics)

    def expand(self, done: beam.PCollection) -> beam.PCollection:
        """Wait for all shards, which come as a side input (one small element each), and commit."""
        return done.pipeline | "Once" >> beam.Impulse() | "Commit" >> beam.Map(self._commit, beam.pvalue.AsList(done))


def run_job(
    output: Output,
    build: Callable[[beam.Pipeline, frozenset[int]], object],
    *,
    execution: Execution,
    overwrite: bool,
    update: bool = False,
    retry_failed: bool = False,
) -> Manifest:
    """Run a pipeline that writes a dataset, or what an earlier run left of it to do.

    Args:
        output: folder and identity of the dataset.
        build: adds the transforms, given the numbers of the shards that are finished already.
        execution: where and how to run.
        overwrite: as `schemas.writing.complete_dataset` takes it.
        update: likewise.
        retry_failed: likewise.

    Returns:
        The manifest of the committed dataset.

    Raises:
        DatasetError: the folder is in use, or holds something that must not be lost.
        ImagepivotError: an error that the pipeline met and a user can mend.
    """

    def run(finished: frozenset[int]) -> None:
        run_pipeline(lambda pipeline: build(pipeline, finished), execution)

    return complete_dataset(output, run, overwrite=overwrite, update=update, retry_failed=retry_failed)
