"""Multilingual multi-modal embeddings (MLMME): the model kind ``mlmme``.

Calixto, Liu, Campbell (2017): Multilingual Multi-modal Embeddings for Natural Language Processing (arXiv 1702.01101). The model
follows the code that its first author released with a later paper (Calixto and Liu 2017, RANLP, pages 139 to 148):
github.com/iacercalixto/multilingual-multimodal-embedding, ``model_multilingual.py``.

Shapes: ``N`` images or captions, ``D`` feature width, ``W`` width of the joint space, ``P`` pairs of views, ``E`` embedding width.
"""

from itertools import combinations

import torch
from torch import Tensor, nn

from train.config.models import MlmmeConfig
from train.models.encoders import ImageEncoder, SentenceEncoderModel, SentenceEncoders, widen_bfloat16
from train.models.retrieval_model import Dimensions, Encoded, ImageBatch
from train.models.similarity import l2_normalize

_IMAGES = "images"


class Mlmme(SentenceEncoderModel):
    """Images and sentences in one space: a GRU per language, one map for all.

    With ``scoring = "dot"`` embeddings ``[N, W]`` have length 1, and the similarity is their cosine. With ``"general"`` the
    similarity of x and y is x^T M y, with a learned matrix M for every two views (the images, and each language).

    A general score is computed as an inner product. An embedding has one block of W numbers per pair of views, E = P * W. The block
    of a pair with its own view is M^T x, or y if the view is the second; all other blocks are zeros. Items of different views share
    the block of their pair; items of the same view share all their blocks.
    """

    def __init__(self, config: MlmmeConfig, dimensions: Dimensions) -> None:
        super().__init__(config, dimensions)
        self.images = ImageEncoder(dimensions.feature_shape[0], config.embed_dim)
        # As the image encoder: Xavier, and biases of 0.
        self.projection = ImageEncoder(config.hidden_size, config.embed_dim)
        self.sentences = SentenceEncoders(config, dimensions, "gru", hidden_size=config.hidden_size)
        self.mappings: nn.ModuleDict | None = None
        self._pairs = tuple(combinations((_IMAGES, *self.languages), 2))
        self.similarity, self.width = "cosine", config.embed_dim
        if config.scoring == "general":
            self.similarity, self.width = "inner-product", len(self._pairs) * config.embed_dim
            self.mappings = nn.ModuleDict({"-".join(pair): _mapping(config.embed_dim) for pair in self._pairs})

    def encode_images(self, images: ImageBatch) -> Encoded:
        """Map features ``[N, D]`` to embeddings ``[N, E]``."""
        return self._embed_view(self.images(images.features), _IMAGES)

    def pool_states(self, states: Encoded, language: str) -> Encoded:
        """Return the embeddings ``[N, E]`` of captions, in their order."""
        return self._embed_view(self.projection(self.sentences.of(language).pooling(states)), language)

    def _embed_view(self, vectors: Tensor, view: str) -> Encoded:
        """Return the embeddings of vectors ``[N, W]`` of a view."""
        if self.mappings is None:
            return Encoded(l2_normalize(widen_bfloat16(vectors)))
        zeros = torch.zeros_like(vectors)
        blocks = [
            self.mappings["-".join(pair)](vectors) if view == pair[0] else vectors if view == pair[1] else zeros
            for pair in self._pairs
        ]
        return Encoded(widen_bfloat16(torch.cat(blocks, dim=1)))


def _mapping(width: int) -> nn.Linear:
    """Build a square matrix, uniform in ±0.1 (``norm_weight`` in ``utils.py``)."""
    matrix = nn.Linear(width, width, bias=False)
    nn.init.uniform_(matrix.weight, -0.1, 0.1)
    return matrix
