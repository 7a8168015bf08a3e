"""Jobs of the commands for training and evaluation; imports are light."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, TypeAlias, cast

from schemas.conversion import key_value_pairs
from schemas.errors import ImagepivotError, UsageError
from schemas.options import Device, Opt, Options
from schemas.storage.locations import absolute_location, is_remote
from schemas.writing.reuse_policy import Overwrite, Verify

if TYPE_CHECKING:
    from schemas.storage.folder import Folder
    from schemas.writing.made_from import MadeFrom
    from train.chance import Chance
    from train.config.sections import Config
    from train.data.splits import MissingFeatures
    from train.runs.checkpoints import TrainingProgress

_REPORTS = "Reports"
_EXAMPLES = "Examples and map"
FIGURES = ("retrieval", "map", "attention")
"""All figures."""

TrainingPrecision: TypeAlias = Annotated[Literal["fp32", "tf32", "bf16"], Opt("Compute in fp32 or bf16; on a GPU also tf32.")]
RunFolder: TypeAlias = Annotated[str, Opt("Folder of a run.")]
EncodedFolder: TypeAlias = Annotated[str, Opt("Read encoded captions from this folder.", is_option=True)]
EvaluatedCaptions: TypeAlias = Annotated[str, Opt("Read encoded captions, or without RUN their vectors.", is_required=True)]
EvaluatedFeatures: TypeAlias = Annotated[str, Opt("Read features or regions of the images.", is_required=True)]
CaptionVocabularyFolder: TypeAlias = Annotated[
    str, Opt("Read the vocabulary of the captions from this folder.", is_option=True)
]
WordVectorsFolder: TypeAlias = Annotated[
    str, Opt("Read word vectors from this folder, for [i]model.word_vectors[/i] finetuned or frozen.")
]
TokenFeaturesFolder: TypeAlias = Annotated[
    str, Opt("Read token vectors from this folder, for [i]model.word_vectors[/i] precomputed.")
]
MemoryMapFolder: TypeAlias = Annotated[
    str | None, Opt("Copy features to this folder and map them into memory, shared by all runs.")
]
DuplicatesFile: TypeAlias = Annotated[
    str, Opt("Leave out duplicates across splits listed by imagepivot duplicates.", metavar="FILE")
]
AllowMissingFeatures: TypeAlias = Annotated[bool, Opt("Skip captions of images without features, and report how many.")]
TruecaserFolder: TypeAlias = Annotated[str, Opt("Load truecasers from this captions folder, if its recipe truecases.")]
Tokenized: TypeAlias = Annotated[bool, Opt("Take the text as tokens separated by spaces.")]
PictureFormats: TypeAlias = Annotated[
    tuple[Literal["png", "pdf", "svg"], ...], Opt("Write pictures as these files, e.g. [i]png,pdf,svg[/i].", name="format")
]
RunLanguages: TypeAlias = Annotated[tuple[str, ...], Opt("Use only these languages. Default: all of the run.")]
ConfigSettings: TypeAlias = Annotated[
    tuple[str, ...],
    Opt(
        "Set a configuration value, e.g. [i]model.embed_dim=256[/i]; repeatable.",
        name="set",
        metavar="K=V",
        is_repeated=True,
    ),
]
MaxSteps: TypeAlias = Annotated[
    int | None, Opt("Stop after this many steps, as [i]--set schedule.max_steps=N[/i] does.", min_=1)
]


def _presets() -> tuple[str, ...]:
    from train.config.presets import list_presets

    return list_presets()


class Configuration(Protocol):
    """A resolved `train.config.sections.Config`, for callers from Python."""

    @property
    def description(self) -> str:
        """A line for people."""


class OpenRun(Protocol):
    """An open `train.runs.run.Run`, for callers from Python."""

    @property
    def folder(self) -> Folder:
        """Folder of the run."""


class DivergedError(ImagepivotError):
    """A loss, gradient or weight is no longer finite."""


@dataclass(frozen=True, repr=False)
class Corpus(Options):
    """Folders of the datasets to train on.

    Examples:
        >>> corpus = imagepivot.Corpus(captions="encoded", features="features", vocabulary="vocabulary")
        >>> job = imagepivot.TrainJob("demo", corpus, "build/run")
    """

    captions: EncodedFolder
    features: Annotated[str, Opt("Read image features or regions from this folder.", is_option=True)]
    vocabulary: CaptionVocabularyFolder
    word_vectors: WordVectorsFolder = ""
    token_features: TokenFeaturesFolder = ""


@dataclass(frozen=True, repr=False)
class TrainJob(Options):
    """Job of ``imagepivot train``.

    The configuration may also be a resolved one, without ``settings`` and ``max_steps``. Without a corpus,
    `train.loop.training.train` needs its argument ``training_inputs``. A resumed run ignores ``init_from``.

    Examples:
        >>> corpus = imagepivot.Corpus("encoded", "features", "vocabulary")
        >>> job = imagepivot.TrainJob("demo", corpus, "build/run", device="cpu", max_steps=2)
        >>> imagepivot.train(job).progress.step
        2
    """

    config: Annotated[str | Configuration, Opt("Name of a preset, or a TOML file.", completion=_presets, is_argument=True)] = ""
    corpus: Corpus | None = None
    output: Annotated[str, Opt("Folder of the run.", is_argument=True)] = ""
    settings: ConfigSettings = ()
    languages: Annotated[tuple[str, ...], Opt("Train in these languages. Default: those of CONFIG.")] = ()
    seed: Annotated[int, Opt("Seed initial weights, order and sampling.", min_=0)] = 0
    device: Device = "auto"
    precision: TrainingPrecision = "fp32"
    compile: Annotated[bool, Opt("Compile model and loss (needs a GPU; not for SCAN).")] = False
    resume: Annotated[bool, Opt("Resume the run in OUTPUT, if any.")] = False
    allow_changed_content: Annotated[bool, Opt("Resume even if datasets or modules of --import changed since.")] = False
    init_from: Annotated[str, Opt("Initialize from the best weights of this run of the same vocabulary.", metavar="RUN")] = ""
    max_steps: MaxSteps = None
    save_every: Annotated[int, Opt("Write a checkpoint every this many steps.", min_=1)] = 500
    tensorboard: Annotated[bool, Opt("Write events for TensorBoard into OUTPUT.", panel=_REPORTS)] = False
    curves: Annotated[bool, Opt("Draw OUTPUT/curves.png.", panel=_REPORTS)] = True
    memory_map: MemoryMapFolder = None
    allow_missing_features: AllowMissingFeatures = False
    exclude: DuplicatesFile = ""

    def _check(self) -> None:
        if is_remote(self.output):
            raise UsageError(f"{self.output!r} is not a local folder: train into one, and copy the run when it is done")
        if self.init_from and absolute_location(self.init_from) == absolute_location(self.output):
            raise UsageError(
                f"--init-from {self.init_from!r} is OUTPUT itself: name another run, or continue this one with --resume"
            )
        if not isinstance(self.config, str) and (self.settings or self.max_steps):
            raise UsageError("--set and --max-steps change a preset or a file: set the values in the configuration itself")

    def resolved(self) -> Config:
        """Return the configuration.

        Raises:
            UsageError: the preset or file is missing, or not a configuration.
        """
        from train.config.sections import load_config, select_languages

        if not isinstance(self.config, str):
            return select_languages(cast("Config", self.config), self.languages)
        if not self.config:
            raise UsageError("name a preset or a TOML file; imagepivot train --list-presets lists the presets")
        return select_languages(load_config(self.config, _overrides(self)), self.languages)


@dataclass(frozen=True)
class TrainResult:
    """Result of a training.

    Attributes:
        folder: folder of the run, for `train.runs.open_run`.
        progress: steps, best score, and the reason to stop.
        chance: recalls of a random ranking by language of the best score; empty for other training inputs than datasets.

    Examples:
        >>> corpus = imagepivot.Corpus("encoded", "features", "vocabulary")
        >>> result = imagepivot.train("demo", corpus, "build/short", device="cpu", max_steps=1)
        >>> result.folder, result.progress.step
        ('build/short', 1)
    """

    folder: str
    progress: TrainingProgress
    missing_features: tuple[MissingFeatures, ...] = ()
    chance: Mapping[str, Chance] = field(default_factory=dict)


@dataclass(frozen=True, repr=False)
class EvaluateJob(Options):
    """Job of ``imagepivot evaluate``. Several runs are an ensemble with mean scores.

    Runs are folders, or results of `train.runs.run.open_run`. Vectors of a joint model have no run.

    Examples:
        >>> job = imagepivot.EvaluateJob("runs/demo", "encoded", "features", splits=("test",), languages=("de",))
        >>> [(score.language, score.portion) for score in imagepivot.evaluate(job)]
        [('de', 'comparable'), ('de', 'translation')]
    """

    run: Annotated[
        tuple[str, ...] | str | tuple[OpenRun, ...] | OpenRun,
        Opt("Folder of a run; of several, an ensemble. Default: none, for vectors.", is_argument=True),
    ] = ()
    captions: EvaluatedCaptions = ""
    features: EvaluatedFeatures = ""
    splits: Annotated[
        tuple[str, ...], Opt("Use these splits, e.g. [i]val[/i]. Default: test, or else the test images of 2016.")
    ] = ()
    languages: RunLanguages = ()
    portions: Annotated[
        tuple[str, ...], Opt("Use only these portions: comparable, translation. Default: all, each by itself.")
    ] = ()
    device: Device = "auto"
    memory_map: MemoryMapFolder = None
    allow_missing_features: AllowMissingFeatures = False
    folds: Annotated[int, Opt("Average over this many folds of the images (5 for COCO 1K).", min_=1)] = 1
    cross_lingual: Annotated[bool, Opt("Rank captions among those in each other language, too.")] = False
    token_features: TokenFeaturesFolder = ""
    relevance: Annotated[
        tuple[str, ...],
        Opt("Measure with correct items of this ECCV Caption or CxC file, too; repeatable.", metavar="FILE", is_repeated=True),
    ] = ()
    annotations: Annotated[
        str, Opt("Read ids of captions for --relevance from this JSON file of COCO or Karpathy's splits.", metavar="FILE")
    ] = ""
    exclude: DuplicatesFile = ""

    def _check(self) -> None:
        if self.relevance and (not self.annotations or self.folds > 1):
            raise UsageError("--relevance needs --annotations, and one gallery of all images: give both, without --folds")
        for index, run in enumerate(self.runs):
            if run in self.runs[:index]:
                raise UsageError(f"{run!r} is given twice, so that its scores would count twice: give it once")

    @property
    def members(self) -> tuple[str | OpenRun, ...]:
        """The runs, as given."""
        return self.run if isinstance(self.run, tuple) else (self.run,)

    @property
    def runs(self) -> tuple[str, ...]:
        """Folders of the runs."""
        return tuple(run if isinstance(run, str) else run.folder.location for run in self.members)

    def made_from(self) -> MadeFrom:
        """Return the inputs of the scores, see `schemas.writing.made_from`."""
        names = ("splits", "languages", "portions", "folds", "cross_lingual", "allow_missing_features")
        inputs = ("runs", "captions", "features", "token_features", "relevance", "annotations", "exclude")
        sides = "image_to_caption", "caption_to_image"
        files = {name.replace(*pair) for name in self.relevance for pair in (sides, sides[::-1])}  # One names both.
        return _made_from("evaluate", replace(self, relevance=tuple(sorted(files))), names, inputs)


@dataclass(frozen=True, repr=False)
class EmbedJob(Options):
    """Job of ``imagepivot embed``.

    Examples:
        >>> manifests = imagepivot.embed(imagepivot.EmbedJob("runs/demo", "build/embeddings", captions="encoded"))
        >>> imagepivot.open_dataset("build/embeddings/captions").numpy("embedding").shape
        (36, 64)
    """

    run: RunFolder
    output: Annotated[str, Opt("Folder for the datasets OUTPUT/images and OUTPUT/captions.")]
    features: Annotated[str, Opt("Embed the images of these features or regions. Default: none.")] = ""
    captions: Annotated[str, Opt("Embed these encoded captions. Default: none.")] = ""
    device: Device = "auto"
    overwrite: Overwrite = False
    splits: Annotated[
        tuple[str, ...], Opt("Embed only captions of these splits, and their images, e.g. [i]val,test[/i]. Default: all.")
    ] = ()
    languages: RunLanguages = ()
    allow_missing_features: Annotated[bool, Opt("Skip images of --splits without features, and report how many.")] = False
    token_features: TokenFeaturesFolder = ""
    verify: Verify = False

    def _check(self) -> None:
        if not self.features and not self.captions:
            raise UsageError("nothing to embed: give --features, --captions, or both")
        if (self.splits or self.languages) and not self.captions:
            raise UsageError("--splits and --languages select captions and their images: give --captions, too")

    @property
    def name(self) -> str:
        """Name of the embedding in datasets: the last component of the run's folder."""
        return self.run.rstrip("/").rpartition("/")[2] or "run"


