"""``imagepivot encode``: captions to token ids of a vocabulary, shard by shard."""

from collections import Counter
from dataclasses import dataclass
from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.jobs import EncodeJob
from pipelines.running.execution import Execution
from pipelines.running.job import run_per_shard
from pipelines.running.meter import Meter
from pipelines.running.process_pool import ShardWorker, Share
from pipelines.text.token_counts import BATCH_ROWS, execution_for, open_captions_dataset
from schemas.dataset import Dataset, open_dataset
from schemas.kinds import CAPTIONS, ENCODED
from schemas.manifest import Manifest
from schemas.options import takes_fields
from schemas.parameters import CaptionsParameters, EncodedParameters
from schemas.storage.folder import Folder
from schemas.vocabulary import END, SPECIALS, START, UNK, Vocabulary
from schemas.writing.output import OutputDataset
from schemas.writing.reuse_policy import ReusePolicy
from schemas.writing.shard_writer import open_shard


@takes_fields(EncodeJob)
def encode_captions(job: EncodeJob, execution: Execution = Execution(), meter: Meter = Meter()) -> Manifest:
    """Write a dataset of kind ``encoded`` with a shard per shard of captions.

    Raises:
        DatasetError: an input is not a dataset of the expected kind, or has no captions.
    """
    execution.check_locations((("CAPTIONS", job.captions), ("VOCABULARY", job.vocabulary), ("OUTPUT", job.output)))
    captions = open_captions_dataset(job.captions)
    vocabulary = open_dataset(job.vocabulary, kind="vocabulary")
    execution = execution_for(captions, execution)
    output = OutputDataset(
        folder=Folder(job.output),
        kind="encoded",
        parameters=EncodedParameters(
            max_length=job.max_length,
            vocabulary_size=vocabulary.manifest.rows,
            # A model trained on these ids can only answer queries that went through the same recipe.
            text=CaptionsParameters.from_json(captions.manifest.parameters).text,
        ).to_json(),
        shards=captions.num_shards,
        notes=job.notes.to_json(),
    ).made_from(captions, vocabulary)
    worker = ShardEncoder(captions, vocabulary, job.max_length, output, meter)
    policy = ReusePolicy(overwrite=job.overwrite, verify=job.verify)
    return run_per_shard(worker, policy, execution, libraries=("apache-beam",), meter=meter)


@dataclass(eq=False)
class ShardEncoder(ShardWorker):
    """Encoder of caption shards."""

    captions: Dataset
    vocabulary: Dataset
    max_length: int
    output: OutputDataset
    meter: Meter = Meter()

    def set_up(self, share: Share) -> None:
        """Read the vocabulary."""
        self._vocabulary = self.vocabulary.vocabulary()

    def write(self, shard: int) -> int:
        """Write the encoded captions of a shard."""
        self.meter.start_shard(shard)
        total: Counter[str] = Counter()
        tables = (pa.Table.from_batches([batch]) for batch in self.captions.shard_batches(shard, batch_size=BATCH_ROWS))
        with open_shard(self.output, shard) as writer:
            for captions in chain([CAPTIONS.empty_table()], tables):  # An empty shard has statistics, too.
                table, statistics = encode_table(captions, self._vocabulary, self.max_length)
                writer.write(table)
                total.update(statistics)
                self.meter.add(captions=table.num_rows)
            writer.statistics = total
        self.meter.finish_shard()
        return shard


def encode_table(captions: pa.Table, vocabulary: Vocabulary, max_length: int) -> tuple[pa.Table, dict[str, int]]:
    """Encode rows of kind ``captions``, each truncated to ``max_length`` tokens.

    Returns:
        Rows of kind ``encoded`` in the same order, and statistics: captions, tokens, ``<unk>`` among these, truncated captions,
        and ``reserved_tokens``, the tokens spelled like a special, which become ``<unk>``; omitted if zero.
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
    if reserved := [index for index, word in enumerate(words) if word in SPECIALS]:
        statistics["reserved_tokens"] = int(np.isin(indices, reserved).sum())
    return table, statistics
