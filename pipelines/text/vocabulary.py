"""``imagepivot vocabulary``: counts tokens of the training split and keeps those that reach the threshold."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal

import apache_beam as beam

from pipelines.running.jobs import CommitDataset, SumCounters, run_job
from pipelines.running.runner import Execution
from schemas.dataset import Dataset, open_dataset
from schemas.errors import DatasetError, InputError, UsageError
from schemas.fingerprints import Identity
from schemas.manifest import Manifest
from schemas.output import Output
from schemas.parameters import VocabularyParameters
from schemas.storage import Folder
from schemas.vocabulary import SPECIALS, TEXT_NAME, Vocabulary
from schemas.writing import open_shard

__all__ = ["BuildVocabulary", "CountTokens", "VocabularyJob", "build_vocabulary", "count_tokens", "vocabulary_statistics"]

Scope = Literal["language", "joint"]


@dataclass(frozen=True)
class VocabularyJob:
    """What ``imagepivot vocabulary`` does.

    Attributes:
        captions: folder of a captions dataset.
        output: folder of the vocabulary.
        min_count: a token is kept when its count is at least this.
        count_scope: ``language``: the count within at least one language; ``joint``: the sum over languages.
        splits: splits whose captions are counted.
        languages: languages that are counted; all when empty.
        portions: portions that are counted; all when empty.
        overwrite: replace a dataset of another fingerprint.
    """

    captions: str
    output: str
    min_count: int = 4
    count_scope: Scope = "language"
    splits: tuple[str, ...] = ("train",)
    languages: tuple[str, ...] = ()
    portions: tuple[str, ...] = ()
    overwrite: bool = False

    def __post_init__(self) -> None:
        if self.min_count < 1:
            raise UsageError(f"--min-count is {self.min_count}, expected 1 or more")
        if self.count_scope not in ("language", "joint"):
            raise UsageError(f"--count-scope is {self.count_scope!r}, expected 'language' or 'joint'")


def count_tokens(captions: Dataset, shard: int) -> dict[tuple[str, str, str], Counter[str]]:
    """Counts of tokens in one shard of captions, by (portion, split, language)."""
    counts: dict[tuple[str, str, str], Counter[str]] = {}
    table = captions.shard(shard, ["portion", "split", "language", "tokens"])
    rows = zip(*(table[name].to_pylist() for name in ("portion", "split", "language", "tokens")), strict=True)
    for portion, split, language, tokens in rows:
        counts.setdefault((portion, split, language), Counter()).update(tokens)
    return counts


@dataclass(eq=False)
class CountTokens(beam.PTransform):
    """Numbers of shards to ((portion, split, language), counts of its tokens).

    Attributes:
        captions: the captions.
    """

    captions: Dataset

    def expand(self, shards: beam.PCollection) -> beam.PCollection:
        """Each shard is counted where it is read; only counts are shuffled."""
        return (
            shards
            | "CountShard" >> beam.FlatMap(_count_shard, self.captions)
            | "SumCounts" >> beam.CombinePerKey(SumCounters())
        )


def _count_shard(shard: int, captions: Dataset) -> Iterator[tuple[tuple[str, str, str], Counter[str]]]:
    yield from count_tokens(captions, shard).items()


def vocabulary_statistics(
    vocabulary: Vocabulary,
    counts: Mapping[tuple[str, str, str], Mapping[str, int]],
    trained: Mapping[str, Mapping[str, int]],
    *,
    min_count: int,
    count_scope: Scope,
) -> dict[str, Any]:
    """The numbers of Table 1 of Kádár et al. (2018) and what else says whether a vocabulary fits its captions.

    Args:
        vocabulary: the joint vocabulary.
        counts: counts of tokens by (portion, split, language), of all captions.
        trained: counts by language, of the captions that the vocabulary was made from.
        min_count: its threshold.
        count_scope: its scope.

    Returns:
        ``tokens``: size of each language's own vocabulary (tokens of the language that reach the threshold), specials not
        counted; ``sum`` and ``union`` of them; ``jaccard`` of each pair, the specials among both: so Table 1 comes out to
        two decimals (without them English and Czech would have 0.0146, printed is 0.02); ``singletons``: tokens that occur
        once, by language; ``types`` and ``occurrences`` by language; ``unknown``: share of ``<unk>`` among the tokens by
        language and split.
    """
    known = vocabulary.ids
    least = min_count if count_scope == "language" else 1
    own = {
        language: {token for token, count in found.items() if count >= least and token in known}
        for language, found in trained.items()
    }
    unknown: dict[str, dict[str, float]] = {}
    totals: dict[tuple[str, str], list[int]] = {}
    for (_, split, language), found in counts.items():
        total = totals.setdefault((language, split), [0, 0])
        total[0] += sum(n for token, n in found.items() if token not in known)
        total[1] += sum(found.values())
    for (language, split), (missing, total_count) in sorted(totals.items()):
        unknown.setdefault(language, {})[split] = missing / total_count if total_count else 0.0
    languages = sorted(own)
    return {
        "tokens": {language: len(own[language]) for language in languages},
        "sum": sum(len(tokens) for tokens in own.values()),
        "union": len(set().union(*own.values())),
        "jaccard": {
            f"{a}/{b}": (len(own[a] & own[b]) + len(SPECIALS)) / (len(own[a] | own[b]) + len(SPECIALS))
            for a, b in combinations(languages, 2)
        },
        "singletons": {language: sum(n == 1 for n in trained[language].values()) for language in languages},
        "types": {language: len(trained[language]) for language in languages},
        "occurrences": {language: sum(trained[language].values()) for language in languages},
        "unknown": unknown,
    }


@dataclass(eq=False)
class BuildVocabulary(beam.PTransform):
    """((portion, split, language), counts) to one vocabulary, written with its statistics.

    Attributes:
        job: threshold, scope and what is counted.
        output: the dataset.
    """

    job: VocabularyJob
    output: Output

    def expand(self, counts: beam.PCollection) -> beam.PCollection:
        """The counts are a side input of one function: a vocabulary is one value, and must fit one memory anyway."""
        return (
            counts.pipeline
            | "Once" >> beam.Impulse()
            | "Write" >> beam.Map(_write_vocabulary, counts=beam.pvalue.AsDict(counts), job=self.job, output=self.output)
        )


def _write_vocabulary(
    _impulse: bytes, counts: Mapping[tuple[str, str, str], Mapping[str, int]], job: VocabularyJob, output: Output
) -> tuple[str]:
    trained: dict[str, Counter[str]] = {}
    for (portion, split, language), found in sorted(counts.items()):
        if split in job.splits and _takes(job, portion, language):
            trained.setdefault(language, Counter()).update(found)
    vocabulary = Vocabulary.from_counts(trained, min_count=job.min_count, scope=job.count_scope)
    covered = {key: found for key, found in counts.items() if _takes(job, key[0], key[2])}
    statistics = vocabulary_statistics(vocabulary, covered, trained, min_count=job.min_count, count_scope=job.count_scope)
    output.folder.write(TEXT_NAME, vocabulary.to_text().encode())
    with open_shard(output, 0) as shard:
        shard.write(vocabulary.to_table())
        shard.statistics = statistics
    return (TEXT_NAME,)


def _takes(job: VocabularyJob, portion: str, language: str) -> bool:
    return (not job.languages or language in job.languages) and (not job.portions or portion in job.portions)


def _check_selected(job: VocabularyJob, captions: Dataset) -> None:
    """Refuses a selection that no caption meets; the captions' manifest knows."""
    kinds = [tuple(key.split("/", 2)) for key in captions.manifest.statistics.get("captions", {})]
    for place, (option, wanted) in enumerate((("portion", job.portions), ("split", job.splits), ("language", job.languages))):
        there = sorted({kind[place] for kind in kinds})
        for value in wanted:
            if value not in there:
                raise InputError(
                    f"{job.captions!r} has no captions of {option} {value!r}: there are {', '.join(there) or 'none'}. "
                    f"Choose with --{option}s"
                )
    if not any(split in job.splits and _takes(job, portion, language) for portion, split, language in kinds):
        raise InputError(
            f"{job.captions!r} has captions of each portion, split and language that was chosen, but none of all together: there "
            f"are {', '.join('/'.join(kind) for kind in sorted(kinds))}. Choose with --portions, --splits and --languages"
        )


