"""Pipeline jobs: the workers write the shards of a dataset, and the last step of the pipeline commits it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import apache_beam as beam

from pipelines.running.first_worker import SIGN, FirstWorker
from pipelines.running.runner import Execution, run_pipeline
from schemas.errors import DatasetError
from schemas.manifest import Manifest
from schemas.output import Output
from schemas.storage import TEMPORARY_MARK, Folder
from schemas.survey import Update
from schemas.writing import Statistics, commit, complete_dataset

__all__ = ["CommitDataset", "SumCounters", "run_job"]


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
    output: Output
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
        statistics: as `schemas.writing.commit` takes it.
    """

    def __init__(self, output: Output, *, libraries: tuple[str, ...], statistics: Statistics | None = None) -> None:
        super().__init__()
        self._commit = _Commit(output=output, libraries=libraries, statistics=statistics)

    def expand(self, results: beam.PCollection) -> beam.PCollection:
        """Wait for all shards, which arrive as a side input of one small element each, and commit."""
        return results.pipeline | "Once" >> beam.Create([b""]) | "Commit" >> beam.Map(self._commit, beam.pvalue.AsList(results))


def run_job(
    output: Output,
    build: Callable[[beam.Pipeline, frozenset[int], FirstWorker | None], object],
    *,
    execution: Execution,
    extras: Iterable[str] = ("pipelines",),
    check: Callable[[], None] | None = None,
    overwrite: bool,
    verify: bool = False,
    update: Update | None = None,
    retry_failed: bool = False,
) -> Manifest:
    """Run a pipeline that writes a dataset, or the part of it that an earlier run did not finish.

    Args:
        output: folder and identity of the dataset.
        build: adds the transforms, given the numbers of the shards that are already finished, and what `Begin` does first.
        execution: where and how to run.
        extras: names of the extras that workers on other machines need.
        check: checks on the first worker on another machine what only this work needs.
        overwrite: as `schemas.writing.complete_dataset` takes it.
        verify: as `schemas.writing.complete_dataset` takes it.
        update: as `schemas.writing.complete_dataset` takes it.
        retry_failed: as `schemas.writing.complete_dataset` takes it.

    Returns:
        The manifest of the committed dataset.

    Raises:
        DatasetError: the folder is in use, or holds data that must not be lost.
        ImagepivotError: the pipeline met an error that the user can fix.
    """
    folder = output.folder
    first = None if execution.runs_here else FirstWorker.of_launcher(folder, check)

    def has_started() -> bool:
        with suppress(DatasetError):  # A store that does not answer now may do so in a moment.
            return folder.size(SIGN) is not None
        return False

    def run(finished: frozenset[int]) -> None:
        if first is not None:
            folder.delete(SIGN)  # A launcher that was killed has left it.
        try:
            run_pipeline(
                lambda pipeline: build(pipeline, finished, first),
                execution,
                extras=extras,
                has_started=has_started,
            )
        except BaseException:
            _delete_temporaries(folder)  # The commit does so where a run ends well.
            raise
        finally:
            if first is not None:
                folder.delete(SIGN)

    return complete_dataset(output, run, overwrite=overwrite, verify=verify, update=update, retry_failed=retry_failed)


def _delete_temporaries(folder: Folder) -> None:
    """Delete what workers of a run that failed left in a local folder; in a store nothing is ever incomplete."""
    if folder.is_local:
        for name in folder.names():
            if TEMPORARY_MARK in name:
                folder.delete(name)
