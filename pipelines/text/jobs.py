"""What the commands of text after ``captions`` are asked to do. Importing this loads neither Beam nor torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from schemas.errors import InputError, UsageError
from schemas.parameters import TokenFeaturesParameters
from schemas.writing.output import OutputDataset

if TYPE_CHECKING:
    from extractors.base import Description
    from extractors.tokens.transformer import TokenExtractor, TokenRequest

__all__ = ["EncodeJob", "Scope", "TokenFeaturesJob", "VocabularyJob"]

Scope = Literal["language", "joint"]


@dataclass(frozen=True)
class VocabularyJob:
    """Job of ``imagepivot vocabulary``.

    Attributes:
        captions: folder of a captions dataset.
        output: folder of the vocabulary.
        min_count: a token is kept when its count is at least this.
        count_scope: ``language``: the count within at least one language; ``joint``: the sum over languages.
        splits: splits whose captions are counted.
        languages: languages that are counted; empty for all.
        portions: portions that are counted; empty for all.
        overwrite: start anew, whatever dataset is there.
        verify: compare the digests of what is there, too, and make again what is damaged.
    """

    captions: str
    output: str
    min_count: int = 4
    count_scope: Scope = "language"
    splits: tuple[str, ...] = ("train",)
    languages: tuple[str, ...] = ()
    portions: tuple[str, ...] = ()
    overwrite: bool = False
    verify: bool = False

    def __post_init__(self) -> None:
        if self.min_count < 1:
            raise UsageError(f"--min-count is {self.min_count}, expected 1 or more")
        if self.count_scope not in ("language", "joint"):
            raise UsageError(f"--count-scope is {self.count_scope!r}, expected 'language' or 'joint'")


@dataclass(frozen=True)
class EncodeJob:
    """Job of ``imagepivot encode``.

    Attributes:
        captions: folder of a captions dataset.
        vocabulary: folder of a vocabulary.
        output: folder of the encoded captions.
        max_length: number of tokens after which a caption is cut (Huang et al. 2019: 100), ``<start>`` and ``<end>`` not counted.
        overwrite: start anew, whatever dataset is there.
        verify: compare the digests of what is there, too, and make again what is damaged.
    """

    captions: str
    vocabulary: str
    output: str
    max_length: int = 100
    overwrite: bool = False
    verify: bool = False

    def __post_init__(self) -> None:
        if self.max_length < 1:
            raise UsageError(f"--max-length is {self.max_length}, expected 1 or more")


@dataclass(frozen=True)
class TokenFeaturesJob:
    """Job of ``imagepivot token-features``.

    Attributes:
        captions: folder of a captions dataset.
        output: folder of the vectors.
        model: name of a model of text in Hugging Face's cache, or its folder, see `extractors.tokens`.
        sub_words: what a token gets: the ``mean`` of the vectors of its sub-words, or the vector of the ``first``.
        max_length: number of tokens after which a caption is cut, as that of `EncodeJob`.
        dtype: type in which vectors are stored, ``float32`` or ``float16``.
        precision: ``fp32`` or ``bf16``; on a GPU also ``tf32`` and ``fp16``.
        device: ``cpu``, ``cuda``, ``cuda:N`` or ``auto``.
        batch_size: captions that a GPU takes at once; changes speed and memory, not the vectors.
        overwrite: start anew, whatever dataset is there.
        verify: compare the digests of what is there, too, and make again what is damaged.

    Raises:
        UsageError: a value is out of range.
    """

    captions: str
    output: str
    model: str
    sub_words: str = "mean"
    max_length: int = 100
    dtype: str = "float32"
    precision: str = "fp32"
    device: str = "auto"
    batch_size: int = 64
    overwrite: bool = False
    verify: bool = False

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

        return TokenRequest(self.model, self.sub_words, self.dtype, self.precision)  # type: ignore[arg-type]

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

        return describe(self.model, self.sub_words, self.dtype, self.precision, device=device)  # type: ignore[arg-type]

    def check_device(self) -> None:
        """Check that this machine has the device, and that it computes in the precision.

        Raises:
            UsageError: it has not, or does not.
        """
        from extractors.computing.devices import check_request

        check_request(self.device, self.precision)

    def check_model(self, output: OutputDataset, extractor: TokenExtractor) -> None:
        """Raise `InputError` unless a model is the one that the run was planned with."""
        planned = TokenFeaturesParameters.from_json(output.parameters).model_fingerprint
        if extractor.description.fingerprint != planned:
            raise InputError(
                f"a worker finds another model in {self.model!r}, or has other versions of transformers and tokenizers, than the "
                "machine that planned the run: give all of them the same"
            )
