"""``imagepivot text-features``: vectors of captions, or of their tokens.

A transformer gives its last hidden states for tokens (kind ``token-features``); it reads them without the
escapes of the Moses tokenizer (``&apos;s`` as ``'s``). A sentence encoder gives a vector per caption (kind
``embeddings``); it reads the raw text. Vectors never pass through a shuffle.
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

from extractors.tokens.request import OPEN_CLIP
from pipelines.jobs import TextFeaturesJob
from pipelines.running.execution import Execution
from pipelines.running.job import run_per_shard
from pipelines.running.meter import Meter, failure_counts
from pipelines.running.process_pool import ShardWorker, Share
from pipelines.text.moses import unescape
from pipelines.text.token_counts import open_captions_dataset, sum_counters
from schemas.console.tables import Column, Row, Table
from schemas.dataset import Dataset
from schemas.failures import failure_row
from schemas.keys import CaptionKey
from schemas.kinds import CAPTIONS, schema_of
from schemas.manifest import Manifest
from schemas.options import takes_fields
from schemas.storage.folder import Folder
from schemas.writing.dataset_writer import add_statistics, read_compatible
from schemas.writing.output import OutputDataset
from schemas.writing.reuse_policy import ReusePolicy
from schemas.writing.shard_writer import open_shard

if TYPE_CHECKING:
    from extractors.tokens.sentence_encoders import SentenceModel
    from extractors.tokens.transformer import TokenExtractor

_BLOCK = 2048
"""Captions that are sorted by length and batched together: larger blocks have fewer partial batches."""

_CUT = "cut"
_KEY = tuple(CAPTIONS.names[:5])


@takes_fields(TextFeaturesJob)
def extract_text_features(job: TextFeaturesJob, execution: Execution = Execution(), meter: Meter = Meter()) -> Manifest:
    """Write a dataset of kind ``token-features`` or ``embeddings``.

    It has as many shards as the captions. By default one worker uses all cores.

    Raises:
        DatasetError: ``job.captions`` is not a captions dataset, or has no captions.
        InputError: the model is missing or unusable.
        UsageError: this machine lacks the device or a package.
    """
    job, captions, output = _plan(job, execution)
    execution = replace(execution, default_workers=lambda: 1)
    workers = execution.local_workers if execution.is_local else 1
    threads = max(1, (os.cpu_count() or 1) // workers) if workers > 1 else 0

    is_open_clip = job.model.startswith(OPEN_CLIP)
    joint_libraries = ("open_clip_torch", "timm") if is_open_clip else ()
    return run_per_shard(
        TextFeatureExtractor(job, captions, output, meter, threads),
        ReusePolicy(overwrite=job.overwrite, verify=job.verify),
        execution,
        libraries=("apache-beam", *joint_libraries, "tokenizers", "torch", "transformers"),
        extras=("text", "extractors", "bert", *(("clip",) if is_open_clip else ())),
        check_launcher=job.check_device if execution.is_local else None,
        check_worker=partial(_check_worker, job, output),
        meter=meter,
    )


def plan_text_features(job: TextFeaturesJob, execution: Execution = Execution()) -> Table:
    """Return a table of the work of a job, without running its model.

    For a sentence encoder it has the longest caption and the number of cut ones. For errors see `extract_text_features`.
    """
    job, captions, output = _plan(job, execution)
    job.check_device()
    output.folder.check_writable()
    missing = output.missing(read_compatible(output, ReusePolicy(overwrite=job.overwrite, verify=job.verify)).finished_shards())
    rows: list[Row] = [
        ("shards to write", f"{len(missing):,} of {output.shards:,}"),
        ("captions", sum(captions.manifest.shards[shard].rows for shard in missing)),
    ]
    if output.kind == "embeddings":
        encoder: Any = job.request().load("cpu")
        texts = (table["text"].to_pylist() for table in map(captions.shard, missing))
        counts = sum_counters(_length_counts(encoder.read(shard_texts)[1], encoder.max_length) for shard_texts in texts)
        rows.append(("longest caption, sub-words", max(map(int, counts.keys() - {_CUT}), default=0)))
        rows.append((f"captions cut after {encoder.max_length:,} sub-words", counts[_CUT]))
    return Table(("dry run", Column("", ",")), rows)


def _plan(job: TextFeaturesJob, execution: Execution) -> tuple[TextFeaturesJob, Dataset, OutputDataset]:
    """Check a job; return the job for its workers, the captions and the output."""
    files = [("--model", location) for location in job.files()]
    execution.check_locations((("CAPTIONS", job.captions), ("OUTPUT", job.output), *files))
    captions = open_captions_dataset(job.captions)
    description = job.request().describe(job.device if execution.runs_here else "cpu")
    if files and not execution.runs_here:
        job = job.located()
    output = OutputDataset(
        folder=Folder(job.output),
        kind=description.kind,
        parameters=job.parameters(description),
        shards=captions.num_shards,
        notes=job.notes.to_json(),
        sample_outputs=partial(job.request().sample_outputs, job.device) if execution.runs_here else None,
        max_failures=execution.commit_limit,
    ).made_from(captions)
    return job, captions, output


def _check_worker(job: TextFeaturesJob, output: OutputDataset) -> None:
    """Check the device and the model of a job in this process."""
    job.check_model(output, job.request().load(job.device))


@dataclass(eq=False)
class TextFeatureExtractor(ShardWorker):
    """Extractor of text vectors.

    Attributes:
        threads: torch threads in each worker; 0: torch's default.
    """

    job: TextFeaturesJob
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
        self._extractor: Any = share(partial(self.job.request().load, self.job.device))
        self.job.check_model(self.output, self._extractor)
        self._sample_outputs = sample_outputs(self._extractor)

    def write(self, shard: int) -> int:
        """Write the vectors of a shard."""
        self.meter.start_shard(shard)
        total: dict[str, Any] = {}
        with open_shard(self.output, shard) as writer:
            for batch in self.captions.shard_batches(shard, batch_size=_BLOCK):
                table = pa.Table.from_batches([batch])
                rows, failures, statistics = (
                    text_vector_rows(table, self._extractor, self.job.batch_size)
                    if self.output.kind == "embeddings"
                    else token_feature_rows(table, self._extractor, self.job.max_tokens, self.job.batch_size)
                )
                writer.write(rows)
                writer.add_failures(failures)
                add_statistics(total, statistics)
                reasons = Counter(failure["reason"] for failure in failures)
                self.meter.add(captions=batch.num_rows, **failure_counts(reasons))
            writer.statistics, writer.sample_outputs = total, self._sample_outputs
        self.meter.finish_shard()
        return shard


def token_feature_rows(
    captions: pa.Table, extractor: TokenExtractor, max_length: int, batch_size: int = 64
) -> tuple[pa.Table, list[dict[str, str]], dict[str, Any]]:
    """Extract the vectors of captions, each truncated to ``max_length`` tokens.

    Returns:
        Rows of kind ``token-features`` in the same order; captions with vectors that are not finite in the
        stored dtype, as rows of kind ``failures``; and statistics by language.
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
    rows, failures = _split_failures(captions, is_finite, f"a vector of a token is infinite, or no number, as {spec.dtype}")
    table = _build_table(rows, [vectors[row] for row in np.flatnonzero(is_finite).tolist()], extractor)
    return table, failures, statistics


