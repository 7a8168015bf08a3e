"""The transforms of ``imagepivot encode``: numbers of shards to encoded shards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from apache_beam.metrics import Metrics

from pipelines.jobs import EncodeJob
from pipelines.running.commits import CommitDataset
from pipelines.running.first_worker import FirstWorker, spread_shards
from pipelines.running.meter import Meter
from schemas.dataset import Dataset
from schemas.kinds import CAPTIONS, ENCODED
from schemas.vocabulary import END, SPECIALS, START, UNK, Vocabulary
from schemas.writing.dataset_writer import write_shards
from schemas.writing.output import OutputDataset
from schemas.writing.shard_writer import ShardWriter


def encode_table(captions: pa.Table, vocabulary: Vocabulary, max_length: int) -> tuple[pa.Table, dict[str, int]]:
    """Encode rows of kind ``captions``.

    Args:
        captions: rows of kind ``captions``.
        vocabulary: the vocabulary whose ids are used.
        max_length: number of tokens after which a caption is cut.

    Returns:
        Rows of kind ``encoded`` in the same order, and statistics: captions, tokens kept, ``<unk>`` among these, captions that
        were cut, and, if there are any, ``reserved_tokens``: those of ``<unk>`` that the text spells like a special.
    """
    tokens = pc.list_slice(captions["tokens"].combine_chunks(), 0, max_length)
    encoded = tokens.flatten().dictionary_encode()
    words, indices = encoded.dictionary.to_pylist(), encoded.indices.to_numpy()
    ids_of_words = np.array([vocabulary.word_ids.get(word, UNK) for word in words], np.int32)
    lengths = pc.list_value_length(tokens).to_numpy() + 2
    ends = np.cumsum(lengths, dtype=np.int32)
    ids = np.empty(lengths.sum(), np.int32)
    is_token = np.ones(len(ids), bool)
    for place, special in ((ends - lengths, START), (ends - 1, END)):
        ids[place], is_token[place] = special, False
    ids[is_token] = ids_of_words[indices]
    column = pa.ListArray.from_arrays(np.append(np.int32(0), ends), ids)
    columns = [captions[name].combine_chunks() for name in ENCODED.names[:-2]]
    table = pa.table([*columns, column.cast(ENCODED.field("token_ids").type), pa.array(lengths)], schema=ENCODED)
    statistics = {
        "captions": table.num_rows,
        "tokens": len(ids) - 2 * table.num_rows,
        "unknown_tokens": int(np.count_nonzero(ids == UNK)),
        "captions_cut": pc.sum(pc.greater(pc.list_value_length(captions["tokens"]), max_length)).as_py() or 0,
    }
    if reserved := [number for number, word in enumerate(words) if word in SPECIALS]:
        statistics["reserved_tokens"] = int(np.isin(indices, reserved).sum())
    return table, statistics


class _EncodeShardFn(beam.DoFn):
    def __init__(self, captions: Dataset, vocabulary: Dataset, max_length: int, output: OutputDataset, meter: Meter) -> None:
        self._captions = captions
        self._vocabulary_dataset = vocabulary
        self._max_length = max_length
        self._output = output
        self._meter = meter
        self._counter = Metrics.counter("EncodeCaptions", "captions_encoded")

    def setup(self) -> None:
        self._vocabulary = self._vocabulary_dataset.vocabulary()

    def process(self, number: int) -> Iterator[int]:
        yield from write_shards(self._output, [number], self._write)

    def _write(self, number: int, shard: ShardWriter) -> None:
        total: Counter[str] = Counter()
        tables = (pa.Table.from_batches([batch]) for batch in self._captions.shard_batches(number))
        for captions in chain([CAPTIONS.empty_table()], tables):  # An empty shard has statistics, too.
            table, statistics = encode_table(captions, self._vocabulary, self._max_length)
            shard.write(table)
            total.update(statistics)
            self._meter.add(captions=table.num_rows)
        shard.statistics = total
        self._counter.inc(shard.rows)
        self._meter.flush()


@dataclass(eq=False)
class EncodeCaptions(beam.PTransform):
    """Numbers of shards to encoded shards on disk; the output holds the number of each shard once it is written.

    Attributes:
        captions: the captions dataset.
        vocabulary: the vocabulary dataset.
        max_length: number of tokens after which a caption is cut.
        output: the dataset to write.
        meter: counts captions.
    """

    captions: Dataset
    vocabulary: Dataset
    max_length: int
    output: OutputDataset
    meter: Meter = Meter()

    def expand(self, shards: beam.PCollection) -> beam.PCollection:
        """Encode each shard on its own: captions and encoded captions are co-partitioned, so nothing is shuffled."""
        function = _EncodeShardFn(self.captions, self.vocabulary, self.max_length, self.output, self.meter)
        return shards | "EncodeShard" >> beam.ParDo(function)


def build_encoding(
    pipeline: beam.Pipeline,
    finished: frozenset[int] = frozenset(),
    check: FirstWorker | None = None,
    *,
    job: EncodeJob,
    captions: Dataset,
    vocabulary: Dataset,
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
        vocabulary: its vocabulary.
        output: where, as `plan_encoding` returns it.
        meter: counts captions.
    """
    missing = [shard for shard in range(captions.num_shards) if shard not in finished]
    _ = (
        spread_shards(pipeline, missing, check)
        | "EncodeCaptions" >> EncodeCaptions(captions, vocabulary, job.max_length, output, meter)
        | "CommitDataset" >> CommitDataset(output, libraries=("apache-beam",))
    )