@dataclass(frozen=True, repr=False)
class SearchJob(Options):
    """Job of ``imagepivot search``.

    Examples:
        >>> job = imagepivot.SearchJob("runs/demo", "red circle", language="en", features="features", top=3, tokenized=True)
        >>> len(imagepivot.search(job))
        3
    """

    run: RunFolder
    query: Annotated[tuple[str, ...] | str, Opt("Sentences to search for.", is_argument=True)] = ()
    language: Annotated[
        str,
        Opt("Set the language of all sentences, or of each, e.g. [i]en,de[/i]. Default: that of a run with a single one."),
    ] = ""
    features: Annotated[str, Opt("Search the images of these features.")] = ""
    embeddings: Annotated[str, Opt("Search the embeddings that imagepivot embed wrote, instead of --features.")] = ""
    top: Annotated[int, Opt("List this many images.", min_=1)] = 10
    truecaser: TruecaserFolder = ""
    device: Device = "auto"
    tokenized: Tokenized = False

    def _check(self) -> None:
        if bool(self.features) == bool(self.embeddings):
            raise UsageError("search needs images: give either --features or --embeddings")
        queries, languages = len(self.queries), self.language.count(",") + 1
        if languages not in (1, queries):
            raise UsageError(f"--language names {languages} languages for {queries} sentences: name one, or one per sentence")

    @property
    def queries(self) -> list[tuple[str, str]]:
        """The sentences, each with its language; empty for that of the run."""
        sentences = (self.query,) if isinstance(self.query, str) else self.query
        languages = self.language.split(",")
        return list(zip(sentences, languages * len(sentences) if len(languages) == 1 else languages, strict=False))


