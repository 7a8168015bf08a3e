"""Beam transforms of the text commands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import apache_beam as beam

from pipelines.inputs.captions.base import INDEX_ADVICE, CaptionSource, Selection
from pipelines.jobs import CaptionsJob, TextFeaturesJob, VocabularyJob
from pipelines.running.meter import Meter
from pipelines.running.preflight import PreflightCheck
from pipelines.running.transforms import CreateAfterPreflight, WriteShards, spread_shards
from pipelines.text.caption_shards import block_forms, group_parts, read_sorted_runs, write_caption_shard
from pipelines.text.encoding import ShardEncoder
from pipelines.text.merge_sort import read_run
from pipelines.text.moses import Recipe, load_recipe
from pipelines.text.text_features import TextFeatureExtractor
from pipelines.text.token_counts import count_tokens, sum_counters, write_vocabulary
from pipelines.text.truecasing import TruecaseModel, write_truecaser
from schemas.dataset import Dataset
from schemas.writing.output import OutputDataset

# --- captions --------------------------------------------------------------------------------------------------------


@dataclass(eq=False)  # Not frozen: Beam sets the label.
class ReadCaptions(beam.PTransform):
    """A source to pairs (shard index, sorted run): the root of a pipeline.

    Attributes:
        check: preflight check of the first worker on another machine; None on this one.

    Examples:
        >>> source = imagepivot.open_captions("table", "captions.tsv")
        >>> with beam.Pipeline() as pipeline:
        ...     runs = pipeline | imagepivot.ReadCaptions(source, shards=2, selection=imagepivot.Selection(languages=("de",)))
    """

    source: CaptionSource
    shards: int
    selection: Selection = Selection()
    skip_shards: frozenset[int] = frozenset()
    check: PreflightCheck | None = None

    def expand(self, root: beam.pvalue.PBegin) -> beam.PCollection:
        """List the parts here, and read them on all workers."""
        groups = group_parts(self.source.parts(self.selection))
        read = partial(
            read_sorted_runs,
            source=self.source,
            selection=self.selection,
            shards=self.shards,
            skip_shards=self.skip_shards,
        )
        return (
            root
            | "ListParts" >> CreateAfterPreflight(groups, self.check)
            | "SpreadParts" >> beam.Reshuffle()  # Fusion break: the parts are read by all workers.
            | "ReadRuns" >> beam.FlatMap(read)
        )


@dataclass(eq=False)
class TrainTruecasers(beam.PTransform):
    """Pairs (shard index, sorted run) to pairs (language, text of a truecaser).

    Examples:
        >>> source, recipe = imagepivot.open_captions("table", "captions.tsv"), imagepivot.load_recipe("moses-truecase")
        >>> with beam.Pipeline() as pipeline:
        ...     models = pipeline | imagepivot.ReadCaptions(source, shards=2) | imagepivot.TrainTruecasers(recipe)
    """

    recipe: Recipe
    splits: tuple[str, ...] = ("train",)

    def expand(self, runs: beam.PCollection) -> beam.PCollection:
        """Sum counts by language: independent of order and sharding."""
        steps, splits = self.recipe, frozenset(self.splits)
        return (
            runs
            | "SpreadRuns" >> beam.Reshuffle()  # Fusion break after fan-out: a part is a file of any size.
            | "CountForms" >> beam.FlatMap(lambda run: block_forms(read_run(run[1]), steps, splits).items())
            | "SumForms" >> beam.CombinePerKey(sum_counters)
            | "ChooseForms" >> beam.MapTuple(lambda language, counts: (language, TruecaseModel.from_counts(counts).to_text()))
        )


@dataclass(eq=False)
class TokenizeCaptions(beam.PTransform):
    """Pairs (shard index, sorted run) to shards on disk, as their indices.

    Attributes:
        truecasers: pairs (language, text of a truecaser), for a recipe that truecases.
        advice: end of the error for a duplicate key.

    Examples:
        >>> source = imagepivot.open_captions("table", "captions.tsv")
        >>> output = imagepivot.OutputDataset(imagepivot.Folder("build/tokens"), "captions", {"recipe": "raw"}, shards=2)
        >>> with beam.Pipeline() as pipeline:
        ...     runs = pipeline | imagepivot.ReadCaptions(source, output.shards)
        ...     shards = runs | imagepivot.TokenizeCaptions(output, imagepivot.load_recipe("raw"))
    """

    output: OutputDataset
    recipe: Recipe
    truecasers: beam.PCollection | None = None
    finished: frozenset[int] = frozenset()
    advice: str = INDEX_ADVICE
    meter: Meter = Meter()

    def expand(self, runs: beam.PCollection) -> beam.PCollection:
        """Group the runs by shard, and write each shard in one call, also an empty one."""
        missing = [(shard, None) for shard in self.output.missing(self.finished)]
        write = beam.Map(
            # Beam pickles the classes in annotations before the function, but a worker must import `pipelines` first.
            beam.typehints.no_annotations(write_caption_shard),
            models=beam.pvalue.AsDict(self.truecasers) if self.truecasers is not None else {},
            output=self.output,
            recipe=self.recipe,
            advice=self.advice,
            meter=self.meter,
        )
        return (
            (
                runs | "SkipFinished" >> beam.Filter(lambda run, finished: run[0] not in finished, self.finished),
                runs.pipeline | "EveryShard" >> beam.Create(missing),
            )
            | "RunsAndShards" >> beam.Flatten()
            | "GroupByShard" >> beam.GroupByKey()
            | "WriteShard" >> write
        )


def build_captions(
    pipeline: beam.Pipeline,
    finished: frozenset[int],
    check: PreflightCheck | None,
    *,
    job: CaptionsJob,
    output: OutputDataset,
    models: Mapping[str, str] | None,
    meter: Meter,
) -> beam.PCollection:
    """Add the transforms of a job to a pipeline, for `pipelines.running.job.run_job`."""
    steps, source = load_recipe(job.recipe), job.open_captions()
    skip_shards = frozenset() if steps.truecase and models is None else finished  # Truecasers learn from all captions.
    runs = pipeline | "ReadCaptions" >> ReadCaptions(source, output.shards, job.selection, skip_shards, check)
    truecasers, written = None, []
    if steps.truecase:
        if models is None:
            truecasers = runs | "TrainTruecasers" >> TrainTruecasers(steps, job.train_splits)
        else:
            truecasers = pipeline | "GivenTruecasers" >> beam.Create(sorted(models.items()))
        write = beam.Map(lambda model, folder: (write_truecaser(model[0], model[1], folder),), output.folder)
        written.append(truecasers | "WriteTruecasers" >> write)
    tokenize = TokenizeCaptions(output, steps, truecasers, finished, source.repeat_advice, meter)
    written.append(runs | "TokenizeCaptions" >> tokenize)
    return written | "AllDone" >> beam.Flatten()


# --- vocabulary ------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class CountTokens(beam.PTransform):
    """Shard indices to pairs ((portion, split, language), token counts).

    Examples:
        >>> captions = imagepivot.open_dataset("captions")
        >>> with beam.Pipeline() as pipeline:
        ...     counts = pipeline | beam.Create(range(captions.num_shards)) | imagepivot.CountTokens(captions)
        ...     _ = counts | beam.MapTuple(lambda group, counter: print(*group, counter.most_common(2)))
        translation...
    """

    captions: Dataset
    meter: Meter = Meter()

    def expand(self, shards: beam.PCollection) -> beam.PCollection:
        """Count each shard on the worker that reads it; only counts are shuffled."""
        count = beam.FlatMap(lambda shard, *inputs: count_tokens([shard], *inputs).items(), self.captions, self.meter)
        return shards | "CountShard" >> count | "SumCounts" >> beam.CombinePerKey(sum_counters)


@dataclass(eq=False)
class BuildVocabulary(beam.PTransform):
    """Pairs ((portion, split, language), token counts) to a vocabulary dataset.

    Examples:
        >>> captions, folder = imagepivot.open_dataset("captions"), imagepivot.Folder("build/words")
        >>> job = imagepivot.VocabularyJob("captions", folder.location, min_count=1)
        >>> output = imagepivot.OutputDataset(folder, "vocabulary", {"min_count": 1})
        >>> with beam.Pipeline() as pipeline:
        ...     counts = pipeline | beam.Create(range(captions.num_shards)) | imagepivot.CountTokens(captions)
        ...     _ = counts | imagepivot.BuildVocabulary(job, output) | imagepivot.CommitDataset(output, libraries=())
    """

    job: VocabularyJob
    output: OutputDataset

    def expand(self, counts: beam.PCollection) -> beam.PCollection:
        """Pass all counts to one call as a side input."""
        once = counts.pipeline | "Once" >> beam.Create([b""])
        write = beam.Map(
            lambda _, counts, job, output: (write_vocabulary(job, output, [counts]),),
            beam.pvalue.AsDict(counts),
            job=self.job,
            output=self.output,
        )
        return once | "Write" >> write


def build_counts(
    pipeline: beam.Pipeline,
    finished: frozenset[int],
    check: PreflightCheck | None,
    *,
    job: VocabularyJob,
    captions: Dataset,
    output: OutputDataset,
    meter: Meter,
) -> beam.PCollection:
    """Add the transforms of a job to a pipeline, for `pipelines.running.job.run_job`."""
    counts = spread_shards(pipeline, range(captions.num_shards), check) | "CountTokens" >> CountTokens(captions, meter)
    return counts | "BuildVocabulary" >> BuildVocabulary(job, output)


# --- shard by shard --------------------------------------------------------------------------------------------------


class EncodeCaptions(WriteShards):
    """Shard indices to encoded shards on disk, as their indices.

    Examples:
        >>> output = imagepivot.OutputDataset(imagepivot.Folder("build/ids"), "encoded", {"max_length": 20}, shards=2)
        >>> captions, vocabulary = imagepivot.open_dataset("captions"), imagepivot.open_dataset("vocabulary")
        >>> with beam.Pipeline() as pipeline:
        ...     _ = pipeline | beam.Create(range(2)) | imagepivot.EncodeCaptions(captions, vocabulary, 20, output)
    """

    def __init__(
        self, captions: Dataset, vocabulary: Dataset, max_length: int, output: OutputDataset, meter: Meter = Meter()
    ) -> None:
        super().__init__(ShardEncoder(captions, vocabulary, max_length, output, meter))


class ExtractTokenFeatures(WriteShards):
    """Shard indices to shards of token features on disk, as their indices.

    The arguments are those of `pipelines.text.text_features.TextFeatureExtractor`.

    Examples:
        >>> job = imagepivot.TextFeaturesJob("captions", "build/vectors", model="bert")
        >>> parameters = {"feature": {"name": "bert", "shape": [16]}, "model_fingerprint": job.request().describe().fingerprint}
        >>> output = imagepivot.OutputDataset(imagepivot.Folder(job.output), "token-features", parameters, shards=2)
        >>> with beam.Pipeline() as pipeline:
        ...     extract = imagepivot.ExtractTokenFeatures(job, imagepivot.open_dataset("captions"), output)
        ...     _ = pipeline | beam.Create(range(2)) | extract
    """

    def __init__(
        self, job: TextFeaturesJob, captions: Dataset, output: OutputDataset, meter: Meter = Meter(), threads: int = 0
    ) -> None:
        super().__init__(TextFeatureExtractor(job, captions, output, meter, threads))