def build_vocabulary(job: VocabularyJob, execution: Execution = Execution()) -> Manifest:
    """Makes a dataset of kind ``vocabulary`` and its plain text file.

    Raises:
        DatasetError: ``job.captions`` is no captions dataset.
        InputError: no caption is selected.
    """
    captions = open_dataset(job.captions, kind="captions")
    if captions.manifest.rows == 0:
        raise DatasetError(f"{job.captions!r} holds no captions: there is nothing to count")
    _check_selected(job, captions)
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
    output = Output(folder=Folder(job.output), identity=identity, other_files=re.escape(TEXT_NAME))

    def build(pipeline: beam.Pipeline, finished: frozenset[int]) -> None:
        if finished:
            done = pipeline | "VocabularyIsThere" >> beam.Create([(TEXT_NAME,)])
        else:
            counts = (
                pipeline
                | "ListShards" >> beam.Create(range(captions.num_shards))
                | "SpreadShards" >> beam.Reshuffle()  # Fusion break: the shards are read by all workers.
                | "CountTokens" >> CountTokens(captions)
            )
            done = counts | "BuildVocabulary" >> BuildVocabulary(job, output)
        _ = done | "CommitDataset" >> CommitDataset(output, libraries=("apache-beam",))

    return run_job(output, build, execution=execution, overwrite=job.overwrite)
