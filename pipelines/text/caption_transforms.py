"""The transforms of ``imagepivot captions``: raw captions to pieces by shard, to truecasers, to shards of tokenized captions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import apache_beam as beam
import pyarrow as pa
from apache_beam.metrics import Metrics

from pipelines.inputs.captions import CaptionSource, Part, Selection
from pipelines.inputs.captions.base import INDEX_ADVICE
from pipelines.jobs import CaptionsJob
from pipelines.running.commits import CommitDataset, SumCounters
from pipelines.running.first_worker import Begin, FirstWorker
from pipelines.running.meter import Meter
from pipelines.running.places import read_place
from pipelines.text.blocks import CaptionStatistics, block_forms, blocks_of, caption_rows, tokenize_captions
from pipelines.text.moses import Recipe, recipe
from pipelines.text.ordering import merge, number_captions
from pipelines.text.pieces import Piece, make_pieces, on_disk, read_piece
from pipelines.text.truecasers import Truecasers, parse_truecaser, truecaser_name
from pipelines.text.truecasing import TruecaseModel
from schemas.storage.folder import Folder
from schemas.writing.output import OutputDataset
from schemas.writing.shard_writer import open_shard

_REPORT_ROWS = 2000

_READERS = 16
"""Number of groups of parts; the captions of a group are gathered together, so that many small files make few pieces."""


def _read_pieces(
    parts: list[tuple[int, Part]],
    source: CaptionSource,
    selection: Selection,
    shards: int,
    left_out: frozenset[int],
    folder: str | None,
) -> Iterator[tuple[int, Piece]]:
    blocks = (block for number, part in parts for block in blocks_of(source.tables(part, selection), number))
    yield from make_pieces(blocks, shards, left_out=left_out, folder=folder)


@dataclass(eq=False)  # Not frozen: Beam sets the label.
class ReadCaptions(beam.PTransform):
    """A source to pairs (number of a shard, sorted piece of it): the root of a pipeline.

    Attributes:
        source: the raw captions.
        shards: number of shards.
        selection: the captions to keep.
        left_out: shards whose captions are dropped.
        folder: where all workers see the same local disk, a folder on it for the pieces, see `pipelines.text.pieces`.
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
        return (
            root
            | "ListParts" >> Begin(groups, self.check)
            | "SpreadParts" >> beam.Reshuffle()  # Fusion break: the parts are read by all workers.
            | "ReadPieces" >> beam.FlatMap(_read_pieces, self.source, self.selection, self.shards, self.left_out, self.folder)
        )


def _forms(piece: tuple[int, Piece], recipe: Recipe, splits: frozenset[str]) -> Iterator[tuple[str, dict[str, int]]]:
    yield from block_forms(read_piece(piece[1]), recipe, splits).items()


@dataclass(eq=False)  # Not frozen: Beam sets the label.
class TrainTruecasers(beam.PTransform):
    """Pieces of captions, as of `ReadCaptions`, to pairs (language, text of a model): one truecaser per language.

    Attributes:
        recipe: the steps before truecasing.
        splits: splits to learn from.
    """

    recipe: Recipe
    splits: tuple[str, ...] = ("train",)

    def expand(self, pieces: beam.PCollection) -> beam.PCollection:
        """Sum counts by language, so that neither order nor sharding matters."""
        return (
            pieces
            | "SpreadPieces" >> beam.Reshuffle()  # Fusion break after fan-out: a part is a file of any size.
            | "CountForms" >> beam.FlatMap(_forms, self.recipe, frozenset(self.splits))
            | "SumForms" >> beam.CombinePerKey(SumCounters())
            | "ChooseForms" >> beam.MapTuple(_model_text)
        )


def _model_text(language: str, counts: Mapping[str, int]) -> tuple[str, str]:
    return language, TruecaseModel.from_counts(counts).to_text()


def _write_truecaser(model: tuple[str, str], folder: Folder) -> tuple[str]:
    language, text = model
    name = truecaser_name(language)
    folder.write(name, text.encode())
    return (name,)


def _is_missing(piece: tuple[int, Piece], finished: frozenset[int]) -> bool:
    return piece[0] not in finished


