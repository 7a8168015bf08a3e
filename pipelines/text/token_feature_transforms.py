"""The transforms of ``imagepivot token-features``: numbers of shards of captions to shards of vectors of their tokens.

A token is read without the escapes of the Moses tokenizer (``&apos;s`` as ``'s``). One call of one function reads a shard of
captions, runs the model over a few thousand at a time, and writes a shard, as with features of images: vectors never pass through
a shuffle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from apache_beam.metrics import Metrics
from apache_beam.utils.shared import Shared

from pipelines.jobs import TokenFeaturesJob
from pipelines.running.commits import CommitDataset
from pipelines.running.first_worker import FirstWorker, spread_shards
from pipelines.running.meter import Meter
from pipelines.text.moses import unescape
from schemas.dataset import Dataset
from schemas.kinds import CAPTIONS, schema_of
from schemas.writing.dataset_writer import write_shards
from schemas.writing.output import OutputDataset
from schemas.writing.shard_writer import ShardWriter

if TYPE_CHECKING:
    from extractors.tokens.transformer import TokenExtractor

_BLOCK = 2048
"""Captions that are sorted by length together, so that few passes of the model are not full."""

_KEY = tuple(CAPTIONS.names[:5])


def token_feature_rows(
    captions: pa.Table, extractor: TokenExtractor, max_length: int, batch_size: int = 64
) -> tuple[pa.Table, list[dict[str, str]], dict[str, Any]]:
    """Return the vectors of captions.

    Args:
        captions: rows of kind ``captions``.
        extractor: the model.
        max_length: number of tokens after which a caption is cut.
        batch_size: captions that a GPU takes at once.

    Returns:
        Rows of kind ``token-features`` in the same order; captions whose vectors are not finite in the type that is stored, as
        rows of kind ``failures``; and statistics by language.
    """
    spec = extractor.description.spec
    lists = pc.list_slice(captions["tokens"].combine_chunks(), 0, max_length).to_pylist()
    tokens = [[unescape(token) for token in of_caption] for of_caption in lists]
    languages = captions["language"].to_pylist()
    statistics: dict[str, Counter[str]] = {}
    every = []
    for language, of_caption, cut in zip(languages, tokens, _cut(captions, max_length), strict=True):
        parts, counts = extractor.read([of_caption])
        every += parts
        counts.update(captions=1, tokens=len(of_caption), captions_cut=cut)
        statistics.setdefault(language, Counter()).update(counts)
    vectors = extractor.extract(every, batch_size)
    kept = np.array([bool(np.isfinite(of_caption).all()) for of_caption in vectors], bool)
    failures = [_failure(captions, row, spec.dtype) for row in np.flatnonzero(~kept).tolist()]
    rows = captions.filter(pa.array(kept)) if failures else captions
    return _table(rows, [vectors[row] for row in np.flatnonzero(kept).tolist()], extractor), failures, statistics


def _cut(captions: pa.Table, max_length: int) -> Sequence[int]:
    return [int(length > max_length) for length in pc.list_value_length(captions["tokens"]).to_pylist()]


def _table(captions: pa.Table, vectors: Sequence[np.ndarray], extractor: TokenExtractor) -> pa.Table:
    spec = extractor.description.spec
    schema = schema_of("token-features", spec)
    lengths = np.array([len(of_caption) for of_caption in vectors], np.int32)
    flat = np.concatenate([np.zeros((0, spec.width), spec.dtype), *vectors]).ravel()
    offsets = np.append(0, np.cumsum(lengths, dtype=np.int64) * spec.width).astype(np.int32)
    column = pa.ListArray.from_arrays(offsets, flat).cast(schema.field("vectors").type)
    return pa.table([*(captions[name].combine_chunks() for name in _KEY), pa.array(lengths), column], schema=schema)


def _failure(captions: pa.Table, row: int, dtype: str) -> dict[str, str]:
    image_id, language, portion, index = (captions[name][row].as_py() for name in _KEY[:4])
    return {
        "key": f"{image_id}/{language}/{portion}/{index}",
        "uri": "",
        "stage": "extract",
        "reason": "not_finite",
        "message": f"a vector of a token is infinite, or no number, as {dtype}",
    }


class _Loaded:
    """The model of a process. Beam's ``Shared`` keeps weak references, which need a class that allows them."""

    def __init__(self, job: TokenFeaturesJob) -> None:
        self.extractor = job.request().load(job.device)


class _ExtractShardFn(beam.DoFn):
    def __init__(self, job: TokenFeaturesJob, captions: Dataset, output: OutputDataset, meter: Meter, threads: int) -> None:
        self._job = job
        self._captions = captions
        self._output = output
        self._meter = meter
        self._threads = threads
        self._shared = Shared()
        self._counter = Metrics.counter("ExtractTokenFeatures", "captions_read")

    def setup(self) -> None:
        import torch

        if self._threads:
            torch.set_num_threads(self._threads)
        self._loaded = self._shared.acquire(partial(_Loaded, self._job))
        self._job.check_model(self._output, self._loaded.extractor)

    def process(self, number: int) -> Iterator[int]:
        yield from write_shards(self._output, [number], self._write)

    def _write(self, number: int, shard: ShardWriter) -> None:
        total: dict[str, Counter[str]] = {}
        for batch in self._captions.shard_batches(number, batch_size=_BLOCK):
            rows, failures, statistics = token_feature_rows(
                pa.Table.from_batches([batch]), self._loaded.extractor, self._job.max_length, self._job.batch_size
            )
            shard.write(rows)
            shard.add_failures(failures)
            for language, counts in statistics.items():
                total.setdefault(language, Counter()).update(counts)
            self._meter.add(captions=batch.num_rows, failed=len(failures))
        shard.statistics = total
        self._counter.inc(shard.rows)
        self._meter.flush()


@dataclass(eq=False)
class ExtractTokenFeatures(beam.PTransform):
    """Numbers of shards to shards of token features on disk; the output holds the number of each shard once it is written.

    Attributes:
        job: the model and how to run it.
        captions: the captions dataset.
        output: the dataset to write.
        meter: counts captions.
        threads: torch's threads in each worker; 0 for torch's own number.
    """

    job: TokenFeaturesJob
    captions: Dataset
    output: OutputDataset
    meter: Meter = Meter()
    threads: int = 0

    def expand(self, shards: beam.PCollection) -> beam.PCollection:
        """Read each shard on its own: captions and vectors are co-partitioned, so nothing is shuffled."""
        function = _ExtractShardFn(self.job, self.captions, self.output, self.meter, self.threads)
        return shards | "ExtractShard" >> beam.ParDo(function)


def build_token_features(
    pipeline: beam.Pipeline,
    finished: frozenset[int] = frozenset(),
    check: FirstWorker | None = None,
    *,
    job: TokenFeaturesJob,
    captions: Dataset,
    output: OutputDataset,
    meter: Meter = Meter(),
    threads: int = 0,
) -> None:
    """Add the steps of a job to an empty pipeline.

    Args:
        pipeline: the pipeline.
        finished: shards that an earlier run finished.
        check: what the first worker on another machine checks; None on this one.
        job: what to make.
        captions: its captions.
        output: where.
        meter: counts captions.
        threads: as in `ExtractTokenFeatures`.
    """
    missing = [shard for shard in range(captions.num_shards) if shard not in finished]
    _ = (
        spread_shards(pipeline, missing, check)
        | "ExtractTokenFeatures" >> ExtractTokenFeatures(job, captions, output, meter, threads)
        | "CommitDataset" >> CommitDataset(output, libraries=("apache-beam", "tokenizers", "torch", "transformers"))
    )
