"""The joint embedding of images and sentences in any number of languages: the kind of model ``vse``.

Letters in shapes: ``B`` images or captions of a batch, ``A`` and ``C`` those that are compared, ``D`` feature width, ``E`` joint
embedding width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from train.config.models import VseConfig
from train.data.batches import CaptionBatch
from train.models.dimensions import Dimensions
from train.models.encoders import READERS, ImageEncoder, SentenceEncoder, orthogonalize, pooled, words_of
from train.models.retrieval_model import Encoded, ImageBatch, RetrievalModel
from train.models.similarity import cosine, order, unit

__all__ = ["SIMILARITIES", "JointEmbedding"]

SIMILARITIES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {"cosine": cosine, "order": order}
"""Functions by name, from embeddings ``[A, E]`` and ``[C, E]`` to scores ``[A, C]``."""


class JointEmbedding(RetrievalModel):
    """Images and captions as vectors ``[B, E]`` in one space.

    All embeddings have length 1, but for vectors of zeros, which stay zeros and have no gradient. The order similarity takes their
    absolute values (Gella et al. 2017, footnote 1), as Vendrov's code and VSE++ (``--use_abs``) do.

    Args:
        config: widths and choices.
        dimensions: languages and sizes of the data.

    Raises:
        UsageError: an image has several features.
    """

    def __init__(self, config: VseConfig, dimensions: Dimensions) -> None:
        super().__init__()
        config.check_features(dimensions.feature_shape)
        self.languages = dimensions.languages
        self.width = config.embedding
        self.similarity = config.similarity
        self._shared = config.shared
        self.images = ImageEncoder(dimensions.feature_shape[0], config.embedding)
        ids_of_encoders = [dimensions.language_ids.get(language) for language in self.languages[: 1 if config.shared else None]]
        self.sentences = nn.ModuleList(
            SentenceEncoder(
                words_of(dimensions, config.words, ids),
                READERS[config.reader](config.words, config.embedding),
                partial(pooled, pooling=config.pooling),
            )
            for ids in ids_of_encoders
        )
        if config.initialization == "orthogonal":
            for encoder in self.sentences:
                orthogonalize(encoder.get_submodule("reader"))

    def encode_images(self, images: ImageBatch) -> Encoded:
        """Map features ``[B, D]`` to embeddings ``[B, E]``."""
        return self._embedding(self.images(images.features))

    def encode_captions(self, captions: CaptionBatch, language: str) -> Encoded:
        """Return embeddings ``[B, E]`` of captions in one language, in their order.

        Raises:
            ValueError: the model does not read the language.
        """
        if language not in self.languages:
            raise ValueError(f"language is {language!r}, expected one of {self.languages}")
        encoder = self.sentences[0 if self._shared else self.languages.index(language)]
        return self._embedding(encoder(captions))

    def scores(self, a: Encoded, b: Encoded) -> Tensor:
        """Return scores ``[A, C]`` of embeddings ``[A, E]`` and ``[C, E]``; a higher score means more alike.

        Always computed in float32: the margins of the losses are not far above the rounding of bfloat16.
        """
        with torch.autocast(a.values.device.type, enabled=False):
            return SIMILARITIES[self.similarity](a.values.float(), b.values.float())

    def modules_by_language(self) -> Mapping[str, Sequence[str]]:
        """Return the languages of each sentence encoder."""
        if self._shared:
            return {"sentences.0": self.languages}
        return {f"sentences.{number}": (language,) for number, language in enumerate(self.languages)}

    def _embedding(self, encoded: Tensor) -> Encoded:
        """Place encoder outputs ``[B, E]`` in the joint space."""
        vectors = unit(encoded.float())
        return Encoded(vectors.abs() if self.similarity == "order" else vectors)
