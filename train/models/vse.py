"""Joint embedding of images and sentences: the model kind ``vse``.

Shapes: ``B`` images or captions, ``A`` and ``C`` the two sides of a comparison, ``D`` feature width, ``E`` embedding width.
"""

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor

from train.config.models import VseConfig
from train.models.encoders import ImageEncoder, SentenceEncoderModel, SentenceEncoders, orthogonalize, pool
from train.models.retrieval_model import Dimensions, Encoded, ImageBatch
from train.models.similarity import inner_product, l2_normalize, order

SIMILARITIES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {"cosine": inner_product, "order": order}
"""Functions from embeddings ``[A, E]`` and ``[C, E]`` to scores ``[A, C]``, by name."""


class JointEmbedding(SentenceEncoderModel):
    """Images and captions as vectors ``[B, E]`` in one space.

    All embeddings are normalized, see `l2_normalize`. The order similarity takes their absolute values (Gella
    et al. 2017, footnote 1), as Vendrov's code and VSE++ (``--use_abs``) do.
    """

    def __init__(self, config: VseConfig, dimensions: Dimensions) -> None:
        super().__init__(config, dimensions)
        self.width = config.embed_dim
        self.similarity = config.similarity
        self.images = ImageEncoder(dimensions.feature_shape[0], config.embed_dim)
        pooling = partial(pool, pooling=config.pooling)
        self.sentences = SentenceEncoders(config, dimensions, config.text_encoder, lambda: pooling)
        if config.initialization == "orthogonal":
            for encoder in self.sentences:
                orthogonalize(encoder.get_submodule("reader"))

    def encode_images(self, images: ImageBatch) -> Encoded:
        """Map features ``[B, D]`` to embeddings ``[B, E]``."""
        return self._embedding(self.images(images.features))

    def _compare(self, a: Encoded, b: Encoded) -> Tensor:
        return SIMILARITIES[self.similarity](a.values, b.values)

    def _embedding(self, pooled: Tensor) -> Encoded:
        vectors = l2_normalize(pooled.float())
        return Encoded(vectors.abs() if self.similarity == "order" else vectors)
