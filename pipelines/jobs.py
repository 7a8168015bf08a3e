"""Jobs of the commands that write datasets; each field declares its option.

Importing this loads neither Beam nor torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, TypeAlias, cast, get_args

from extractors.request import ExtractorRequest, Precision, StoredType, WeightsRequest
from extractors.tokens.request import OPEN_CLIP, SENTENCE
from schemas.errors import InputError, UsageError
from schemas.keys import AUTO, ShardsRequest, check_language, check_shards_request
from schemas.options import SEVERAL_MACHINES, Device, Opt, Options
from schemas.storage.locations import absolute_location
from schemas.writing.reuse_policy import ArrayTask, Notes, Overwrite, ReusePolicy, Verify

if TYPE_CHECKING:
    from extractors.base import Description
    from extractors.tokens.request import TextRequest
    from extractors.tokens.text_model import TextModel
    from pipelines.inputs.captions.base import CaptionSource, Selection
    from pipelines.inputs.images.base import ImageSource
    from pipelines.running.execution import Execution
    from schemas.writing.output import OutputDataset

CaptionFormat = Literal["multi30k", "karpathy", "coco", "scan", "table"]
Scope = Literal["language", "joint"]
SubWords = Literal["mean", "first"]

_TABLES = "Tables"
RECIPES = ("multi30k-lc", "moses-truecase", "raw")

CaptionsFolder: TypeAlias = Annotated[str, Opt("Folder of a captions dataset.")]
VocabularyFolder: TypeAlias = Annotated[str, Opt("Folder of a vocabulary.")]
OutputFolder: TypeAlias = Annotated[str, Opt("Folder of the dataset to write.")]
Languages: TypeAlias = Annotated[tuple[str, ...], Opt("Use only these languages, e.g. [i]en,de[/i]. Default: all.")]
Portions: TypeAlias = Annotated[
    tuple[str, ...], Opt("Use only these portions: [i]translation[/i], [i]comparable[/i]. Default: all.")
]
Shards: TypeAlias = Annotated[
    ShardsRequest,
    Opt(
        "Write this many shards; [i]auto[/i]: by size, at least 16; [i]like:DATASET[/i]: as many as there, to join by shard.",
        metavar="N",
    ),
]
IdRuleOption: TypeAlias = Annotated[
    Literal["name", "path"], Opt("Use the file [i]name[/i] or the whole [i]path[/i], without extension, as image id.")
]
Columns: TypeAlias = Annotated[Mapping[str, str], Opt("Rename columns, e.g. [i]image_id=file[/i].", panel=_TABLES)]
Delimiter: TypeAlias = Annotated[
    str, Opt("Split lines at this character, e.g. [i];[/i] or [i]tab[/i]. Default: detected.", panel=_TABLES)
]
Space: TypeAlias = Annotated[str, Opt("Name the space that two checkpoints share.", metavar="NAME")]
QuotingOption: TypeAlias = Annotated[
    Literal["auto", "rfc4180", "none"],
    Opt(
        "Read quotes by [i]rfc4180[/i], as [i]none[/i] (ordinary characters), or [i]auto[/i] (rfc4180, "
        "refusing values that look like rows).",
        panel=_TABLES,
    ),
]


class OpenSource(Protocol):
    """An open collection of captions or images, for callers from Python."""

    @property
    def location(self) -> str:
        """Location of the collection, for messages."""


@dataclass(frozen=True, repr=False)
class CaptionsJob(Options):
    """Job of ``imagepivot captions``.

    The source may also be the result of `open_captions`.

    Raises:
        UsageError: a value is out of range, or two options contradict each other.

    Examples:
        >>> job = imagepivot.CaptionsJob("captions.tsv", "build/captions", format="table", languages=("de",))
        >>> imagepivot.prepare_captions(job, imagepivot.Execution(workers=1)).rows
        12
    """

    source: Annotated[str | OpenSource, Opt("File or folder with the raw captions.")]
    output: OutputFolder
    format: Annotated[
        CaptionFormat | None,
        Opt("Read SOURCE as multi30k, karpathy, coco, scan or table. Default: table for CSV, TSV, JSON lines and Parquet."),
    ] = None
    recipe: Annotated[str, Opt("Tokenize by [i]multi30k-lc[/i], [i]moses-truecase[/i] or [i]raw[/i].", completion=RECIPES)] = (
        "multi30k-lc"
    )
    languages: Languages = ()
    portions: Portions = ()
    splits: Annotated[tuple[str, ...], Opt("Use only these splits, as SOURCE names them. Default: all.")] = ()
    columns: Columns = field(default_factory=dict)
    delimiter: Delimiter = ""
    quoting: QuotingOption = "auto"
    language: Annotated[str, Opt("Set the language of captions without one in SOURCE.")] = "en"
    id_rule: IdRuleOption = "name"
    truecaser: Annotated[str | None, Opt("Load truecasers (LANGUAGE.model) from this folder. Default: learn them.")] = None
    train_splits: Annotated[tuple[str, ...], Opt("Learn truecasers from these splits.")] = ("train",)
    shards: Shards = AUTO
    overwrite: Overwrite = False
    verify: Verify = False
    notes: Notes = Notes()

    def _check(self) -> None:
        check_shards_request(self.shards)
        if isinstance(self.source, str) and self.format is None:
            from pipelines.inputs.tables import is_table

            if not is_table(self.source):
                formats = ", ".join(get_args(CaptionFormat))
                raise UsageError(f"--format is missing, and {self.source!r} does not end as a table: name one of {formats}")
            object.__setattr__(self, "format", "table")
        object.__setattr__(self, "languages", tuple(check_language(tag) for tag in self.languages))

    @property
    def selection(self) -> Selection:
        """Selection of captions."""
        from pipelines.inputs.captions.base import Selection

        return Selection(self.languages, self.portions, self.splits)

    def open_captions(self) -> CaptionSource:
        """Open the raw captions.

        Raises:
            UsageError: an option does not fit the format.
            InputError: the source does not exist, or has another format.
        """
        from pipelines.inputs.captions.opening import open_captions
        from pipelines.inputs.files import check_order

        if not isinstance(self.source, str):
            return cast("CaptionSource", self.source)
        check_order("SOURCE", self.source, self.output)
        return open_captions(
            self.format or "",
            self.source,
            language=self.language,
            columns=self.columns,
            id_rule=self.id_rule,
            delimiter=self.delimiter,
            quoting=self.quoting,
        )


@dataclass(frozen=True, repr=False)
class VocabularyJob(Options):
    """Job of ``imagepivot vocabulary``.

    Raises:
        UsageError: a value is out of range.

    Examples:
        >>> job = imagepivot.VocabularyJob("captions", "build/vocabulary", min_count=1, languages=("de",))
        >>> imagepivot.build_vocabulary(job, imagepivot.Execution(workers=1)).kind
        'vocabulary'
    """

    captions: CaptionsFolder
    output: OutputFolder
    min_count: Annotated[int, Opt("Keep tokens with at least this count.", min_=1)] = 4
    count_scope: Annotated[
        Scope, Opt("Compare the count in any one [i]language[/i], or the [i]joint[/i] count, with --min-count.")
    ] = "language"
    languages: Languages = ()
    portions: Portions = ()
    splits: Annotated[tuple[str, ...], Opt("Count the tokens of these splits.")] = ("train",)
    overwrite: Overwrite = False
    verify: Verify = False
    notes: Notes = Notes()


@dataclass(frozen=True, repr=False)
class EncodeJob(Options):
    """Job of ``imagepivot encode``.

    Captions are cut after 100 tokens by default, as in Huang et al. 2019.

    Raises:
        UsageError: a value is out of range.

    Examples:
        >>> job = imagepivot.EncodeJob("captions", "vocabulary", "build/encoded", max_length=50)
        >>> imagepivot.encode_captions(job, imagepivot.Execution(workers=1)).rows
        36
    """

    captions: CaptionsFolder
    vocabulary: VocabularyFolder
    output: OutputFolder
    max_length: Annotated[int, Opt("Keep at most this many tokens, besides <start> and <end>.", min_=1)] = 100
    overwrite: Overwrite = False
    verify: Verify = False
    notes: Notes = Notes()


@dataclass(frozen=True, repr=False)
class WordVectorsJob(Options):
    r"""Job of ``imagepivot word-vectors``; see `schemas.vector_files` for the files.

    Raises:
        UsageError: the numbers of languages and files differ.

    Examples:
        >>> _ = Path("en.vec").write_text("2 3\nred 1 0 0\ncircle 0 1 0\n")
        >>> job = imagepivot.WordVectorsJob("vocabulary", ("en.vec",), "build/word-vectors", languages=("en",))
        >>> imagepivot.import_word_vectors(job).rows
        2
    """

    vocabulary: VocabularyFolder
    files: Annotated[tuple[str, ...], Opt("Files of word vectors: .vec or .txt, also .gz; or fastText's .bin.")]
    output: OutputFolder
    languages: Annotated[tuple[str, ...], Opt("Name the language of each FILE, in order, e.g. [i]en,de[/i].", is_option=True)]
    overwrite: Overwrite = False
    verify: Verify = False
    notes: Notes = Notes()

    def _check(self) -> None:
        if not self.files or len(self.files) != len(self.languages):
            raise UsageError(
                f"--languages is {','.join(self.languages)!r}, expected one language per FILE, in order: it "
                f"names {len(self.languages)} for {len(self.files)} files"
            )
        twice = [language for language in self.languages if self.languages.count(language) > 1]
        if twice:
            raise UsageError(f"--languages names {twice[0]!r} twice: give one file for each language")


@dataclass(frozen=True, repr=False)
class TextFeaturesJob(Options):
    """Job of ``imagepivot text-features``; see `extractors.tokens` for the models.

    The batch size changes no vector.

    Raises:
        UsageError: a value is out of range, or an option does not fit the model.

    Examples:
        >>> job = imagepivot.TextFeaturesJob("captions", "build/token-features", model="bert", device="cpu")
        >>> imagepivot.extract_text_features(job, imagepivot.Execution(workers=1)).rows
        36
    """

    captions: CaptionsFolder
    output: OutputFolder
    model: Annotated[
        str,
        Opt(
            "Load [i]open_clip:NAME[/i], [i]open_clip:FOLDER[/i] or [i]sentence:FOLDER[/i] (a vector per caption), or a folder "
            "saved by transformers (one per token); also a name in Hugging Face's cache.",
            is_option=True,
        ),
    ]
    sub_words: Annotated[SubWords, Opt("Pool the sub-words of a token by [i]mean[/i], or take the [i]first[/i].")] = "mean"
    max_length: Annotated[int | None, Opt("Keep at most this many tokens, as [i]encode[/i] does. Default: 100.", min_=1)] = None
    dtype: StoredType = "float32"
    device: Device = "auto"
    precision: Precision = "fp32"
    batch_size: Annotated[int, Opt("Set the batch size on a GPU.", min_=1)] = 64
    overwrite: Overwrite = False
    verify: Verify = False
    notes: Notes = Notes()
    weights: WeightsRequest = "default"
    prefix: Annotated[str, Opt("Put this text before each caption, e.g. [i]'query: '[/i]. Default: the model's.")] = ""
    space: Space = ""

    def _check(self) -> None:
        per_token = {"--sub-words": self.sub_words != "mean", "--max-length": self.max_length is not None}
        per_caption = {"--prefix": bool(self.prefix), "--space": bool(self.space)}
        refused = per_token if self.encodes_captions else per_caption
        if not self.model.startswith(OPEN_CLIP):
            refused["--weights"] = self.weights != "default"
        if names := [name for name, is_given in refused.items() if is_given]:
            raise UsageError(f"{names[0]} does not fit --model {self.model!r}, a model with other options: leave it out")

    @property
    def encodes_captions(self) -> bool:
        """Whether the model has a vector per caption, not per token."""
        return self.model.startswith((OPEN_CLIP, SENTENCE))

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens of a caption."""
        return self.max_length or 100

    def request(self) -> TextRequest:
        """Return the request for the model.

        Raises:
            UsageError: a value is unknown.
        """
        from extractors.tokens.request import TextRequest

        return TextRequest(self.model, self.sub_words, self.dtype, self.precision, self.weights, self.prefix)

    def parameters(self, description: Description) -> dict[str, Any]:
        """Return the parameters of the dataset that a model writes."""
        from extractors.base import joint_parameters
        from schemas.parameters import TokenFeaturesParameters

        if self.encodes_captions:
            return replace(joint_parameters(description), space=self.space or None).to_json()
        fingerprint = description.fingerprint
        return TokenFeaturesParameters(description.spec, description.parameters, fingerprint, self.max_tokens).to_json()

    def files(self) -> tuple[str, ...]:
        """Return the folder and file that every process reads; none for names."""
        from extractors.request import names_file
        from extractors.tokens.request import is_folder

        model = self.model.partition(":")[2] if self.encodes_captions else self.model
        return (*((model,) if is_folder(model) else ()), *((self.weights,) if names_file(self.weights) else ()))

    def located(self) -> TextFeaturesJob:
        """Return the job with absolute paths, for processes in other folders."""
        job = self
        for file in self.files():
            path = absolute_location(file)
            job = replace(job, model=job.model.replace(file, path), weights=path if file == self.weights else job.weights)
        return job

    def check_device(self) -> None:
        """Check that the device exists and supports the precision.

        Raises:
            UsageError: the device is missing, or the precision is unsupported.
        """
        from extractors.computing.devices import check_request

        check_request(self.device, self.precision)

    def check_model(self, output: OutputDataset, extractor: TextModel) -> None:
        """Raise `InputError` if a model differs from the planned one."""
        name = "model" if self.encodes_captions else "model_fingerprint"
        if self.parameters(extractor.description)[name] != output.parameters[name]:
            raise InputError(
                f"the model {self.model!r}, transformers or tokenizers of a worker differ from the "
                "launcher's: use the same on all machines"
            )


