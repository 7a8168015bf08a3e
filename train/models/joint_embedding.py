"""The joint embedding of images and sentences in any number of languages.

Letters in shapes: ``B`` images or captions of a batch, ``C`` captions, ``D`` feature width, ``E`` joint embedding width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from train.data.packing import PackedCaptions
from train.models.encoders import ImageEncoder, SentenceEncoder
from train.models.similarity import cosine, order

__all__ = ["SIMILARITIES", "JointEmbedding", "ModelConfig", "build_model"]

SIMILARITIES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {"cosine": cosine, "order": order}
"""Functions by name, from embeddings ``[A, E]`` and ``[B, E]`` to scores ``[A, B]``."""


@dataclass(frozen=True)
class ModelConfig:
    """The dimensions and choices that a `JointEmbedding` is built from.

    Attributes:
        languages: the languages that the model reads.
        vocabulary_size: number of tokens in the joint vocabulary.
        feature_width: D.
        embedding: E, which is also the number of GRU units: 1024 in both papers.
        words: width of the word embeddings: 300 in both papers.
        shared: one sentence encoder over the joint vocabulary for all languages (Kádár et al. 2018), or one per language (Gella
            et al. 2017).
        similarity: a name in `SIMILARITIES`.
        language_ids: where the encoders are not shared, the ids of the joint vocabulary that each language uses, ascending and
            with ``<unk>`` among them; only these get word vectors. A language without an entry gets all of them.
    """

    languages: tuple[str, ...]
    vocabulary_size: int
    feature_width: int
    embedding: int = 1024
    words: int = 300
    shared: bool = True
    similarity: str = "cosine"
    language_ids: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.similarity not in SIMILARITIES:
            raise ValueError(f"similarity is {self.similarity!r}, expected one of {tuple(SIMILARITIES)}")
        if not self.languages:
            raise ValueError("a model needs at least one language")
        for name in ("vocabulary_size", "feature_width", "embedding", "words"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected 1 or more")


class JointEmbedding(nn.Module):
    """Images and captions as vectors in one space.

    All embeddings have length 1. The order similarity takes their absolute values (Gella et al. 2017, footnote 1), as Vendrov's
    code and VSE++ (``--use_abs``) do.

    Args:
        config: dimensions and choices.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.images = ImageEncoder(config.feature_width, config.embedding)
        shape = config.vocabulary_size, config.words, config.embedding
        ids_of_encoders = [None] if config.shared else [config.language_ids.get(language) for language in config.languages]
        self.sentences = nn.ModuleList(SentenceEncoder(*shape, ids=ids) for ids in ids_of_encoders)

    def embed_images(self, features: Tensor) -> Tensor:
        """Map features ``[B, D]`` to embeddings ``[B, E]``."""
        return self._embedding(self.images(features))

    def embed_captions(self, captions: PackedCaptions, language: str) -> Tensor:
        """Return embeddings ``[B, E]`` of captions in one language, in the order in which `train.data.packing.pack` got them.

        Raises:
            ValueError: the model does not read the language.
        """
        if language not in self.config.languages:
            raise ValueError(f"language is {language!r}, expected one of {self.config.languages}")
        encoder = self.sentences[0 if self.config.shared else self.config.languages.index(language)]
        return self._embedding(encoder(captions))

    def similarity(self, images: Tensor, captions: Tensor) -> Tensor:
        """Return scores ``[B, C]`` of embeddings ``[B, E]`` and ``[C, E]``; a higher score means more alike.

        Captions are compared with captions in the same way. The scores are always computed in float32: the margins of the
        losses are not far above the rounding of bfloat16.
        """
        with torch.autocast(images.device.type, enabled=False):
            return SIMILARITIES[self.config.similarity](images.float(), captions.float())

    def _embedding(self, encoded: Tensor) -> Tensor:
        """Place encoder outputs ``[B, E]`` in the joint space."""
        unit = normalize(encoded.float(), dim=1)
        return unit.abs() if self.config.similarity == "order" else unit


def build_model(config: ModelConfig, seed: int) -> JointEmbedding:
    """Build a model with the initial weights of a seed, the same on every device; torch's global generator stays untouched."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return JointEmbedding(config)
