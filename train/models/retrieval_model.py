"""The interface of models to training and evaluation.

Letters in shapes: ``N`` images or captions, ``A`` and ``B`` those that are compared, ``D`` feature width, ``R`` regions, ``T``
tokens, ``K`` parts of an image or caption, ``E`` width of a vector.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from train.data.batches import CaptionBatch
from train.data.features import ImageFeatures
from train.devices import upload


@dataclass(frozen=True)
class Dimensions:
    """Languages and sizes; everything else about a model is in the section ``model`` of its configuration.

    Attributes:
        languages: the languages that the model reads, in its order.
        vocabulary_size: number of tokens in the joint vocabulary.
        feature_shape: shape of an image's features: ``[D]``, or ``[R, D]`` where an image has several.
        language_ids: the ids of the joint vocabulary that each language uses, ascending and with ``<unk>`` among them: only these
            get word vectors. A language without an entry gets all of them. Languages that share an encoder have the same ids.
        token_width: width of the given vectors of tokens that the model reads in place of words; 0 if it has words of its own.
    """

    languages: tuple[str, ...]
    vocabulary_size: int
    feature_shape: tuple[int, ...]
    language_ids: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    token_width: int = 0

    def __post_init__(self) -> None:
        if not self.languages:
            raise ValueError("a model needs at least one language")
        for name, values in (("vocabulary_size", (self.vocabulary_size,)), ("feature_shape", self.feature_shape)):
            if min(values, default=0) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected 1 or more")


@dataclass(frozen=True)
class ImageBatch:
    """Features of images.

    Attributes:
        features: float32 ``[N, D]``, or ``[N, R, D]`` where an image has several.
        mask: bool ``[N, R]``, true where there is a feature; None if there are as many as there is room for. Where there is none,
            the data that we read holds zeros; each image has at least one.
    """

    features: Tensor
    mask: Tensor | None = None

    def __len__(self) -> int:
        return len(self.features)

    @classmethod
    def of(cls, features: ImageFeatures, images: np.ndarray | slice, device: torch.device) -> ImageBatch:
        """Read the features of images, by their positions, onto a device."""
        values, mask = features[images], features.mask(images)
        return cls(upload(torch.from_numpy(values), device), None if mask is None else upload(torch.from_numpy(mask), device))


@dataclass(frozen=True)
class Encoded:
    """Images or captions as a model encodes them.

    Attributes:
        values: ``[N, E]``, or ``[N, K, E]`` where each has several vectors, such as those of regions or words.
        mask: bool ``[N, K]``, true where there is a vector; None if there are as many as there is room for.
    """

    values: Tensor
    mask: Tensor | None = None

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, rows: Tensor | slice) -> Encoded:
        return Encoded(self.values[rows], None if self.mask is None else self.mask[rows])

    @property
    def present(self) -> Tensor:
        """Where there is a vector, bool ``[N, K]``, of images or captions with several vectors each."""
        return torch.ones_like(self.values[..., 0], dtype=torch.bool) if self.mask is None else self.mask

    def widened(self, parts: int) -> Encoded:
        """Return the same with room for so many vectors each, where each has several."""
        missing = parts - self.values.shape[1]
        return Encoded(pad(self.values, (0, 0, 0, missing)), pad(self.present, (0, missing))) if missing else self

    @staticmethod
    def concatenate(batches: Sequence[Encoded]) -> Encoded:
        """Join one or more batches; a single one is itself the result."""
        if len(batches) == 1:
            return batches[0]
        if batches[0].values.dim() == 2:
            return Encoded(torch.cat([batch.values for batch in batches]))
        most = max(batch.values.shape[1] for batch in batches)
        wide = [batch.widened(most) for batch in batches]
        mask = None if all(batch.mask is None for batch in wide) else torch.cat([batch.present for batch in wide])
        return Encoded(torch.cat([batch.values for batch in wide]), mask)


@dataclass(frozen=True)
class AttentionWeights:
    """How much a model attends to the regions of one image and the words of one caption, each without its padding.

    A model has either heads, which attend to regions or words by themselves, or attention between words and regions.

    Attributes:
        regions: of each head to each region, ``[heads, R]``; each row sums to 1. None if no head attends to regions.
        words: of each head to each token, ``<start>`` and ``<end>`` included, ``[heads, T]``; likewise.
        pairs: between each token and each region, ``[T, R]``; each row sums to 1 if words attend to regions, or else each column.
        words_attend: whether in ``pairs`` words attend to regions, or regions to words.
    """

    regions: Tensor | None = None
    words: Tensor | None = None
    pairs: Tensor | None = None
    words_attend: bool = True


class RetrievalModel(nn.Module):
    """A model that says how alike images and captions are. All state that training changes is in its parameters and buffers.

    Attributes:
        languages: the languages that it reads.
        width: E.
        similarity: name of what `scores` computes, e.g. ``cosine``.
        heads: K, the number of attention heads of which the vector of an image or caption is made, one after the other; 1 where it
            is not made of any. The diversity of heads is a term of the objective, ``loss.diversity_weight``.
        vectors: whether each image and caption is one vector, whatever it is compared with. Where it is not, as with attention
            from words to regions, there is nothing to embed and to search in.
    """

    languages: tuple[str, ...]
    width: int
    similarity: str
    heads: int = 1
    vectors: bool = True

    @abstractmethod
    def encode_images(self, images: ImageBatch) -> Encoded:
        """Encode images, in their order."""

    @abstractmethod
    def encode_captions(self, captions: CaptionBatch, language: str) -> Encoded:
        """Encode captions in one language, in their order.

        Raises:
            ValueError: the model does not read the language.
        """

    def token_states(self, captions: CaptionBatch, language: str) -> Any:
        """Return what `pool_states` goes on from: what of `encode_captions` no compiler covers, by default nothing.

        A compiled objective begins with it for all captions of a batch, so that what follows is one graph.

        Raises:
            ValueError: the model does not read the language.
        """
        return captions

    def pool_states(self, read: Any, language: str) -> Encoded:
        """Return what `encode_captions` does, from what `token_states` has returned."""
        return self.encode_captions(read, language)

    @abstractmethod
    def scores(self, a: Encoded, b: Encoded) -> Tensor:
        """Return how alike images and captions, or captions and captions, are: ``[A, B]``, float32; more is more alike."""

    def attention_weights(self, images: ImageBatch, captions: CaptionBatch, language: str) -> AttentionWeights | None:
        """Return how much the model attends to the regions of an image and the words of a caption; None if it does not attend.

        Figures show it; neither training nor evaluation asks for it.
        """
        return None

    def modules_by_language(self) -> Mapping[str, Sequence[str]]:
        """Return the languages that a module reads, by its name, for modules that read captions and not those of every language.

        A training that starts from another run looks for the modules of its languages there; by default none are told apart.
        """
        return {}

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return next(self.parameters()).device
