"""Multilingual multi-modal embeddings (MLMME): the kind of model ``mlmme``.

Calixto, Liu, Campbell (2017): Multilingual Multi-modal Embeddings for Natural Language Processing (arXiv 1702.01101). What is built
follows the code that its first author released with a later paper (Calixto and Liu 2017, RANLP, pages 139 to 148):
github.com/iacercalixto/multilingual-multimodal-embedding, ``model_multilingual.py``.

Letters in shapes: ``N`` images or captions of a batch, ``A`` and ``B`` those that are compared, ``D`` feature width, ``W`` width of
the joint space, ``P`` pairs of views, ``E`` width of an embedding.
"""

from __future__ import annotations

from itertools import combinations

import torch
from torch import Tensor, nn

from train.config.models import MlmmeConfig
from train.models.encoders import FinalStateGRU, ImageEncoder, SentenceEncoderModel, SentenceEncoders, widen_bfloat16
from train.models.retrieval_model import Dimensions, Encoded, ImageBatch
from train.models.similarity import unit

_IMAGES = "images"


class Mlmme(SentenceEncoderModel):
    """Images, and sentences that a GRU for each language reads, mapped into one space; one map serves all languages.

    With ``scoring = "dot"`` embeddings ``[N, W]`` have length 1, and the similarity is their cosine. With ``"general"`` vectors
    have any length, and every two views (the images, and each language) have a learned matrix M: x and y are as alike as x^T M y.

    A general score is an inner product, too. An embedding then is one block of W numbers for each pair of views, E = P * W: for a
    pair that its own view belongs to, M^T x, or y where it is the second of them; for the others zeros. Two items of different
    views share one block, that of their pair. Two of the same view, such as two English sentences, share all of theirs.
    """

    def __init__(self, config: MlmmeConfig, dimensions: Dimensions) -> None:
        super().__init__(config, dimensions)
        self.images = ImageEncoder(dimensions.feature_shape[0], config.embed_dim)
        self.projection = ImageEncoder(config.hidden_size, config.embed_dim)  # Drawn alike: Xavier, and biases of 0.
        self.sentences = SentenceEncoders(
            dimensions, config.word_dim, lambda: FinalStateGRU(config.word_dim, config.hidden_size)
        )
        self.mappings: nn.ModuleDict | None = None
        self._pairs = tuple(combinations((_IMAGES, *self.languages), 2))
        self.similarity, self.width = "cosine", config.embed_dim
        if config.scoring == "general":
            self.similarity, self.width = "inner-product", len(self._pairs) * config.embed_dim
            self.mappings = nn.ModuleDict({_name(pair): _mapping(config.embed_dim) for pair in self._pairs})

    def encode_images(self, images: ImageBatch) -> Encoded:
        """Map features ``[N, D]`` to embeddings ``[N, E]``."""
        return self._embedding(self.images(images.features), _IMAGES)

    def pool_states(self, read: Encoded, language: str) -> Encoded:
        """Return embeddings ``[N, E]`` of captions that were read, in their order."""
        return self._embedding(self.projection(self.sentences.of(language).pooling(read)), language)

    def _embedding(self, vectors: Tensor, view: str) -> Encoded:
        """Make vectors ``[N, W]`` of a view embeddings; bfloat16 becomes float32."""
        if self.mappings is not None:
            nothing = torch.zeros_like(vectors)
            blocks = [
                self.mappings[_name(pair)](vectors) if view == pair[0] else vectors if view == pair[1] else nothing
                for pair in self._pairs
            ]
            vectors = torch.cat(blocks, dim=1)
        vectors = widen_bfloat16(vectors)
        return Encoded(unit(vectors) if self.mappings is None else vectors)


def _name(pair: tuple[str, str]) -> str:
    return "-".join(pair)


def _mapping(width: int) -> nn.Linear:
    """Return a square matrix, drawn uniformly from ±0.1, as in the released code (``utils.py``, ``norm_weight``)."""
    matrix = nn.Linear(width, width, bias=False)
    nn.init.uniform_(matrix.weight, -0.1, 0.1)
    return matrix