@dataclass(frozen=True, repr=False)
class StsJob(Options):
    r"""Job of ``imagepivot sts``.

    Runs and sentence pairs are distinguished by the contents of their folders. See `train.sts.pairs` for the
    formats. The language is English if a run supports it, or the only language of the run.

    Examples:
        >>> _ = Path("pairs.tsv").write_text("5\tred circle\ta red circle\n0\tred circle\tblue star\n3\ta star\tblue star\n")
        >>> result = imagepivot.sts(imagepivot.StsJob(("pairs.tsv", "runs/demo"), tokenized=True))
        >>> [system.name for system in result.systems]
        ['word overlap', 'runs/demo']
    """

    places: Annotated[
        tuple[str, ...], Opt("Folders of runs, pretrained models, and files or folders of sentence pairs, in any order.")
    ]
    vectors: Annotated[
        tuple[str, ...],
        Opt(
            "Measure averaged word vectors ([i].vec[/i], [i].txt[/i], also [i].gz[/i]), too; repeatable.",
            metavar="FILE",
            is_repeated=True,
        ),
    ] = ()
    language: Annotated[str, Opt("Set the language of the sentences. Default: en, if the run has it.")] = ""
    tokenized: Tokenized = False
    truecaser: TruecaserFolder = ""
    device: Device = "auto"


