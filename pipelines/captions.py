"""``imagepivot captions``: raw captions in, tokenized captions in shards out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import apache_beam as beam
from apache_beam.metrics import Metrics

from pipelines.caption_blocks import (
    block_forms,
    blocks_of,
    caption_statistics,
    from_ipc,
    shard_rows,
    split_by_shard,
    to_ipc,
    tokenize_block,
    truecase_block,
)
from pipelines.commits import CommitDataset, run_job
from pipelines.moses import DEFAULT_RECIPE, Recipe, recipe
from pipelines.progress import Meter
from pipelines.runner import Execution
from pipelines.sources import CaptionSource, Part, Selection
from pipelines.truecasers import load_truecasers, parse_truecaser, truecaser_name
from pipelines.truecasing import TruecaseModel
from schemas.errors import UsageError
from schemas.fingerprints import Identity
from schemas.keys import check_shards
from schemas.kinds import CAPTIONS
from schemas.manifest import Manifest
from schemas.output import Output
from schemas.shards import write_shard
from schemas.storage import Folder

__all__ = ["DEFAULT_SHARDS", "CaptionsJob", "TokenizeCaptions", "TrainTruecasers", "WriteCaptionShards", "prepare_captions"]

DEFAULT_SHARDS = 16


def _read_blocks(part: tuple[int, Part], source: CaptionSource, selection: Selection) -> Iterator[bytes]:
    number, what = part
    for block in blocks_of(source.read(what, selection), number):
        yield to_ipc(block)


class _TokenizeFn(beam.DoFn):
    def __init__(self, recipe: Recipe, meter: Meter) -> None:
        self._recipe = recipe
        self._meter = meter
        self._captions = Metrics.counter("TokenizeCaptions", "captions_tokenized")

    def process(self, block: bytes) -> Iterator[bytes]:
        table = tokenize_block(from_ipc(block), self._recipe)
        self._captions.inc(table.num_rows)
        self._meter.add(captions=table.num_rows)
        yield to_ipc(table)


@dataclass(eq=False)  # Not frozen: Beam sets the label.
class TokenizeCaptions(beam.PTransform):
    """Blocks of captions to blocks with the column ``tokens``.

    Attributes:
        recipe: the steps; truecasing is not among those taken here.
        meter: counts captions.
    """

    recipe: Recipe
    meter: Meter = Meter()

    def expand(self, blocks: beam.PCollection) -> beam.PCollection:
        """Element by element."""
        return blocks | "Tokenize" >> beam.ParDo(_TokenizeFn(self.recipe, self.meter))


class SumCounters(beam.CombineFn):
    """Adds up counters. One accumulator a key holds the distinct items of that key, never the corpus."""

    def create_accumulator(self) -> Counter[str]:
        """An empty counter."""
        return Counter()

    def add_input(self, accumulator: Counter[str], element: Mapping[str, int]) -> Counter[str]:
        """Adds one counter."""
        accumulator.update(element)
        return accumulator

    def merge_accumulators(self, accumulators: Iterable[Counter[str]]) -> Counter[str]:
        """Adds all."""
        total: Counter[str] = Counter()
        for accumulator in accumulators:
            total.update(accumulator)
        return total

    def extract_output(self, accumulator: Counter[str]) -> Counter[str]:
        """The sum."""
        return accumulator


def _forms(block: bytes, splits: frozenset[str]) -> Iterator[tuple[str, dict[str, int]]]:
    yield from block_forms(from_ipc(block), splits).items()


@dataclass(eq=False)  # Not frozen: Beam sets the label.
class TrainTruecasers(beam.PTransform):
    """Tokenized blocks to (language, model text): one truecaser a language.

    Attributes:
        splits: the splits to learn from.
    """

    splits: tuple[str, ...] = ("train",)

    def expand(self, blocks: beam.PCollection) -> beam.PCollection:
        """Counts are summed by language, so that neither order nor sharding matters."""
        return (
            blocks
            | "CountForms" >> beam.FlatMap(_forms, frozenset(self.splits))
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


def _truecase(block: bytes, models: Mapping[str, str]) -> bytes:
    return to_ipc(truecase_block(from_ipc(block), {language: parse_truecaser(text) for language, text in models.items()}))


def _split(block: bytes, shards: int, finished: frozenset[int]) -> Iterator[tuple[int, bytes]]:
    for number, rows in split_by_shard(from_ipc(block), shards, finished):
        yield number, to_ipc(rows)


class _WriteFn(beam.DoFn):
    def __init__(self, output: Output) -> None:
        self._output = output
        self._rows = Metrics.counter("WriteCaptionShards", "captions_written")
        self._failed = Metrics.counter("WriteCaptionShards", "captions_failed")

    def process(self, element: tuple[int, Iterable[bytes]]) -> Iterator[int]:
        number, blocks = element
        rows, failures = shard_rows(from_ipc(block) for block in blocks if block)
        write_shard(
            self._output.folder,
            self._output.names()[number],
            [rows],
            schema=CAPTIONS,
            identity=self._output.identity,
            statistics=caption_statistics(rows),
            failures=failures,
        )
        self._rows.inc(rows.num_rows)
        self._failed.inc(len(failures))
        yield number


@dataclass(eq=False)  # Not frozen: Beam sets the label.
class WriteCaptionShards(beam.PTransform):
    """Tokenized blocks to shards on disk; gives the numbers of the shards that it wrote.

    Attributes:
        output: the dataset.
        finished: shards that an earlier run finished; their rows are dropped before the shuffle.
    """

    output: Output
    finished: frozenset[int] = frozenset()

    def expand(self, blocks: beam.PCollection) -> beam.PCollection:
        """Groups the rows by shard. Every shard is written, also one without rows."""
        shards = self.output.identity.shards
        todo = [(number, b"") for number in range(shards) if number not in self.finished]
        rows = blocks | "SplitByShard" >> beam.FlatMap(_split, shards, self.finished)
        return (
            (rows, blocks.pipeline | "EveryShard" >> beam.Create(todo))
            | "RowsAndShards" >> beam.Flatten()
            | "GroupByShard" >> beam.GroupByKey()
            | "WriteShard" >> beam.ParDo(_WriteFn(self.output))
        )


@dataclass(frozen=True)
class CaptionsJob:
    """What ``imagepivot captions`` does.

    Attributes:
        source: the raw captions.
        output: folder of the dataset.
        selection: which captions.
        recipe: name of the text recipe.
        train_splits: splits that the truecasers are learned from.
        truecaser: folder with learned truecasers (or a captions dataset that holds some); learned when None.
        shards: number of shards.
        overwrite: replace a dataset of another fingerprint.
    """

    source: CaptionSource
    output: str
    selection: Selection = Selection()
    recipe: str = DEFAULT_RECIPE
    train_splits: tuple[str, ...] = ("train",)
    truecaser: str | None = None
    shards: int = DEFAULT_SHARDS
    overwrite: bool = False

    def __post_init__(self) -> None:
        check_shards(self.shards)
        if self.truecaser is not None and not recipe(self.recipe).truecase:
            raise UsageError(f"recipe {self.recipe!r} does not truecase: leave --truecaser out, or use --recipe moses-truecase")


def prepare_captions(job: CaptionsJob, execution: Execution = Execution(), meter: Meter = Meter()) -> Manifest:
    """Makes a dataset of kind ``captions``.

    Args:
        job: what to make.
        execution: where and how to run.
        meter: counts captions for whoever watches.

    Raises:
        ImagepivotError: the source is broken, or the folder cannot be written.
    """
    steps = recipe(job.recipe)
    models = load_truecasers(job.truecaser) if job.truecaser is not None else None
    parameters: dict[str, object] = {
        **job.source.parameters(),
        **steps.parameters(),
        "languages": sorted(job.selection.languages),
        "portions": sorted(job.selection.portions),
        "splits": sorted(job.selection.splits),
    }
    if steps.truecase and models is None:
        parameters["train_splits"] = list(job.train_splits)
    parts = job.source.parts(job.selection)
    inputs = job.source.inputs(job.selection) + (models.inputs() if models is not None else [])
    identity = Identity(kind="captions", parameters=parameters, inputs=tuple(inputs), shards=job.shards)
    output = Output(folder=Folder(job.output), identity=identity)

    def build(pipeline: beam.Pipeline, finished: frozenset[int]) -> None:
        blocks = (
            pipeline
            | "ListParts" >> beam.Create(list(enumerate(parts)))
            | "SpreadParts" >> beam.Reshuffle()  # Fusion break: the parts are read by all workers.
            | "ReadCaptions" >> beam.FlatMap(_read_blocks, job.source, job.selection)
            | "SpreadBlocks" >> beam.Reshuffle()  # Fusion break after fan-out: one part is a file of any size.
            | "TokenizeCaptions" >> TokenizeCaptions(steps, meter)
        )
        done = []
        if steps.truecase:
            if models is None:
                trained = blocks | "TrainTruecasers" >> TrainTruecasers(job.train_splits)
            else:
                trained = pipeline | "GivenTruecasers" >> beam.Create(sorted(models.texts.items()))
            blocks = blocks | "TruecaseCaptions" >> beam.Map(_truecase, models=beam.pvalue.AsDict(trained))
            done.append(trained | "WriteTruecasers" >> beam.Map(_write_truecaser, output.folder))
        done.append(blocks | "WriteCaptionShards" >> WriteCaptionShards(output, finished))
        libraries = ("apache-beam", "sacremoses")
        _ = done | "AllDone" >> beam.Flatten() | "CommitDataset" >> CommitDataset(output, libraries=libraries)

    return run_job(output, build, execution=execution, overwrite=job.overwrite)
