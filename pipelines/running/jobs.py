"""The end of every pipeline: the manifest, written when all shards are there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import apache_beam as beam

from pipelines.running.runner import Execution, run_pipeline
from schemas.manifest import Manifest
from schemas.output import Output, commit, hold
from schemas.shards import Footer, failures_name

__all__ = ["CommitDataset", "run_job", "sum_statistics"]

Statistics = Callable[[list[Footer]], Mapping[str, Any]]


def sum_statistics(footers: list[Footer]) -> dict[str, Any]:
    """Adds up the statistics of shards: numbers at the same place of nested mappings."""
    total: dict[str, Any] = {}
    for footer in footers:
        _add(total, footer.statistics)
    return total


def _add(total: dict[str, Any], more: Mapping[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, Mapping):
            _add(total.setdefault(key, {}), value)
        else:
            total[key] = total.get(key, 0) + value


@dataclass(frozen=True)
class _Commit:
    output: Output
    libraries: tuple[str, ...]
    files: tuple[str, ...]
    statistics: Statistics

    def __call__(self, _impulse: bytes, done: Iterable[Any]) -> str:
        # The files that are known only at run time (one truecaser a language, say) come as elements of `done`.
        found = (name for each in done for name in (each if isinstance(each, tuple) else ()))
        manifest = commit(
            self.output,
            statistics=self.statistics,
            libraries=self.libraries,
            files=(*self.files, *found),
        )
        return manifest.fingerprint


class CommitDataset(beam.PTransform):
    """Writes the manifest when its input is complete.

    The input's elements are numbers of finished shards, or tuples with paths of other files that belong to the dataset.
    """

    def __init__(
        self,
        output: Output,
        *,
        libraries: tuple[str, ...],
        files: tuple[str, ...] = (),
        statistics: Statistics = sum_statistics,
    ) -> None:
        super().__init__()
        self._commit = _Commit(output=output, libraries=libraries, files=files, statistics=statistics)

    def expand(self, done: beam.PCollection) -> beam.PCollection:
        """Waits for all shards, which come as a side input (one small element each), and commits."""
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
    """Runs a pipeline that writes a dataset, or what an earlier run left of it to do.

    Args:
        output: folder and identity of the dataset.
        build: adds the transforms, given the numbers of the shards that are finished already.
        execution: where and how to run.
        overwrite: replace a dataset of another fingerprint.
        update: add inputs that are new to the shards that are there.
        retry_failed: make the shards that have failures again.

    Returns:
        The manifest of the committed dataset.

    Raises:
        DatasetError: the folder is in use, or holds something that must not be lost.
        ImagepivotError: what the pipeline met.
    """
    with hold(output.folder):
        manifest = output.complete()
        if manifest is not None and not (retry_failed and manifest.failed):
            return manifest
        output.prepare(overwrite=overwrite, update=update)
        finished = output.finished()
        if retry_failed:
            names = set(output.folder.names())
            finished = frozenset(number for number in finished if failures_name(output.names()[number]) not in names)
        run_pipeline(lambda pipeline: build(pipeline, finished), execution)
        return Manifest.read(output.folder)