@dataclass(frozen=True, repr=False)
class ImageOptions(Options):
    """Options of `pipelines.inputs.images.opening.open_images`.

    Examples:
        >>> images = imagepivot.ImageOptions(id_rule="path").open("photos")
        >>> sum(1 for _ in images.refs())
        6
    """

    id_rule: IdRuleOption = "name"
    allow_private_addresses: Annotated[
        bool, Opt("Fetch http addresses from private networks and through proxies, too.", panel=_TABLES)
    ] = False
    user_agent: Annotated[str, Opt("Send web servers this User-Agent.", panel=_TABLES)] = ""
    columns: Columns = field(default_factory=dict)
    delimiter: Delimiter = ""
    quoting: QuotingOption = "auto"

    def open(self, images: str | OpenSource) -> ImageSource:
        """Open images, unless they are open already.

        Raises:
            UsageError: an option does not fit the location.
            InputError: the location does not exist, or is a compressed tar.
        """
        from pipelines.inputs.images.opening import open_images

        if not isinstance(images, str):
            return cast("ImageSource", images)
        return open_images(images, **vars(self))


@dataclass(frozen=True, repr=False)
class FeaturesJob(Options):
    """Job of ``imagepivot features``.

    The images may also be the result of `open_images`. The batch size affects speed and memory, not the
    features. None is the extractor's own on a CPU, and the fastest on a GPU, see `extractors.batch_sizes`.

    Raises:
        UsageError: a value is out of range, or two options contradict each other.

    Examples:
        >>> request = imagepivot.ExtractorRequest("resnet50-pool", weights="random:0")
        >>> job = imagepivot.FeaturesJob("photos", "build/features", request, device="cpu", shards=2)
        >>> manifest = imagepivot.extract_features(job, imagepivot.Execution(workers=1))
        >>> manifest.rows, manifest.failed
        (6, 0)
    """

    images: Annotated[str | OpenSource, Opt("Folder, pattern, table, tar, Parquet file or image.")]
    output: OutputFolder
    extractor: ExtractorRequest = ExtractorRequest("resnet50-pool")
    device: Device = "auto"
    batch_size: Annotated[
        int | None, Opt("Set the batch size. Default: the extractor's, or the fastest on the GPU.", min_=1)
    ] = None
    reading: ImageOptions = field(default_factory=ImageOptions)
    skip: Annotated[
        tuple[str, ...],
        Opt("Leave out these ids, or those of [i]@FILE[/i].", metavar="IDS"),
    ] = ()
    shards: Shards = AUTO
    policy: ReusePolicy = ReusePolicy()
    task: Annotated[
        ArrayTask | None,
        Opt(
            "Write the shards of task I of N, counted from 0; the last one commits the dataset.",
            panel=SEVERAL_MACHINES,
            metavar="I/N",
        ),
    ] = None
    notes: Notes = Notes()
    space: Space = ""

    def _check(self) -> None:
        check_shards_request(self.shards)
        if self.task is not None:
            if isinstance(self.shards, int):
                self.task.shards(self.shards)
            if self.policy.overwrite:
                raise UsageError(
                    "--overwrite with --task would delete the shards of other tasks: leave it out, and "
                    "delete the folder before the first task, or choose another"
                )

    def open_images(self) -> ImageSource:
        """Open the images; errors are those of `ImageOptions.open` and `check_order`."""
        from pipelines.inputs.files import check_order

        if isinstance(self.images, str):
            check_order("IMAGES", self.images, self.output)
        return self.reading.open(self.images)

    def opened(self) -> FeaturesJob:
        """Return a copy with open images; errors are those of `open_images`."""
        return replace(self, images=self.open_images())

    def locations(self) -> Iterator[tuple[str, str]]:
        """Yield name and location of everything that workers read and write."""
        images = self.open_images()
        yield from (("IMAGES", images.location), ("OUTPUT", self.output))
        yield from (("--weights", location) for location in self.extractor.files())
        yield from (("the image", location) for location in images.listed_locations())

    def feature_bytes(self) -> int:
        """Estimate the bytes of the feature of one image, without weights.

        Raises:
            UsageError: the extractor is unknown.
        """
        spec, regions = self.extractor.spec(), self.extractor.regions
        rows = spec.shape[0] if regions is None else regions.max_regions
        return {"float32": 4, "float16": 2}[spec.dtype] * rows * prod(spec.shape[1:])

    def check_execution(self, execution: Execution) -> None:
        """Check the job against an execution.

        Raises:
            UsageError: a task of an array job has a remote runner, or workers with GPUs have another device.
        """
        if execution.accelerator is not None and self.device not in ("auto", "cuda"):
            raise UsageError(
                f"--device is {self.device!r}, and --gpu {execution.accelerator.type!r} runs the model on "
                "all GPUs of a worker: leave one of the two out"
            )
        if self.task is not None and not execution.is_local:
            raise UsageError(
                f"--task is '{self.task}', and --runner follows --: a task writes its shards on its own "
                "machine, and a Beam runner distributes all shards. Leave out one of the two"
            )

    def for_workers(self, execution: Execution) -> FeaturesJob:
        """Return the job for workers, with absolute paths for remote ones."""
        job = self if execution.runs_here else replace(self, extractor=self.extractor.located())
        if execution.accelerator is None:
            return job
        return replace(job, device="cuda")  # A worker without a GPU must fail, not use its CPU.

    def extras(self) -> tuple[str, ...]:
        """Return the extras for remote workers."""
        from importlib.util import find_spec

        heif = ("heif",) if find_spec("pillow_heif") is not None else ()
        families = {"timm": "timm", "open_clip": "clip"}
        family = families.get(self.extractor.name.partition(":")[0])
        return "text", "extractors", *((family,) if family else ()), *heif

    def libraries(self) -> tuple[str, ...]:
        """Return the distributions whose versions affect the features."""
        regions = self.extractor.regions
        origins = {self.extractor.name.partition(":")[0], regions.backend if regions is not None else ""}
        optional = (name for name in ("timm", "detectron2") if name in origins)
        joint = ("open_clip_torch", "timm") if "open_clip" in origins else ()
        return ("apache-beam", "pillow", "simplejpeg", "torch", "torchvision", *optional, *joint)


