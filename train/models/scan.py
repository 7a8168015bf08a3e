"""Stacked cross attention of regions and words in any number of languages: the kind of model ``scan``.

Lee, Chen, Hua, Hu, He (2018): Stacked Cross Attention for Image-Text Matching (arXiv 1803.08024), section 3; what the paper leaves
open follows their code (github.com/kuanghuei/SCAN, ``model.py``).

Letters in shapes: ``B`` images or captions of a batch, ``A`` and ``C`` those that are compared, ``R`` regions, ``T`` tokens, ``D``
feature width, ``E`` joint embedding width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from train.config.models import ScanConfig
from train.data.batches import CaptionBatch
from train.models.cross_attention import CrossAttention, attention_of_pair, cross_attention
from train.models.dimensions import Dimensions
from train.models.encoders import READERS, ImageEncoder, SentenceEncoders
from train.models.reading_model import ReadingModel
from train.models.retrieval_model import AttentionWeights, Encoded, ImageBatch
from train.models.similarity import unit


class Scan(ReadingModel):
    """Images as regions and captions as words, each a vector in one space; words attend to regions, or regions to words.

    All vectors have length 1 (``l2norm`` in ``model.py``), but for vectors of zeros, which stay zeros and have no gradient.
    ``<start>`` and ``<end>`` are words like any other, as in the released code (``data.py``).

    Args:
        config: widths and choices.
        dimensions: languages and sizes of the data.

    Raises:
        UsageError: an image has a single feature.
    """

    vectors = False

    def __init__(self, config: ScanConfig, dimensions: Dimensions) -> None:
        super().__init__()
        config.check_features(dimensions.feature_shape)
        self.languages = dimensions.languages
        self.width = config.embed_dim
        self.similarity = f"{config.attention}-{config.pooling}"
        self._words_attend = config.attention == "t2i"
        self._attention = CrossAttention(
            config.lambda_softmax, config.lambda_lse if config.pooling == "lse" else None, config.negative_slope
        )
        self.images = ImageEncoder(dimensions.feature_shape[1], config.embed_dim)
        self.sentences = SentenceEncoders(
            dimensions,
            config.word_dim,
            lambda: READERS[config.text_encoder](config.word_dim, config.embed_dim),
            shared=config.shared_encoder,
        )

    def encode_images(self, images: ImageBatch) -> Encoded:
        """Map features ``[B, R, D]`` to unit vectors ``[B, R, E]``."""
        features = images.features
        if images.mask is not None:
            features = features.masked_fill(~images.mask[..., None], 0)
        return Encoded(unit(self.images(features).float()), images.mask)

    def encode_read(self, read: Encoded, language: str) -> Encoded:
        """Return unit vectors ``[B, T, E]`` of the words of captions that were read, in their order."""
        return Encoded(unit(read.values.float()), read.mask)

    def scores(self, a: Encoded, b: Encoded) -> Tensor:
        """Return scores ``[A, C]``; ``a`` takes the part of the images, with regions, and ``b`` that of the captions, with words.

        Always computed in float32 or better, as the margins of the losses are not far above the rounding of bfloat16.
        """
        with torch.autocast(a.values.device.type, enabled=False):
            return cross_attention(b, a, self._attention).T if self._words_attend else cross_attention(a, b, self._attention)

    def attention_weights(self, images: ImageBatch, captions: CaptionBatch, language: str) -> AttentionWeights:
        """Return how much the words of a caption attend to the regions of an image, or these to those.

        Raises:
            ValueError: the model does not read the language.
        """
        regions, words = self.encode_images(images), self.encode_captions(captions, language)
        if self._words_attend:
            return AttentionWeights(pairs=attention_of_pair(words, regions, self._attention))
        return AttentionWeights(pairs=attention_of_pair(regions, words, self._attention).T, words_attend=False)
