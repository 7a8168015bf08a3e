"""``imagepivot token-features``: last hidden states of a transformer for tokens.

The model reads tokens without the escapes of the Moses tokenizer (``&apos;s`` as ``'s``). Vectors never pass through a shuffle.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.jobs import TokenFeaturesJob
from pipelines.running.execution import Execution
from pipelines.running.job import run_per_shard
from pipelines.running.meter import Meter, failure_counts
from pipelines.running.per_shard import Share
from pipelines.text.moses import unescape
from pipelines.text.token_counts import open_captions_dataset
from schemas.dataset import Dataset
from schemas.failures import failure_row
from schemas.keys import CaptionKey
from schemas.kinds import CAPTIONS, schema_of
from schemas.manifest import Manifest
from schemas.options import takes_fields
from schemas.parameters import TokenFeaturesParameters
from schemas.storage.folder import Folder
from schemas.storage.locations import absolute_location
from schemas.writing.output import OutputDataset
from schemas.writing.reuse_policy import ReusePolicy
from schemas.writing.shard_writer import ShardWriter

if TYPE_CHECKING:
    from extractors.tokens.transformer import TokenExtractor

_BLOCK = 2048
"""Captions that are sorted by length and batched together: larger blocks have fewer partial batches."""

_KEY = tuple(CAPTIONS.names[:5])


@takes_fields(TokenFeaturesJob)
def extract_token_features(job: TokenFeaturesJob, execution: Execution = Execution(), meter: Meter = Meter()) -> Manifest:
    """Write a dataset of kind ``token-features``, and return its manifest.

    It has as many shards as the captions. By default one worker uses all cores.

    Raises:
        DatasetError: ``job.captions`` is not a captions dataset, or has no captions.
        InputError: the model is missing or unusable.
        UsageError: this machine lacks the device, or the package transformers.
    """
    files = [("--model", location) for location in job.files()]
    execution.check_locations((("CAPTIONS", job.captions), ("OUTPUT", job.output), *files))
    captions = open_captions_dataset(job.captions)
    description = job.request().describe(job.device if execution.runs_here else "cpu")
    if files and not execution.runs_here:
        job = replace(job, model=absolute_location(job.model))
    output = OutputDataset(
        folder=Folder(job.output),
        kind="token-features",
        parameters=TokenFeaturesParameters(
            feature=description.spec,
            model=description.parameters,
            model_fingerprint=description.fingerprint,
            max_length=job.max_length,
        ).to_json(),
        shards=captions.num_shards,
        notes=job.notes.to_json(),
        sample_outputs=partial(job.request().sample_outputs, job.device) if execution.runs_here else None,
        max_failures=execution.commit_limit,
    ).made_from(captions)
    if execution.is_local and not execution.workers:
        execution = replace(execution, workers=1)
    workers = execution.local_workers if execution.is_local else 1
    threads = max(1, (os.cpu_count() or 1) // workers) if workers > 1 else 0

    return run_per_shard(
        output,
        TokenFeatureExtractor(job, captions, output, meter, threads),
        ReusePolicy(overwrite=job.overwrite, verify=job.verify),
        execution,
        libraries=("apache-beam", "tokenizers", "torch", "transformers"),
        extras=("text", "extractors", "bert"),
        check_launcher=job.check_device if execution.is_local else None,
        check_worker=partial(_check_worker, job, output),
        meter=meter,
    )


def _check_worker(job: TokenFeaturesJob, output: OutputDataset) -> None:
    """Check the device and the model of a job in this process."""
    job.check_model(output, job.request().load(job.device))


@dataclass(eq=False)
class TokenFeatureExtractor:
    """Extractor of token features: a `pipelines.running.per_shard.ShardWork`.

    Attributes:
        threads: torch threads in each worker; 0: torch's default.
    """

    job: TokenFeaturesJob
    captions: Dataset
    output: OutputDataset
    meter: Meter = Meter()
    threads: int = 0

    def set_up(self, share: Share) -> None:
        """Load the model, one for all threads of a process.

        Raises:
            InputError: it differs from the model of the output's fingerprint.
        """
        import torch

        from extractors.sample_outputs import sample_outputs

        if self.threads:
            torch.set_num_threads(self.threads)
        self._extractor: TokenExtractor = share(partial(self.job.request().load, self.job.device))
        self.job.check_model(self.output, self._extractor)
        self._sample_outputs = sample_outputs(self._extractor)

    def write(self, shard: int, writer: ShardWriter) -> None:
        """Write the token features of a shard."""
        self.meter.start_shard(shard)
        total: dict[str, Counter[str]] = {}
        for batch in self.captions.shard_batches(shard, batch_size=_BLOCK):
            rows, failures, statistics = token_feature_rows(
                pa.Table.from_batches([batch]), self._extractor, self.job.max_length, self.job.batch_size
            )
            writer.write(rows)
            writer.add_failures(failures)
            for language, counts in statistics.items():
                total.setdefault(language, Counter()).update(counts)
            reasons = Counter(failure["reason"] for failure in failures)
            self.meter.add(captions=batch.num_rows, **failure_counts(reasons))
        writer.statistics, writer.sample_outputs = total, self._sample_outputs
        self.meter.finish_shard()


def token_feature_rows(
    captions: pa.Table, extractor: TokenExtractor, max_length: int, batch_size: int = 64
) -> tuple[pa.Table, list[dict[str, str]], dict[str, Any]]:
    """Extract the vectors of captions, each truncated to ``max_length`` tokens.

    Returns:
        Rows of kind ``token-features`` in the same order; captions with vectors that are not finite in the stored dtype, as rows
        of kind ``failures``; and statistics by language.
    """
    spec = extractor.description.spec
    lists = pc.list_slice(captions["tokens"].combine_chunks(), 0, max_length).to_pylist()
    tokens = [list(map(unescape, caption)) for caption in lists]
    languages = captions["language"].to_pylist()
    cuts = pc.greater(pc.list_value_length(captions["tokens"]), max_length).to_pylist()
    statistics: dict[str, Counter[str]] = {}
    windows = []
    for language, caption, is_cut in zip(languages, tokens, cuts, strict=True):
        parts, counts = extractor.read([caption])
        windows += parts
        counts.update(captions=1, tokens=len(caption), captions_cut=int(is_cut))
        statistics.setdefault(language, Counter()).update(counts)
    vectors = extractor.extract(windows, batch_size)
    is_finite = np.array([bool(np.isfinite(caption).all()) for caption in vectors], bool)
    message = f"a vector of a token is infinite, or no number, as {spec.dtype}"
    invalid = captions.select(_KEY[:4]).filter(pa.array(~is_finite)).to_pylist()
    failures = [failure_row(str(CaptionKey(**row)), "extract", "not_finite", message) for row in invalid]
    rows = captions.filter(pa.array(is_finite)) if failures else captions
    table = _build_table(rows, [vectors[row] for row in np.flatnonzero(is_finite).tolist()], extractor)
    return table, failures, statistics


def _build_table(captions: pa.Table, vectors: Sequence[np.ndarray], extractor: TokenExtractor) -> pa.Table:
    spec = extractor.description.spec
    schema = schema_of("token-features", spec)
    lengths = np.array([len(caption) for caption in vectors], np.int32)
    flat = np.concatenate([np.zeros((0, spec.width), spec.dtype), *vectors]).ravel()
    offsets = np.append(0, np.cumsum(lengths, dtype=np.int64) * spec.width).astype(np.int32)
    column = pa.ListArray.from_arrays(offsets, flat).cast(schema.field("vectors").type)
    return pa.table([*(captions[name].combine_chunks() for name in _KEY), pa.array(lengths), column], schema=schema)
