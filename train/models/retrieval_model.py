"""The interface of models to training and evaluation.

Shapes: ``N`` images or captions, ``A`` and ``B`` the two sides of a comparison, ``D`` feature width, ``R``
regions, ``T`` tokens, ``K`` vectors of an image or caption, ``E`` width of a vector.
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

from schemas.process.devices import upload
from train.data.batches import CaptionBatch
from train.data.features import ImageFeatures


@dataclass(frozen=True)
class Dimensions:
    """Languages and sizes from the data.

    Attributes:
        languages: languages of the model, in its order.
        feature_shape: shape of an image's features: ``[D]``, or ``[R, D]`` for several per image.
        language_ids: token ids with a word vector, by language: ascending, ``<unk>`` included. A language
            without an entry uses all ids. Languages with a shared encoder have the same ids.
        token_width: width of precomputed token vectors; 0 for a model with a word embedding.

    Examples:
        >>> sizes = imagepivot.Dimensions(languages=("en", "de"), vocabulary_size=10_000, feature_shape=(36, 2048))
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
        features: float32 ``[N, D]``, or ``[N, R, D]`` for several per image; zeros outside the mask.
        mask: bool ``[N, R]``, true for features and false for padding; None without padding. Each image has at least one feature.

    Examples:
        >>> regions = imagepivot.ImageBatch(torch.rand(2, 36, 2048), mask=torch.ones(2, 36, dtype=torch.bool))
    """

    features: Tensor
    mask: Tensor | None = None

    def __len__(self) -> int:
        return len(self.features)

    @classmethod
    def of(cls, features: ImageFeatures, images: np.ndarray | slice, device: torch.device) -> ImageBatch:
        """Copy the features of images, by position, to a device."""
        values, mask = features[images], features.mask(images)
        return cls(upload(torch.from_numpy(values), device), None if mask is None else upload(torch.from_numpy(mask), device))


@dataclass(frozen=True)
class Encoded:
    """Encoded images or captions.

    Attributes:
        values: ``[N, E]``, or ``[N, K, E]`` for several vectors each, e.g. one per region or word.
        mask: bool ``[N, K]``, true for vectors and false for padding; None without padding.

    Examples:
        >>> images = imagepivot.Encoded(torch.ones(3, 64))
        >>> len(images), len(images[:2])
        (3, 2)
    """

    values: Tensor
    mask: Tensor | None = None

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, rows: Tensor | slice) -> Encoded:
        return Encoded(self.values[rows], None if self.mask is None else self.mask[rows])

    @property
    def mask_or_ones(self) -> Tensor:
        """The mask, bool ``[N, K]``, also without padding."""
        return torch.ones_like(self.values[..., 0], dtype=torch.bool) if self.mask is None else self.mask

    def padded_to(self, size: int) -> Encoded:
        """Pad ``[N, K, E]`` to K = ``size``."""
        missing = size - self.values.shape[1]
        return Encoded(pad(self.values, (0, 0, 0, missing)), pad(self.mask_or_ones, (0, missing))) if missing else self

    @staticmethod
    def concatenate(batches: Sequence[Encoded]) -> Encoded:
        """Join one or more batches; a single one is returned without a copy."""
        if len(batches) == 1:
            return batches[0]
        max_size = max(batch.values.shape[1] for batch in batches)
        padded = [batch.padded_to(max_size) for batch in batches]
        mask = None if all(batch.mask is None for batch in padded) else torch.cat([batch.mask_or_ones for batch in padded])
        return Encoded(torch.cat([batch.values for batch in padded]), mask)


@dataclass(frozen=True)
class AttentionWeights:
    """Attention weights for one image and one caption, without padding.

    A model has self-attention heads (``regions``, ``words``), or cross attention (``pairs``); all else is None.

    Attributes:
        regions: weights of each head over the regions, ``[heads, R]``; each row sums to 1.
        words: weights of each head over the tokens, ``<start>`` and ``<end>`` included, ``[heads, T]``; each row sums to 1.
        pairs: weights between tokens and regions, ``[T, R]``; rows sum to 1 if words attend to regions, otherwise columns.
        words_attend: direction of ``pairs``: words attend to regions, or regions to words.

    Examples:
        >>> weights = imagepivot.AttentionWeights(pairs=torch.tensor([[0.9, 0.1], [0.2, 0.8]]))
        >>> weights.pairs.argmax(1)  # The region that each word attends to most.
        tensor([0, 1])
    """

    regions: Tensor | None = None
    words: Tensor | None = None
    pairs: Tensor | None = None
    words_attend: bool = True


class RetrievalModel(nn.Module):
    """Interface of a model that scores the similarity of images and captions.

    All state that training changes is in its parameters and buffers.

    Attributes:
        width: E.
        similarity: name of the similarity that `scores` computes, e.g. ``cosine``.
        heads: number of attention heads in an embedding, their concatenation; 1 without attention heads. Used
            by ``loss.diversity_weight``.
        vectors: whether an image or caption has one embedding. A model with cross attention has none, so that
            ``embed`` and ``search`` do not support it.

    Examples:
        >>> model = imagepivot.open_run("runs/demo").model
        >>> images = model.encode_images(imagepivot.ImageBatch(torch.rand(3, 2048)))
        >>> model.scores(images, images).shape
        torch.Size([3, 3])
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
            ValueError: the model does not support the language.
        """

    def token_states(self, captions: CaptionBatch, language: str) -> Any:
        """Run the part of `encode_captions` that ``torch.compile`` cannot trace.

        The result is the input of `pool_states`. A compiled objective calls it first, for all captions; the rest is one graph.

        Raises:
            ValueError: the model does not support the language.
        """
        return captions

    def pool_states(self, states: Any, language: str) -> Encoded:
        """Return the result of `encode_captions` from that of `token_states`."""
        return self.encode_captions(states, language)

    @abstractmethod
    def scores(self, a: Encoded, b: Encoded) -> Tensor:
        """Return the similarities of all pairs, ``[A, B]``, float32; higher is more alike."""

    def attention_weights(self, images: ImageBatch, captions: CaptionBatch, language: str) -> AttentionWeights | None:
        """Return the attention weights for an image and a caption; None without any."""
        return None

    def modules_by_language(self) -> Mapping[str, Sequence[str]]:
        """Return the languages of modules that encode only some, by module name.

        They get the word vectors of these languages; by default, all modules serve all languages.
        """
        return {}

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return next(self.parameters()).device