@dataclass(frozen=True, repr=False)
class ViewJob(Options):
    """Job of ``imagepivot view``. Its images may also be the result of `open_images`.

    Examples:
        >>> job = imagepivot.ViewJob("features", "photos", image_id="img-00", output="build/img-00.png")
        >>> imagepivot.draw_view(job)  # doctest: +SKIP
    """

    dataset: Annotated[str, Opt("Folder of regions or features.")]
    images: Annotated[str | OpenSource, Opt("Location of the images, as for features.")]
    image_id: Annotated[str, Opt("Draw the image of this id.", name="image", is_option=True)]
    output: Annotated[
        str, Opt("Write this .png, .jpg, .webp, .pdf or .svg file; local, gs:// or s3://.", is_option=True, short="-o")
    ]
    max_regions: Annotated[int, Opt("Draw at most this many regions, by score; 0: all.", min_=0)] = 5
    reading: ImageOptions = field(default_factory=ImageOptions)
    overwrite: Annotated[bool, Opt("Replace an existing file.")] = False


@dataclass(frozen=True, repr=False)
class DiffJob(Options):
    """Job of ``imagepivot diff``. Shard counts may differ.

    Examples:
        >>> imagepivot.compare_datasets(imagepivot.DiffJob("features", "features", tolerance=1e-6)).differs
        False
    """

    a: Annotated[str, Opt("Folder of a dataset.")]
    b: Annotated[str, Opt("Folder of another dataset of the same kind.")]
    tolerance: Annotated[float, Opt("Treat real numbers that differ by at most this as equal.", min_=0)] = 0.0


@dataclass(frozen=True, repr=False)
class DuplicatesJob(Options):
    """Job of ``imagepivot duplicates``.

    Its images may also be the result of `open_images`.

    Examples:
        >>> job = imagepivot.DuplicatesJob("features", "captions", images="photos")
        >>> imagepivot.find_duplicates(job)
        []
    """

    features: Annotated[str, Opt("Folder of features or regions.")]
    captions: Annotated[str, Opt("Folder of captions, which have the splits.", is_argument=True)] = ""
    images: Annotated[str | OpenSource, Opt("Compare pictures at this location, too, as for features.")] = ""
    min_cosine: Annotated[
        float | None, Opt("Match features of this cosine. Default: 0.93; of untrained networks 0.999999.", metavar="NUM")
    ] = None
    reading: ImageOptions = field(default_factory=ImageOptions)

    def _check(self) -> None:
        if self.min_cosine is not None and not 0 < self.min_cosine <= 1:
            raise UsageError(f"--min-cosine is {self.min_cosine}, expected a number above 0 and at most 1")
