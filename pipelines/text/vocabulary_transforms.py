"""The transforms of ``imagepivot vocabulary``: shards of captions to counts of tokens, and these to a vocabulary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import apache_beam as beam
import pyarrow.parquet as pq

from pipelines.jobs import VocabularyJob
from pipelines.running.commits import CommitDataset, SumCounters
from pipelines.running.first_worker import Begin, FirstWorker, spread_shards
from pipelines.running.meter import Meter
from pipelines.text.counting import chosen_vocabulary, count_tokens
from schemas.dataset import Dataset
from schemas.storage.storage_errors import content_errors
from schemas.vocabulary import TEXT_NAMES, Vocabulary
from schemas.writing.output import OutputDataset
from schemas.writing.shard_writer import open_shard


@dataclass(eq=False)
class CountTokens(beam.PTransform):
    """Numbers of shards to pairs ((portion, split, language), counts of tokens).

    Attributes:
        captions: the captions dataset.
        meter: counts captions.
    """

    captions: Dataset
    meter: Meter = Meter()

    def expand(self, shards: beam.PCollection) -> beam.PCollection:
        """Count each shard on the worker that reads it; only counts are shuffled."""
        return (
            shards
            | "CountShard" >> beam.FlatMap(_count_shard, self.captions, self.meter)
            | "SumCounts" >> beam.CombinePerKey(SumCounters())
        )


def _count_shard(shard: int, captions: Dataset, meter: Meter) -> Iterator[tuple[tuple[str, str, str], Counter[str]]]:
    yield from count_tokens(captions, shard).items()
    meter.add(captions=captions.manifest.shards[shard].rows)
    meter.flush()


@dataclass(eq=False)
class BuildVocabulary(beam.PTransform):
    """Pairs ((portion, split, language), counts) to one vocabulary, written with its statistics.

    Attributes:
        job: threshold, scope and the captions that count.
        output: the dataset.
    """

    job: VocabularyJob
    output: OutputDataset

    def expand(self, counts: beam.PCollection) -> beam.PCollection:
        """Pass all counts to one function as a side input: a vocabulary is one value and must fit in memory anyway."""
        return (
            counts.pipeline
            | "Once" >> beam.Create([b""])
            | "Write" >> beam.Map(_write_vocabulary, counts=beam.pvalue.AsDict(counts), job=self.job, output=self.output)
        )


def _write_vocabulary(
    _impulse: bytes, counts: Mapping[tuple[str, str, str], Mapping[str, int]], job: VocabularyJob, output: OutputDataset
) -> tuple[str]:
    vocabulary, statistics = chosen_vocabulary(job, counts)
    output.folder.write(TEXT_NAMES[0], vocabulary.to_text().encode())
    with open_shard(output, 0) as shard:
        shard.write(vocabulary.to_table())
        shard.statistics = statistics
    return (TEXT_NAMES[0],)


def _write_text(name: str, output: OutputDataset) -> tuple[str]:
    """Write the plain text of a vocabulary whose shard is there."""
    path = output.folder.path_of(output.name(0))
    with output.folder.open(output.name(0)) as file, content_errors(path):
        vocabulary = Vocabulary.from_table(pq.ParquetFile(file).read())
    output.folder.write(name, vocabulary.to_text().encode())
    return (name,)


def build_counts(
    pipeline: beam.Pipeline,
    finished: frozenset[int] = frozenset(),
    check: FirstWorker | None = None,
    *,
    job: VocabularyJob,
    captions: Dataset,
    output: OutputDataset,
    meter: Meter = Meter(),
) -> None:
    """Add the steps of a job to an empty pipeline.

    Args:
        pipeline: the pipeline.
        finished: shards that an earlier run finished.
        check: what the first worker on another machine checks; None on this one.
        job: what to make.
        captions: its captions.
        output: where, as `plan_vocabulary` returns it.
        meter: counts captions.
    """
    if finished:
        written = pipeline | "VocabularyIsThere" >> Begin([TEXT_NAMES[0]], check) | "WriteText" >> beam.Map(_write_text, output)
    else:
        counts = spread_shards(pipeline, range(captions.num_shards), check) | "CountTokens" >> CountTokens(captions, meter)
        written = counts | "BuildVocabulary" >> BuildVocabulary(job, output)
    _ = written | "CommitDataset" >> CommitDataset(output, libraries=("apache-beam",))