def text_vector_rows(
    captions: pa.Table, encoder: SentenceModel, batch_size: int = 64
) -> tuple[pa.Table, list[dict[str, str]], dict[str, Any]]:
    """Encode the raw texts of captions, cut at the length of the model.

    Returns:
        Rows of kind ``embeddings``, and the others of `token_feature_rows`; statistics count captions by number of sub-words.
    """
    spec = encoder.description.spec
    ids, lengths = encoder.read(captions["text"].to_pylist())
    vectors = spec.rounded(encoder.encode_ids(ids, batch_size))
    languages = np.array(captions["language"].to_pylist(), dtype=object)
    statistics: dict[str, Any] = {}
    for language in dict.fromkeys(languages):
        counts = _length_counts(np.array(lengths)[languages == language].tolist(), encoder.max_length)
        cut = counts.pop(_CUT, 0)
        statistics[language] = {"captions": counts.total(), "captions_cut": cut, "lengths": counts}
    is_finite = np.isfinite(vectors).all(axis=1)
    rows, failures = _split_failures(captions, is_finite, f"a value of the vector is infinite, or no number, as {spec.dtype}")
    schema = schema_of("embeddings", spec)
    flat = pa.array(np.ascontiguousarray(vectors[is_finite]).ravel())
    column = pa.FixedSizeListArray.from_arrays(flat, type=schema.field("embedding").type)
    return pa.table([*(rows[name].combine_chunks() for name in _KEY), column], schema=schema), failures, statistics


def _length_counts(lengths: Sequence[int], max_length: int) -> Counter[str]:
    """Count captions by their number of sub-words, and those that are cut."""
    counts = Counter(map(str, lengths))
    counts[_CUT] = sum(length > max_length for length in lengths)
    return counts


def _split_failures(captions: pa.Table, is_finite: np.ndarray, message: str) -> tuple[pa.Table, list[dict[str, str]]]:
    invalid = captions.select(_KEY[:4]).filter(pa.array(~is_finite)).to_pylist()
    failures = [failure_row(str(CaptionKey(**row)), "extract", "not_finite", message) for row in invalid]
    return captions.filter(pa.array(is_finite)) if failures else captions, failures


def _build_table(captions: pa.Table, vectors: Sequence[np.ndarray], extractor: TokenExtractor) -> pa.Table:
    spec = extractor.description.spec
    schema = schema_of("token-features", spec)
    lengths = np.array([len(caption) for caption in vectors], np.int32)
    flat = np.concatenate([np.zeros((0, spec.width), spec.dtype), *vectors]).ravel()
    offsets = np.append(0, np.cumsum(lengths, dtype=np.int64) * spec.width).astype(np.int32)
    column = pa.ListArray.from_arrays(offsets, flat).cast(schema.field("vectors").type)
    return pa.table([*(captions[name].combine_chunks() for name in _KEY), pa.array(lengths), column], schema=schema)
