"""Jobs of the commands of text after ``captions``; each field declares its option. Importing this loads nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from schemas.errors import InputError, UsageError
from schemas.options import Opt

if TYPE_CHECKING:
    from extractors.base import Description
    from extractors.tokens.transformer import TokenExtractor, TokenRequest
    from schemas.writing.output import OutputDataset

__all__ = ["EncodeJob", "Scope", "TokenFeaturesJob", "VocabularyJob", "WordVectorsJob"]

Scope = Literal["language", "joint"]
SubWords = Literal["mean", "first"]

OUTPUT = Opt("Folder of the dataset to write.")
OVERWRITE = Opt("Start anew, whatever dataset OUTPUT holds.")
VERIFY = Opt("Compare the digests of what OUTPUT holds, too, and make again what is damaged.", name="check")
LANGUAGES = Opt("Only these, e.g. [i]en,de[/i]; all by default.")
PORTIONS = Opt("Only these: [i]translation[/i], [i]comparable[/i]; all by default.")
STORED_TYPE = Opt("Type of the stored values; float16 takes half the room, and rounds to three digits.")
DEVICE = Opt("cpu, cuda, cuda:N, or auto: a GPU if there is one.", completion=("auto", "cpu", "cuda", "cuda:0"))
PRECISION = Opt("fp32 or bf16; on a GPU also tf32 and fp16.", completion=("fp32", "bf16", "tf32", "fp16"))
"""Declarations that several commands share."""

Captions: TypeAlias = Annotated[str, Opt("Folder of a captions dataset.")]
Vocabulary: TypeAlias = Annotated[str, Opt("Folder of a vocabulary.")]
Output: TypeAlias = Annotated[str, OUTPUT]
Overwrite: TypeAlias = Annotated[bool, OVERWRITE]
Verify: TypeAlias = Annotated[bool, VERIFY]
Languages: TypeAlias = Annotated[tuple[str, ...], LANGUAGES]
Portions: TypeAlias = Annotated[tuple[str, ...], PORTIONS]
StoredType: TypeAlias = Annotated[Literal["float32", "float16"], STORED_TYPE]
Device: TypeAlias = Annotated[str, DEVICE]
Precision: TypeAlias = Annotated[str, PRECISION]


@dataclass(frozen=True)
class VocabularyJob:
    """Job of ``imagepivot vocabulary``.

    Raises:
        UsageError: a value is out of range.
    """

    captions: Captions
    output: Output
    min_count: Annotated[int, Opt("A token is kept when its count is at least this.")] = 4
    count_scope: Annotated[Scope, Opt("The count within at least one [i]language[/i], or the [i]joint[/i] count of all.")] = (
        "language"
    )
    languages: Languages = ()
    portions: Portions = ()
    splits: Annotated[tuple[str, ...], Opt("Splits to count.")] = ("train",)
    overwrite: Overwrite = False
    verify: Verify = False

    def __post_init__(self) -> None:
        if self.min_count < 1:
            raise UsageError(f"--min-count is {self.min_count}, expected 1 or more")
        if self.count_scope not in ("language", "joint"):
            raise UsageError(f"--count-scope is {self.count_scope!r}, expected 'language' or 'joint'")


@dataclass(frozen=True)
class EncodeJob:
    """Job of ``imagepivot encode``. Captions are cut after 100 tokens, as in Huang et al. 2019.

    Raises:
        UsageError: a value is out of range.
    """

    captions: Captions
    vocabulary: Vocabulary
    output: Output
    max_length: Annotated[int, Opt("Most tokens to keep, besides <start> and <end>.")] = 100
    overwrite: Overwrite = False
    verify: Verify = False

    def __post_init__(self) -> None:
        if self.max_length < 1:
            raise UsageError(f"--max-length is {self.max_length}, expected 1 or more")


@dataclass(frozen=True)
class WordVectorsJob:
    """Job of ``imagepivot word-vectors``; see `schemas.vector_files` for the files.

    Raises:
        UsageError: there is not one language for each file.
    """

    vocabulary: Vocabulary
    files: Annotated[tuple[str, ...], Opt("Word vectors: .vec or .txt, also .gz; or fastText's .bin.")]
    output: Output
    languages: Annotated[tuple[str, ...], Opt("Language of each FILE, in their order, e.g. en,de.", is_option=True)]
    overwrite: Overwrite = False
    verify: Verify = False

    def __post_init__(self) -> None:
        if not self.files or len(self.files) != len(self.languages):
            raise UsageError(
                f"--languages is {','.join(self.languages)!r}, expected the language of each FILE, in their order: there are "
                f"{len(self.languages)} languages, and files of word vectors: {len(self.files)}"
            )
        twice = [language for language in self.languages if self.languages.count(language) > 1]
        if twice:
            raise UsageError(f"--languages names {twice[0]!r} twice: give one file for each language")


@dataclass(frozen=True)
class TokenFeaturesJob:
    """Job of ``imagepivot token-features``; see `extractors.tokens` for the model. The batch size changes no vector.

    Raises:
        UsageError: a value is out of range.
    """

    captions: Captions
    output: Output
    model: Annotated[
        str, Opt("Folder of a model as transformers saves it, or a name that Hugging Face's cache has.", is_option=True)
    ]
    sub_words: Annotated[SubWords, Opt("What a token gets: the mean of its sub-words, or the first one.")] = "mean"
    max_length: Annotated[int, Opt("Most tokens to keep, as that of [i]encode[/i].")] = 100
    dtype: StoredType = "float32"
    device: Device = "auto"
    precision: Precision = "fp32"
    batch_size: Annotated[int, Opt("Captions that a GPU takes at once.")] = 64
    overwrite: Overwrite = False
    verify: Verify = False

    def __post_init__(self) -> None:
        for option, value in (("--max-length", self.max_length), ("--batch-size", self.batch_size)):
            if value < 1:
                raise UsageError(f"{option} is {value}, expected 1 or more")

    def request(self) -> TokenRequest:
        """Return what is asked of the model. Importing it loads torch.

        Raises:
            UsageError: a value is unknown.
        """
        from extractors.tokens.transformer import TokenRequest

        return TokenRequest(self.model, self.sub_words, self.dtype, self.precision)

    def files(self) -> tuple[str, ...]:
        """Return the folder that every process reads which loads the model; none for a name."""
        from extractors.tokens.finding import is_folder

        return (self.model,) if is_folder(self.model) else ()

    def describe(self, device: str) -> Description:
        """Describe what the model makes; it is loaded, onto a device, only if this machine has not described it before.

        Raises:
            ImagepivotError: as the request and its ``load`` raise it.
        """
        from extractors.tokens.describing import describe

        return describe(self.model, self.sub_words, self.dtype, self.precision, device=device)

    def check_device(self) -> None:
        """Check that this machine has the device, and that it computes in the precision.

        Raises:
            UsageError: it has not, or does not.
        """
        from extractors.computing.devices import check_request

        check_request(self.device, self.precision)

    def check_model(self, output: OutputDataset, extractor: TokenExtractor) -> None:
        """Raise `InputError` unless a model is the one that the run was planned with."""
        from schemas.parameters import TokenFeaturesParameters

        planned = TokenFeaturesParameters.from_json(output.parameters).model_fingerprint
        if extractor.description.fingerprint != planned:
            raise InputError(
                f"a worker finds another model in {self.model!r}, or has other versions of transformers and tokenizers, than the "
                "machine that planned the run: give all of them the same"
            )