class _MakeShardFn(beam.DoFn):
    def __init__(self, output: OutputDataset, recipe: Recipe, advice: str, meter: Meter) -> None:
        self._output = output
        self._recipe = recipe
        self._advice = advice
        self._meter = meter
        self._done = Metrics.counter("TokenizeCaptions", "captions_tokenized")
        self._failed = Metrics.counter("TokenizeCaptions", "captions_failed")

    def process(self, element: tuple[int, Iterable[Piece | None]], models: Mapping[str, str]) -> Iterator[int]:
        number, content = element
        truecasers = {language: parse_truecaser(text) for language, text in models.items()}
        statistics = CaptionStatistics()
        with on_disk(piece for piece in content if piece) as pieces, open_shard(self._output, number) as shard:
            for captions in number_captions(merge(pieces, read_place), self._advice):
                rows, failures = self._tokenize(captions, truecasers)
                statistics.add(rows)
                shard.write(rows)
                shard.add_failures(failures)
            shard.statistics = statistics.to_json()
        self._meter.flush()
        self._done.inc(shard.rows)
        self._failed.inc(len(shard.failures))
        yield number

    def _tokenize(self, captions: pa.Table, truecasers: Mapping[str, TruecaseModel]) -> tuple[pa.Table, list[dict[str, str]]]:
        tables: list[pa.Table] = []
        failures: list[dict[str, str]] = []
        for start in range(0, captions.num_rows, _REPORT_ROWS):
            tokenized, failed = tokenize_captions(captions.slice(start, _REPORT_ROWS), self._recipe, truecasers)
            tables.append(tokenized)
            failures += failed
            self._meter.add(captions=tokenized.num_rows + len(failed), failed=len(failed))
        return caption_rows(tables), failures


@dataclass(eq=False)  # Not frozen: Beam sets the label.
class TokenizeCaptions(beam.PTransform):
    """Pieces of captions, as of `ReadCaptions`, to shards on disk; the output holds the numbers of the shards written.

    Attributes:
        output: the dataset.
        recipe: the steps from text to tokens.
        truecasers: pairs (language, text of a model), for a recipe that truecases.
        finished: shards that an earlier run finished.
        advice: what to do about a key that occurs twice.
        meter: counts captions.
    """

    output: OutputDataset
    recipe: Recipe
    truecasers: beam.PCollection | None = None
    finished: frozenset[int] = frozenset()
    advice: str = INDEX_ADVICE
    meter: Meter = Meter()

    def expand(self, pieces: beam.PCollection) -> beam.PCollection:
        """Group the pieces by shard; one call tokenizes and writes a shard. Empty shards are written as well."""
        missing = [(number, None) for number in range(self.output.shards) if number not in self.finished]
        models = beam.pvalue.AsDict(self.truecasers) if self.truecasers is not None else {}
        return (
            (
                pieces | "LeaveOutFinished" >> beam.Filter(_is_missing, self.finished),
                pieces.pipeline | "EveryShard" >> beam.Create(missing),
            )
            | "PiecesAndShards" >> beam.Flatten()
            | "GroupByShard" >> beam.GroupByKey()
            | "MakeShard" >> beam.ParDo(_MakeShardFn(self.output, self.recipe, self.advice, self.meter), models=models)
        )


def build_captions(
    pipeline: beam.Pipeline,
    finished: frozenset[int] = frozenset(),
    check: FirstWorker | None = None,
    *,
    job: CaptionsJob,
    output: OutputDataset,
    models: Truecasers | None = None,
    staged: str | None = None,
    meter: Meter = Meter(),
) -> None:
    """Add the steps of a job to an empty pipeline.

    Args:
        pipeline: the pipeline.
        finished: shards that an earlier run finished.
        check: what the first worker on another machine checks; None on this one.
        job: what to make.
        output: where, as `plan_captions` returns it.
        models: truecasers, if they are given.
        staged: folder for pieces on a disk that all workers see; None where there is none.
        meter: counts captions.
    """
    steps, shards = recipe(job.recipe), output.shards
    learns = steps.truecase and models is None
    left_out = frozenset() if learns else finished  # Truecasers learn from all captions.
    pieces = pipeline | "ReadCaptions" >> ReadCaptions(job.open_source(), shards, job.selection, left_out, staged, check)
    truecasers, written = None, []
    if steps.truecase:
        if models is None:
            truecasers = pieces | "TrainTruecasers" >> TrainTruecasers(steps, job.train_splits)
        else:
            truecasers = pipeline | "GivenTruecasers" >> beam.Create(sorted(models.texts.items()))
        written.append(truecasers | "WriteTruecasers" >> beam.Map(_write_truecaser, output.folder))
    tokenize = TokenizeCaptions(output, steps, truecasers, finished, job.open_source().repeat_advice, meter)
    written.append(pieces | "TokenizeCaptions" >> tokenize)
    libraries = ("apache-beam", "sacremoses")
    _ = written | "AllDone" >> beam.Flatten() | "CommitDataset" >> CommitDataset(output, libraries=libraries)
