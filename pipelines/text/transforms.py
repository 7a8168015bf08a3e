"""The transforms of the commands over text, for several workers: they wrap what one process does without Beam."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import apache_beam as beam

from pipelines.inputs.captions import CaptionSource, Selection
from pipelines.inputs.captions.base import INDEX_ADVICE
from pipelines.jobs import CaptionsJob, TokenFeaturesJob, VocabularyJob
from pipelines.running.meter import Meter
from pipelines.running.preflight import FirstWorker
from pipelines.running.transforms import Begin, CommitDataset, WriteShards, spread_shards
from pipelines.text import caption_shards, token_counts
from pipelines.text.caption_shards import block_forms, read_pieces, write_caption_shard
from pipelines.text.encoding import ShardEncoder
from pipelines.text.merge_sort import Piece, read_piece
from pipelines.text.moses import Recipe, recipe
from pipelines.text.token_counts import Group, count_shard, restore_text, sum_counters, write_vocabulary
from pipelines.text.token_features import TokenFeatureExtractor
from pipelines.text.truecasing import TruecaseModel, write_truecaser
from schemas.dataset import Dataset
from schemas.storage.folder import Folder
from schemas.writing.output import OutputDataset

_READERS = 16
"""Number of groups of parts; the captions of a group are gathered together, so that many small files make few pieces."""

# --- captions --------------------------------------------------------------------------------------------------------


@dataclass(eq=False)  # Not frozen: Beam sets the label.
class ReadCaptions(beam.PTransform):
    """A source to pairs (index of a shard, sorted piece of it): the root of a pipeline.

    Attributes:
        left_out: shards whose captions are dropped.
        folder: where all workers see the same local disk, a folder on it for the pieces, see `pipelines.text.merge_sort`.
        check: what the first worker on another machine checks; None on this one.
    """

    source: CaptionSource
    shards: int
    selection: Selection = Selection()
    left_out: frozenset[int] = frozenset()
    folder: str | None = None
    check: FirstWorker | None = None

    def expand(self, root: beam.pvalue.PBegin) -> beam.PCollection:
        """List the parts, and read them on all workers."""
        parts = list(enumerate(self.source.parts(self.selection)))
        groups = [group for start in range(_READERS) if (group := parts[start::_READERS])]
        arguments = self.source, self.selection, self.shards
        return (
            root
            | "ListParts" >> Begin(groups, self.check)
            | "SpreadParts" >> beam.Reshuffle()  # Fusion break: the parts are read by all workers.
            | "ReadPieces" >> beam.FlatMap(read_pieces, *arguments, left_out=self.left_out, folder=self.folder)
        )


@dataclass(eq=False)
class TrainTruecasers(beam.PTransform):
    """Pieces of captions, as of `ReadCaptions`, to pairs (language, text of a model): one per language, learned from the splits."""

    recipe: Recipe
    splits: tuple[str, ...] = ("train",)

    def expand(self, pieces: beam.PCollection) -> beam.PCollection:
        """Sum counts by language, so that neither order nor sharding matters."""
        return (
            pieces
            | "SpreadPieces" >> beam.Reshuffle()  # Fusion break after fan-out: a part is a file of any size.
            | "CountForms" >> beam.FlatMap(_forms, recipe=self.recipe, splits=frozenset(self.splits))
            | "SumForms" >> beam.CombinePerKey(sum_counters)
            | "ChooseForms" >> beam.MapTuple(_model_text)
        )


def _forms(piece: tuple[int, Piece], recipe: Recipe, splits: frozenset[str]) -> Iterator[tuple[str, Mapping[str, int]]]:
    yield from block_forms(read_piece(piece[1]), recipe, splits).items()


def _model_text(language: str, counts: Mapping[str, int]) -> tuple[str, str]:
    return language, TruecaseModel.from_counts(counts).to_text()


@dataclass(eq=False)
class TokenizeCaptions(beam.PTransform):
    """Pieces of captions, as of `ReadCaptions`, to shards on disk; the output holds the indices of the shards written.

    Attributes:
        truecasers: pairs (language, text of a model), for a recipe that truecases.
        finished: shards that an earlier run finished.
        advice: what to do about a key that occurs twice.
    """

    output: OutputDataset
    recipe: Recipe
    truecasers: beam.PCollection | None = None
    finished: frozenset[int] = frozenset()
    advice: str = INDEX_ADVICE
    meter: Meter = Meter()

    def expand(self, pieces: beam.PCollection) -> beam.PCollection:
        """Group the pieces by shard; one call tokenizes and writes a shard. Empty shards are written as well."""
        missing = [(shard, None) for shard in self.output.missing(self.finished)]
        write = beam.Map(
            _write_shard,
            models=beam.pvalue.AsDict(self.truecasers) if self.truecasers is not None else {},
            output=self.output,
            recipe=self.recipe,
            advice=self.advice,
            meter=self.meter,
        )
        return (
            (
                pieces | "LeaveOutFinished" >> beam.Filter(_is_missing, self.finished),
                pieces.pipeline | "EveryShard" >> beam.Create(missing),
            )
            | "PiecesAndShards" >> beam.Flatten()
            | "GroupByShard" >> beam.GroupByKey()
            | "WriteShard" >> write
        )


def _write_shard(pieces: tuple[int, Iterable[Piece | None]], models: Mapping[str, str], **arguments: Any) -> int:
    return write_caption_shard(*pieces, models, **arguments)


def _is_missing(piece: tuple[int, Piece], finished: frozenset[int]) -> bool:
    return piece[0] not in finished


def _write_truecaser(model: tuple[str, str], folder: Folder) -> tuple[str]:
    return (write_truecaser(*model, folder),)


def build_captions(
    pipeline: beam.Pipeline,
    finished: frozenset[int],
    check: FirstWorker | None,
    *,
    job: CaptionsJob,
    output: OutputDataset,
    models: Mapping[str, str] | None,
    staged: str | None,
    meter: Meter,
) -> None:
    """Add the steps of a job to an empty pipeline, as `pipelines.running.job.run_job` asks for them."""
    steps, source = recipe(job.recipe), job.open_source()
    left_out = frozenset() if steps.truecase and models is None else finished  # Truecasers learn from all captions.
    pieces = pipeline | "ReadCaptions" >> ReadCaptions(source, output.shards, job.selection, left_out, staged, check)
    truecasers, written = None, []
    if steps.truecase:
        if models is None:
            truecasers = pieces | "TrainTruecasers" >> TrainTruecasers(steps, job.train_splits)
        else:
            truecasers = pipeline | "GivenTruecasers" >> beam.Create(sorted(models.items()))
        written.append(truecasers | "WriteTruecasers" >> beam.Map(_write_truecaser, output.folder))
    tokenize = TokenizeCaptions(output, steps, truecasers, finished, source.repeat_advice, meter)
    written.append(pieces | "TokenizeCaptions" >> tokenize)
    _ = written | "AllDone" >> beam.Flatten() | "CommitDataset" >> CommitDataset(output, libraries=caption_shards.LIBRARIES)


# --- vocabulary ------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class CountTokens(beam.PTransform):
    """Shard indices to pairs ((portion, split, language), counts of tokens)."""

    captions: Dataset
    meter: Meter = Meter()

    def expand(self, shards: beam.PCollection) -> beam.PCollection:
        """Count each shard on the worker that reads it; only counts are shuffled."""
        return (
            shards
            | "CountShard" >> beam.FlatMap(count_shard, captions=self.captions, meter=self.meter)
            | "SumCounts" >> beam.CombinePerKey(sum_counters)
        )


@dataclass(eq=False)
class BuildVocabulary(beam.PTransform):
    """Pairs ((portion, split, language), counts) to one vocabulary, written with its statistics."""

    job: VocabularyJob
    output: OutputDataset

    def expand(self, counts: beam.PCollection) -> beam.PCollection:
        """Pass all counts to one function as a side input: a vocabulary is one value and must fit in memory anyway."""
        once = counts.pipeline | "Once" >> beam.Create([b""])
        return once | "Write" >> beam.Map(_write_vocabulary, beam.pvalue.AsDict(counts), job=self.job, output=self.output)


def _write_vocabulary(
    _impulse: bytes, counts: Mapping[Group, Mapping[str, int]], job: VocabularyJob, output: OutputDataset
) -> tuple[str]:
    return (write_vocabulary(job, output, counts),)


def _restore_text(_start: bytes, output: OutputDataset) -> tuple[str]:
    return (restore_text(output),)


def build_counts(
    pipeline: beam.Pipeline,
    finished: frozenset[int],
    check: FirstWorker | None,
    *,
    job: VocabularyJob,
    captions: Dataset,
    output: OutputDataset,
    meter: Meter,
) -> None:
    """Add the steps of a job to an empty pipeline, as `pipelines.running.job.run_job` asks for them."""
    if finished:
        written = pipeline | "VocabularyIsThere" >> Begin([b""], check) | "WriteText" >> beam.Map(_restore_text, output)
    else:
        counts = spread_shards(pipeline, range(captions.num_shards), check) | "CountTokens" >> CountTokens(captions, meter)
        written = counts | "BuildVocabulary" >> BuildVocabulary(job, output)
    _ = written | "CommitDataset" >> CommitDataset(output, libraries=token_counts.LIBRARIES)


# --- shard by shard --------------------------------------------------------------------------------------------------


class EncodeCaptions(WriteShards):
    """Shard indices to encoded shards on disk; the output holds the index of each shard once it is written."""

    def __init__(
        self, captions: Dataset, vocabulary: Dataset, max_length: int, output: OutputDataset, meter: Meter = Meter()
    ) -> None:
        super().__init__(output, ShardEncoder(captions, vocabulary, max_length, meter))


class ExtractTokenFeatures(WriteShards):
    """Shard indices to shards of token features on disk; the output holds the index of each shard once it is written.

    The arguments are those of `pipelines.text.token_features.TokenFeatureExtractor`.
    """

    def __init__(
        self, job: TokenFeaturesJob, captions: Dataset, output: OutputDataset, meter: Meter = Meter(), threads: int = 0
    ) -> None:
        super().__init__(output, TokenFeatureExtractor(job, captions, output, meter, threads))
