"""``imagepivot vocabulary``: counts the tokens of the training split and keeps those that reach a threshold."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial, reduce
from itertools import combinations
from typing import Any, Literal

import apache_beam as beam
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipelines.running.commits import CommitDataset, SumCounters
from pipelines.running.execution import Execution
from pipelines.running.first_worker import Begin, FirstWorker
from pipelines.running.jobs import run_job
from pipelines.running.progress import Meter
from schemas.damage import content_errors
from schemas.dataset import Dataset, open_dataset
from schemas.errors import DatasetError, InputError, UsageError
from schemas.fingerprints import Identity
from schemas.manifest import Manifest
from schemas.output import Output
from schemas.parameters import VocabularyParameters
from schemas.storage import Folder
from schemas.vocabulary import SPECIALS, TEXT_NAMES, Vocabulary
from schemas.writing import open_shard

__all__ = [
    "BuildVocabulary",
    "CountTokens",
    "VocabularyJob",
    "build_counts",
    "build_vocabulary",
    "count_tokens",
    "plan_vocabulary",
    "vocabulary_statistics",
]

Scope = Literal["language", "joint"]


@dataclass(frozen=True)
class VocabularyJob:
    """Job of ``imagepivot vocabulary``.

    Attributes:
        captions: folder of a captions dataset.
        output: folder of the vocabulary.
        min_count: a token is kept when its count is at least this.
        count_scope: ``language``: the count within at least one language; ``joint``: the sum over languages.
        splits: splits whose captions are counted.
        languages: languages that are counted; empty for all.
        portions: portions that are counted; empty for all.
        overwrite: start anew, whatever dataset is there.
        verify: compare the digests of what is there, too, and make again what is damaged.
    """

    captions: str
    output: str
    min_count: int = 4
    count_scope: Scope = "language"
    splits: tuple[str, ...] = ("train",)
    languages: tuple[str, ...] = ()
    portions: tuple[str, ...] = ()
    overwrite: bool = False
    verify: bool = False

    def __post_init__(self) -> None:
        if self.min_count < 1:
            raise UsageError(f"--min-count is {self.min_count}, expected 1 or more")
        if self.count_scope not in ("language", "joint"):
            raise UsageError(f"--count-scope is {self.count_scope!r}, expected 'language' or 'joint'")


def count_tokens(captions: Dataset, shard: int) -> dict[tuple[str, str, str], Counter[str]]:
    """Count the tokens in one shard of captions, by (portion, split, language)."""
    counts: dict[tuple[str, str, str], Counter[str]] = {}
    names = ["portion", "split", "language"]
    for batch in captions.shard_batches(shard, [*names, "tokens"]):
        for group in pa.table(batch.select(names)).group_by(names).aggregate([]).to_pylist():
            of_group = reduce(pc.and_, (pc.equal(batch[name], value) for name, value in group.items()))
            tokens, times = batch["tokens"].filter(of_group).flatten().value_counts().flatten()
            counter = counts.setdefault((group["portion"], group["split"], group["language"]), Counter())
            counter.update(dict(zip(tokens.to_pylist(), times.to_pylist(), strict=True)))
    return counts


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


def vocabulary_statistics(
    vocabulary: Vocabulary,
    counts: Mapping[tuple[str, str, str], Mapping[str, int]],
    trained: Mapping[str, Mapping[str, int]],
    *,
    min_count: int,
    count_scope: Scope,
) -> dict[str, Any]:
    """Return the numbers of Table 1 of Kádár et al. (2018), and others that show how well a vocabulary fits its captions.

    Args:
        vocabulary: the joint vocabulary.
        counts: counts of tokens by (portion, split, language), over all captions.
        trained: counts of tokens by language, over the captions that the vocabulary was made from.
        min_count: threshold of the vocabulary.
        count_scope: scope of the threshold.

    Returns:
        ``tokens``: by language, the size of its own vocabulary: its tokens that reach the threshold, without specials;
        ``sum`` and ``union`` of these vocabularies; ``jaccard``: overlap of each pair of them, with the specials in both, which
        reproduces Table 1 to two decimals (without the specials English and Czech would have 0.0146; the table prints 0.02);
        ``singletons``: number of tokens that occur once, by language; ``types`` and ``occurrences`` by language; ``unknown``:
        share of ``<unk>`` among the tokens, by language and split.
    """
    known = vocabulary.ids
    threshold = min_count if count_scope == "language" else 1
    own = {
        language: {token for token, count in tokens.items() if count >= threshold and token in known}
        for language, tokens in trained.items()
    }
    unknown: dict[str, dict[str, float]] = {}
    totals: dict[tuple[str, str], list[int]] = {}
    for (_, split, language), tokens in counts.items():
        total = totals.setdefault((language, split), [0, 0])
        total[0] += sum(count for token, count in tokens.items() if token not in known)
        total[1] += sum(tokens.values())
    for (language, split), (unknown_count, count) in sorted(totals.items()):
        unknown.setdefault(language, {})[split] = unknown_count / count if count else 0.0
    languages = sorted(own)
    return {
        "tokens": {language: len(own[language]) for language in languages},
        "sum": sum(len(tokens) for tokens in own.values()),
        "union": len(set().union(*own.values())),
        "jaccard": {
            f"{a}/{b}": (len(own[a] & own[b]) + len(SPECIALS)) / (len(own[a] | own[b]) + len(SPECIALS))
            for a, b in combinations(languages, 2)
        },
        "singletons": {language: sum(count == 1 for count in trained[language].values()) for language in languages},
        "types": {language: len(trained[language]) for language in languages},
        "occurrences": {language: sum(trained[language].values()) for language in languages},
        "unknown": unknown,
    }


@dataclass(eq=False)
class BuildVocabulary(beam.PTransform):
    """Pairs ((portion, split, language), counts) to one vocabulary, written with its statistics.

    Attributes:
        job: threshold, scope and the captions that count.
        output: the dataset.
    """

    job: VocabularyJob
    output: Output

    def expand(self, counts: beam.PCollection) -> beam.PCollection:
        """Pass all counts to one function as a side input: a vocabulary is one value and must fit in memory anyway."""
        return (
            counts.pipeline
            | "Once" >> beam.Create([b""])
            | "Write" >> beam.Map(_write_vocabulary, counts=beam.pvalue.AsDict(counts), job=self.job, output=self.output)
        )


def _write_vocabulary(
    _impulse: bytes, counts: Mapping[tuple[str, str, str], Mapping[str, int]], job: VocabularyJob, output: Output
) -> tuple[str]:
    trained: dict[str, Counter[str]] = {}
    for (portion, split, language), tokens in sorted(counts.items()):
        if split in job.splits and _selects(job, portion, language):
            trained.setdefault(language, Counter()).update(tokens)
    vocabulary = Vocabulary.from_counts(trained, min_count=job.min_count, scope=job.count_scope)
    if len(vocabulary) == len(SPECIALS):
        raise InputError(_no_token(trained, job))
    covered = {
        (portion, split, language): tokens
        for (portion, split, language), tokens in counts.items()
        if _selects(job, portion, language)
    }
    statistics = vocabulary_statistics(vocabulary, covered, trained, min_count=job.min_count, count_scope=job.count_scope)
    output.folder.write(TEXT_NAMES[0], vocabulary.to_text().encode())
    with open_shard(output, 0) as shard:
        shard.write(vocabulary.to_table())
        shard.statistics = statistics
    return (TEXT_NAMES[0],)


def _write_text(name: str, output: Output) -> tuple[str]:
    """Write the plain text of a vocabulary whose shard is there."""
    path = output.folder.path_of(output.name(0))
    with output.folder.open(output.name(0)) as file, content_errors(path):
        vocabulary = Vocabulary.from_table(pq.ParquetFile(file).read())
    output.folder.write(name, vocabulary.to_text().encode())
    return (name,)


def _no_token(trained: Mapping[str, Mapping[str, int]], job: VocabularyJob) -> str:
    """Say that no token reaches the threshold, and which comes closest."""
    counts: Counter[str] = Counter()
    for tokens in trained.values():
        for token, count in tokens.items():
            counts[token] = counts[token] + count if job.count_scope == "joint" else max(counts[token], count)
    token, count = min(
        ((token, count) for token, count in counts.items() if token not in SPECIALS), key=_by_count, default=("", 0)
    )
    if not count:
        return f"the selected captions of {job.captions!r} hold no tokens: prepare the captions again, or select others"
    scope = "all languages together" if job.count_scope == "joint" else "one language"
    return (
        f"no token reaches --min-count {job.min_count}, so the vocabulary would be empty: the most frequent in {scope}, {token!r}, "
        f"occurs {count:,} times. Give --min-count {count} or less, or count more captions with --splits"
    )


def _by_count(item: tuple[str, int]) -> tuple[int, str]:
    return -item[1], item[0]


def _selects(job: VocabularyJob, portion: str, language: str) -> bool:
    return (not job.languages or language in job.languages) and (not job.portions or portion in job.portions)


def _check_selected(job: VocabularyJob, captions: Dataset) -> None:
    """Refuse a selection that no caption meets, by the statistics in the manifest of the captions."""
    counted = captions.manifest.statistics.get("captions", {})
    groups = [tuple(key.split("/", 2)) for key in counted] if isinstance(counted, Mapping) else [()]
    if any(len(group) != 3 for group in groups):
        raise DatasetError(
            f"{job.captions!r} does not count its captions by portion, split and language: prepare the captions again"
        )
    selections = (("portion", job.portions), ("split", job.splits), ("language", job.languages))
    for position, (option, selected) in enumerate(selections):
        present = sorted({group[position] for group in groups})
        for value in selected:
            if value not in present:
                raise InputError(
                    f"{job.captions!r} has no captions of {option} {value!r}: it has {', '.join(present) or 'none'}. "
                    f"Choose with --{option}s"
                )
    if not any(split in job.splits and _selects(job, portion, language) for portion, split, language in groups):
        raise InputError(
            f"{job.captions!r} has no captions of the selected portions, splits and languages together: it has "
            f"{', '.join('/'.join(group) for group in sorted(groups))}. Choose with --portions, --splits and --languages"
        )


def build_vocabulary(job: VocabularyJob, execution: Execution = Execution(), meter: Meter = Meter()) -> Manifest:
    """Make a dataset of kind ``vocabulary`` and its plain text file.

    Args:
        job: what to make.
        execution: where and how to run.
        meter: counts captions, for a progress display.

    Returns:
        The manifest of the committed dataset.

    Raises:
        DatasetError: ``job.captions`` is not a captions dataset, or holds no captions.
        InputError: no caption is selected, or no token reaches the threshold.
    """
    execution.check_locations((("CAPTIONS", job.captions), ("OUTPUT", job.output)))
    captions = open_dataset(job.captions, kind="captions")
    if captions.manifest.rows == 0:
        raise DatasetError(
            f"{job.captions!r} holds no captions, so there is nothing to count: check the source and the selection, and prepare "
            "the captions again"
        )
    _check_selected(job, captions)
    output = plan_vocabulary(job, captions)
    build = partial(build_counts, job=job, captions=captions, output=output, meter=meter)
    return run_job(output, build, execution=execution, overwrite=job.overwrite, verify=job.verify, meter=meter)


def plan_vocabulary(job: VocabularyJob, captions: Dataset) -> Output:
    """Return where a job writes, and the identity of what it makes."""
    identity = Identity(
        kind="vocabulary",
        parameters=VocabularyParameters(
            min_count=job.min_count,
            count_scope=job.count_scope,
            splits=tuple(sorted(job.splits)),
            languages=tuple(sorted(job.languages)),
            portions=tuple(sorted(job.portions)),
        ).to_json(),
        inputs=({"name": "captions", "fingerprint": captions.fingerprint},),
    )
    return Output(folder=Folder(job.output), identity=identity, other_files="|".join(map(re.escape, TEXT_NAMES)))


def build_counts(
    pipeline: beam.Pipeline,
    finished: frozenset[int] = frozenset(),
    check: FirstWorker | None = None,
    *,
    job: VocabularyJob,
    captions: Dataset,
    output: Output,
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
        counts = (
            pipeline
            | "ListShards" >> Begin(range(captions.num_shards), check)
            | "SpreadShards" >> beam.Reshuffle()  # Fusion break: the shards are read by all workers.
            | "CountTokens" >> CountTokens(captions, meter)
        )
        written = counts | "BuildVocabulary" >> BuildVocabulary(job, output)
    _ = written | "CommitDataset" >> CommitDataset(output, libraries=("apache-beam",))