@dataclass(frozen=True, repr=False)
class FiguresJob(Options):
    """Job of ``imagepivot figures``.

    Examples:
        >>> job = imagepivot.FiguresJob("runs/demo", "build/figures", "encoded", "features", only=("retrieval",), split="test")
        >>> imagepivot.draw_figures(job, imagepivot.read_pictures).names
        ('retrieval.png', 'figures.json')
    """

    run: Annotated[str, Opt("Folder of a run. Default: none, for vectors.", is_argument=True)] = ""
    output: Annotated[str, Opt("Folder for the figures.", is_argument=True)] = ""
    captions: EvaluatedCaptions = ""
    features: EvaluatedFeatures = ""
    images: Annotated[str, Opt("Draw images from this location, as for features. Default: draw image ids.")] = ""
    only: Annotated[
        tuple[str, ...],
        Opt(
            "Draw only [i]retrieval[/i], [i]map[/i] or [i]attention[/i]. Default: all that the model has.",
            completion=FIGURES,
        ),
    ] = ()
    split: Annotated[str, Opt("Use this split. Default: test, or else the test images of 2016.")] = ""
    languages: RunLanguages = ()
    portion: Annotated[str, Opt("Use only [i]comparable[/i] or [i]translation[/i]. Default: the first that all have.")] = ""
    examples: Annotated[int, Opt("Draw this many images as examples.", panel=_EXAMPLES, min_=1)] = 4
    caption_ids: Annotated[
        tuple[str, ...], Opt("Draw these captions instead, as [i]image/language/portion/index[/i].", panel=_EXAMPLES)
    ] = ()
    top: Annotated[int, Opt("Show this many images per caption.", panel=_EXAMPLES, min_=1)] = 5
    points: Annotated[int, Opt("Draw this many images in the map.", panel=_EXAMPLES, min_=2)] = 100
    seed: Annotated[int, Opt("Seed the choice of examples, and the map.", panel=_EXAMPLES, min_=0)] = 0
    device: Device = "auto"
    memory_map: MemoryMapFolder = None
    allow_missing_features: AllowMissingFeatures = False
    token_features: TokenFeaturesFolder = ""
    texts: Annotated[
        str, Opt("Draw captions as written in this folder of captions. Default: tokens of a run, ids of vectors.")
    ] = ""
    formats: PictureFormats = ("png",)

    def _check(self) -> None:
        if not self.output:  # A command line with a single folder.
            object.__setattr__(self, "output", self.run)
            object.__setattr__(self, "run", "")
        if not self.output:
            raise UsageError("OUTPUT is missing: name a folder for the figures")
        for name in self.only:
            if name not in FIGURES:
                raise UsageError(f"--only names {name!r}, expected some of {', '.join(FIGURES)}")

    def made_from(self) -> MadeFrom:
        """Return the inputs of the figures, see `schemas.writing.made_from`."""
        inputs = ("run", "captions", "features", "token_features", "texts")
        names = (*inputs, "output", "images", "device", "memory_map")
        return _made_from("figures", self, [name for name in vars(self) if name not in names], inputs, images=self.images)


