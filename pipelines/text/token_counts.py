"""Token counts of captions, and the vocabulary and its statistics from them."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from functools import reduce
from itertools import chain, combinations
from typing import Any, TypeAlias, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from pipelines.jobs import VocabularyJob
from pipelines.running.execution import Execution
from pipelines.running.meter import Meter
from schemas.dataset import Dataset, open_dataset
from schemas.errors import DatasetError, InputError
from schemas.vocabulary import SPECIALS, TEXT_NAME, Vocabulary
from schemas.writing.output import OutputDataset
from schemas.writing.shard_writer import open_shard

CaptionGroup: TypeAlias = tuple[str, str, str]
"""Portion, split and language of captions."""

_BYTES_OF_WORKER = 16 << 20
"""Bytes of captions in shards for each local worker that counts or encodes, see `Execution.for_text`."""

BATCH_ROWS = 1 << 16
"""Captions that are counted or encoded at once: a token that occurs often is looked up once in each batch."""

_K = TypeVar("_K")


def open_captions_dataset(location: str) -> Dataset:
    """Open a captions dataset.

    Raises:
        DatasetError: it is not a captions dataset, or has no rows.
    """
    captions = open_dataset(location, kind="captions")
    if captions.manifest.rows == 0:
        raise DatasetError(f"{location!r} has no captions: check the source and the selection, and prepare the captions again")
    return captions


def execution_for(captions: Dataset, execution: Execution) -> Execution:
    """Return an execution with as many default workers as captions pay for."""
    return execution.for_text(sum(shard.bytes for shard in captions.manifest.shards), _BYTES_OF_WORKER)


def count_tokens(shards: Iterable[int], captions: Dataset, meter: Meter = Meter()) -> dict[CaptionGroup, Counter[str]]:
    """Count the tokens in shards of captions, by portion, split and language.

    The meter counts the captions.
    """
    counts: defaultdict[CaptionGroup, Counter[str]] = defaultdict(Counter)
    names = ["portion", "split", "language"]
    for batch in chain.from_iterable(captions.shard_batches(shard, [*names, "tokens"], BATCH_ROWS) for shard in shards):
        for group in pa.table(batch.select(names)).group_by(names).aggregate([]).to_pylist():
            is_in_group = reduce(pc.and_, (pc.equal(batch[name], value) for name, value in group.items()))
            tokens, times = batch["tokens"].filter(is_in_group).flatten().value_counts().flatten()
            of_batch = dict(zip(tokens.to_pylist(), times.to_pylist(), strict=True))
            counts[group["portion"], group["split"], group["language"]].update(of_batch)
        meter.add(captions=batch.num_rows)
    meter.flush()
    return counts


def sum_counters(counters: Iterable[Mapping[str, int]]) -> Counter[str]:
    """Return the sum of counters; memory holds their distinct items."""
    total: Counter[str] = Counter()
    for counter in counters:
        total.update(counter)
    return total


def sum_by_key(counters: Iterable[Mapping[_K, Mapping[str, int]]]) -> dict[_K, Counter[str]]:
    """Return the sum of the counters of each key."""
    total: defaultdict[_K, Counter[str]] = defaultdict(Counter)
    for key, counter in chain.from_iterable(each.items() for each in counters):
        total[key].update(counter)
    return total


def write_vocabulary(job: VocabularyJob, output: OutputDataset, counts: Iterable[Mapping[CaptionGroup, Counter[str]]]) -> str:
    """Write the vocabulary of all counts and its text; return the text's path."""
    vocabulary, statistics = vocabulary_from_counts(job, sum_by_key(counts))
    output.folder.put(TEXT_NAME, vocabulary.to_text().encode())
    with open_shard(output, 0) as shard:
        shard.write(vocabulary.table)
        shard.statistics = statistics
    return TEXT_NAME


def vocabulary_statistics(
    job: VocabularyJob,
    vocabulary: Vocabulary,
    counts: Mapping[CaptionGroup, Mapping[str, int]],
    trained: Mapping[str, Mapping[str, int]],
) -> dict[str, Any]:
    """Return the numbers of Table 1 of Kádár et al. (2018), and rates of ``<unk>``.

    ``trained`` holds the counts by language over the captions that the vocabulary was counted on, ``counts`` those of all captions.

    Returns:
        A dictionary with

        * ``tokens``: vocabulary size by language: its tokens that reach the threshold, without specials;
        * ``sum`` and ``union`` of these vocabularies;
        * ``jaccard``: overlap of each pair of languages, with the specials in both, as in Table 1;
        * ``singletons``: number of tokens that occur once, by language;
        * ``types`` and ``occurrences``, by language;
        * ``unknown``: share of ``<unk>`` among the tokens, by language and split;
        * ``reserved``: number of tokens spelled like specials, which become ``<unk>``, by language and split; omitted if zero.
    """
    word_ids = vocabulary.word_ids
    threshold = job.min_count if job.count_scope == "language" else 1
    own = {
        language: {token for token, count in tokens.items() if count >= threshold and token in word_ids}
        for language, tokens in trained.items()
    }
    unknown: dict[str, dict[str, float]] = {}
    reserved: dict[str, dict[str, int]] = {}
    by_split = sum_by_key({(language, split): tokens} for (_, split, language), tokens in counts.items())
    for (language, split), tokens in sorted(by_split.items()):
        unknown_count = sum(count for token, count in tokens.items() if token not in word_ids)
        unknown.setdefault(language, {})[split] = unknown_count / max(1, tokens.total())
        if reserved_count := sum(tokens[special] for special in SPECIALS):
            reserved.setdefault(language, {})[split] = reserved_count
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
        **({"reserved": reserved} if reserved else {}),
    }


def vocabulary_from_counts(
    job: VocabularyJob, counts: Mapping[CaptionGroup, Mapping[str, int]]
) -> tuple[Vocabulary, dict[str, Any]]:
    """Build the vocabulary of a job and its statistics from all token counts.

    Raises:
        InputError: no token reaches the threshold.
    """
    covered = {group: tokens for group, tokens in sorted(counts.items()) if selects(job, group[0], group[2])}
    trained = sum_by_key({language: tokens} for (_, split, language), tokens in covered.items() if split in job.splits)
    vocabulary = Vocabulary.from_counts(trained, min_count=job.min_count, scope=job.count_scope)
    if len(vocabulary) == len(SPECIALS):
        raise InputError(_no_token(trained, job))
    return vocabulary, vocabulary_statistics(job, vocabulary, covered, trained)


def _no_token(trained: Mapping[str, Mapping[str, int]], job: VocabularyJob) -> str:
    """Return the error for an empty vocabulary, with the most frequent token."""
    every = Vocabulary.from_counts(trained, min_count=1)
    reach = sum if job.count_scope == "joint" else max
    candidates = [(-reach(counts.values()), token) for token, counts in zip(every.tokens, every.counts, strict=True) if counts]
    count, token = min(candidates, default=(0, ""))
    if not count:
        return f"the selected captions of {job.captions!r} hold no tokens: prepare the captions again, or select others"
    scope = "all languages together" if job.count_scope == "joint" else "one language"
    return (
        f"no token reaches --min-count {job.min_count}, so the vocabulary would be empty: the most frequent in {scope}, {token!r}, "
        f"occurs {-count:,} times. Give --min-count {-count} or less, or count more captions with --splits"
    )


def selects(job: VocabularyJob, portion: str, language: str) -> bool:
    """Return whether a job counts the captions of a portion and a language."""
    return (not job.languages or language in job.languages) and (not job.portions or portion in job.portions)
