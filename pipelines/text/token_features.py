"""``imagepivot token-features``: captions in, the last layer of a model of text over their tokens out, shard by shard.

A token is read without the escapes of the Moses tokenizer (``&apos;s`` as ``'s``). One call of one function reads a shard of
captions, runs the model over a few thousand at a time, and writes a shard, as with features of images: vectors never pass through
a shuffle.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from apache_beam.metrics import Metrics
from apache_beam.utils.shared import Shared

from pipelines.running.commits import CommitDataset
from pipelines.running.execution import Execution
from pipelines.running.first_worker import Begin, FirstWorker
from pipelines.running.jobs import run_job
from pipelines.running.progress import Meter
from pipelines.text.moses import unescape
from schemas.dataset import Dataset, open_dataset
from schemas.errors import DatasetError, InputError, UsageError
from schemas.fingerprints import Identity
from schemas.kinds import CAPTIONS, schema_of
from schemas.locations import absolute_location
from schemas.manifest import Manifest
from schemas.output import Output
from schemas.parameters import TokenFeaturesParameters
from schemas.storage import Folder
from schemas.writing import open_shard

if TYPE_CHECKING:
    from extractors.tokens.transformer import TokenExtractor, TokenRequest

__all__ = ["ExtractTokenFeatures", "TokenFeaturesJob", "extract_token_features", "token_feature_rows"]

_BLOCK = 2048
"""Captions that are sorted by length together, so that few passes of the model are not full."""

_KEY = tuple(CAPTIONS.names[:5])


@dataclass(frozen=True)
class TokenFeaturesJob:
    """Job of ``imagepivot token-features``.

    Attributes:
        captions: folder of a captions dataset.
        output: folder of the vectors.
        model: name of a model of text in Hugging Face's cache, or its folder, see `extractors.tokens`.
        sub_words: what a token gets: the ``mean`` of the vectors of its sub-words, or the vector of the ``first``.
        max_length: number of tokens after which a caption is cut, as that of `EncodeJob`.
        dtype: type in which vectors are stored, ``float32`` or ``float16``.
        precision: ``fp32`` or ``bf16``; on a GPU also ``tf32`` and ``fp16``.
        device: ``cpu``, ``cuda``, ``cuda:N`` or ``auto``.
        batch_size: captions that a GPU takes at once; changes speed and memory, not the vectors.
        overwrite: start anew, whatever dataset is there.
        verify: compare the digests of what is there, too, and make again what is damaged.

    Raises:
        UsageError: a value is out of range.
    """

    captions: str
    output: str
    model: str
    sub_words: str = "mean"
    max_length: int = 100
    dtype: str = "float32"
    precision: str = "fp32"
    device: str = "auto"
    batch_size: int = 64
    overwrite: bool = False
    verify: bool = False

    def __post_init__(self) -> None:
        for option, value in (("--max-length", self.max_length), ("--batch-size", self.batch_size)):
            if value < 1:
                raise UsageError(f"{option} is {value}, expected 1 or more")

    def request(self) -> TokenRequest:
        """Return what is asked of the model. Importing it loads torch.

        Raises:
            UsageError: a value is unknown.
        """
        from extractors.tokens.transformer import TokenRequest

        return TokenRequest(self.model, self.sub_words, self.dtype, self.precision)  # type: ignore[arg-type]


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
    def __init__(self, job: TokenFeaturesJob, captions: Dataset, output: Output, meter: Meter, threads: int) -> None:
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
        _check_fingerprint(self._job, self._output, self._loaded.extractor)

    def process(self, number: int) -> Iterator[int]:
        total: dict[str, Counter[str]] = {}
        with open_shard(self._output, number) as shard:
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
        yield number


def _check_fingerprint(job: TokenFeaturesJob, output: Output, extractor: TokenExtractor) -> None:
    planned = TokenFeaturesParameters.from_json(output.identity.parameters).model_fingerprint
    if extractor.description.fingerprint != planned:
        raise InputError(
            f"a worker finds another model in {job.model!r}, or has other versions of transformers and tokenizers, than the "
            "machine that planned the run: give all of them the same"
        )


def _check_worker(job: TokenFeaturesJob, output: Output) -> None:
    """Check that this process has the device and the model of a job."""
    _check_fingerprint(job, output, job.request().load(job.device))


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
    output: Output
    meter: Meter = Meter()
    threads: int = 0

    def expand(self, shards: beam.PCollection) -> beam.PCollection:
        """Read each shard on its own: captions and vectors are co-partitioned, so nothing is shuffled."""
        function = _ExtractShardFn(self.job, self.captions, self.output, self.meter, self.threads)
        return shards | "ExtractShard" >> beam.ParDo(function)


def extract_token_features(job: TokenFeaturesJob, execution: Execution = Execution(), meter: Meter = Meter()) -> Manifest:
    """Make a dataset of kind ``token-features`` with as many shards as the captions have.

    Args:
        job: what to make.
        execution: where and how to run. Without a number of workers, one that uses all cores.
        meter: counts captions, for a progress display.

    Returns:
        The manifest of the committed dataset.

    Raises:
        DatasetError: ``job.captions`` is not a captions dataset, or holds none.
        InputError: there is no such model on this machine, or it cannot be used.
        UsageError: the device is not on this machine, or the package transformers is not installed.
    """
    request = job.request()
    files = [("--model", location) for location in request.files()]
    execution.check_locations((("CAPTIONS", job.captions), ("OUTPUT", job.output), *files))
    captions = open_dataset(job.captions, kind="captions")
    if captions.manifest.rows == 0:
        raise DatasetError(f"{job.captions!r} holds no captions, so there is nothing to read: prepare the captions again")
    description = request.load(job.device if execution.runs_here else "cpu").description
    if files and not execution.runs_here:
        job = replace(job, model=absolute_location(job.model))
    identity = Identity(
        kind="token-features",
        parameters=TokenFeaturesParameters(
            feature=description.spec,
            model=description.parameters,
            model_fingerprint=description.fingerprint,
            max_length=job.max_length,
        ).to_json(),
        inputs=({"name": "captions", "fingerprint": captions.fingerprint},),
        shards=captions.num_shards,
    )
    output = Output(folder=Folder(job.output), identity=identity)
    if execution.is_local and not execution.workers:
        execution = replace(execution, workers=1)
    workers = execution.local_workers if execution.is_local else 1
    threads = max(1, (os.cpu_count() or 1) // workers) if workers > 1 else 0

    def build(pipeline: beam.Pipeline, finished: frozenset[int], check: FirstWorker | None) -> None:
        missing = [shard for shard in range(captions.num_shards) if shard not in finished]
        _ = (
            pipeline
            | "ListShards" >> Begin(missing, check)
            | "SpreadShards" >> beam.Reshuffle()  # Fusion break: the shards are made by all workers.
            | "ExtractTokenFeatures" >> ExtractTokenFeatures(job, captions, output, meter, threads)
            | "CommitDataset" >> CommitDataset(output, libraries=("apache-beam", "tokenizers", "torch", "transformers"))
        )

    return run_job(
        output,
        build,
        execution=execution,
        extras=("pipelines", "extractors", "bert"),
        check=partial(_check_worker, job, output),
        overwrite=job.overwrite,
        verify=job.verify,
        meter=meter,
    )