@dataclass(frozen=True, repr=False)
class ReproduceJob(Options):
    """Job of ``imagepivot reproduce``. ``output`` becomes an absolute path.

    Examples:
        >>> job = imagepivot.ReproduceJob("kadar2018", "build/kadar", "encoded", ("features",), "vocabulary", seeds=3)
        >>> result = imagepivot.reproduce(job)  # doctest: +SKIP
    """

    paper: Annotated[Literal["gella2017", "kadar2018", "huang2019"], Opt("Paper to reproduce.")]
    output: Annotated[str, Opt("Folder for runs, results and report.")]
    captions: EncodedFolder
    features: Annotated[
        tuple[str, ...],
        Opt(
            "Read features or regions from this folder; repeatable, each row uses the first that fits.",
            is_option=True,
            is_repeated=True,
        ),
    ]
    vocabulary: CaptionVocabularyFolder
    word_vectors: WordVectorsFolder = ""
    token_features: TokenFeaturesFolder = ""
    seeds: Annotated[int, Opt("Train this many runs per row.", min_=1)] = 10
    rows: Annotated[
        tuple[str, ...],
        Opt("Train only presets that match this pattern, e.g. [i]'bilingual*'[/i]; repeatable.", is_repeated=True),
    ] = ()
    table: Annotated[int | None, Opt("Train only the rows of this table.", min_=1)] = None
    split: Annotated[
        str, Opt("Evaluate on this split, without published numbers. Default: the papers' test images of 2016.")
    ] = ""
    sts: Annotated[
        tuple[str, ...],
        Opt(
            "Measure textual similarity on these sentence pairs, as sts does (table 4 of gella2017, 2 of huang2019); repeatable.",
            metavar="DATA",
            is_repeated=True,
        ),
    ] = ()
    truecaser: TruecaserFolder = ""
    settings: ConfigSettings = ()
    max_steps: MaxSteps = None
    workers: Annotated[int, Opt("Train this many runs in parallel; 0: one per GPU, or else one per core.", min_=0)] = 0
    device: Device = "auto"
    precision: TrainingPrecision = "fp32"
    memory_map: MemoryMapFolder = None
    allow_missing_features: AllowMissingFeatures = False

    def _check(self) -> None:
        if self.table is not None and self.rows:
            raise UsageError("--table and --rows both select rows: give only one of them")
        if self.split and (self.paper, self.table) == ("gella2017", 3):
            raise UsageError("table 3 of gella2017 ranks captions of the test images of 2016: leave --split out")
        if is_remote(self.output):
            raise UsageError(f"{self.output!r} is not a local folder: train into one, and copy it when it is done")
        object.__setattr__(self, "output", absolute_location(self.output))

    @property
    def corpus(self) -> Corpus:
        """The folders, with the first folder of features."""
        return Corpus(self.captions, self.features[0], self.vocabulary, self.word_vectors, self.token_features)

    @property
    def overrides(self) -> Mapping[str, str]:
        """Values for all configurations, see `train.config.sections.load_config`."""
        return _overrides(self)


def _overrides(job: TrainJob | ReproduceJob) -> dict[str, str]:
    overrides = key_value_pairs(job.settings, "optimizer.learning_rate=1e-3")
    return overrides if job.max_steps is None else overrides | {"schedule.max_steps": str(job.max_steps)}


def _made_from(command: str, job: object, options: Any, inputs: Any, *, images: str = "") -> MadeFrom:
    from schemas.writing.made_from import made_from

    data = {name: getattr(job, name) for name in inputs}
    data = {name: (value,) if isinstance(value, str) else value for name, value in data.items()}
    return made_from(command, {name: getattr(job, name) for name in options}, data, images=images)
