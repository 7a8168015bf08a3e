"""Dual attention networks for matching (m-DAN): the kind of model ``dan``.

Nam, Ha, Kim (2017): Dual Attention Networks for Multimodal Reasoning and Matching (arXiv 1611.00471); in detail as in the
reimplementation github.com/JunweiLiang/DualAttentionNetwork (``model.py``), which had the first author's advice and reaches the
paper's recalls. Where dropout takes place is simpler here, see `AttentionSteps`.

Letters in shapes: ``N`` images or captions of a batch, ``A`` and ``B`` those that are compared, ``R`` regions, ``D`` feature width,
``T`` tokens, ``H`` width of a context vector, ``K`` steps, ``E`` = (K + 1) * H width of an embedding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from train.config.models import DanConfig
from train.data.batches import CaptionBatch
from train.models.dimensions import Dimensions
from train.models.encoders import BidirectionalLSTM, SentenceEncoders
from train.models.memory_attention import AttentionSteps
from train.models.reading_model import ReadingModel
from train.models.retrieval_model import AttentionWeights, Encoded, ImageBatch
from train.models.similarity import inner_product


class Dan(ReadingModel):
    """Images and sentences attend to themselves, step by step; an embedding is the context vectors of all steps.

    The similarity of an image and a sentence is the sum over the steps of the inner products of their contexts, which is the inner
    product of their embeddings. Neither depends on the other, so that each item is embedded once. A word is the sum of the states
    of both directions of an LSTM. Each language has a table of words, an LSTM and an attention of its own.

    Args:
        config: widths, steps, dropout.
        dimensions: languages and sizes of the data.

    Raises:
        UsageError: an image has a single feature.
    """

    similarity = "inner-product"

    def __init__(self, config: DanConfig, dimensions: Dimensions) -> None:
        super().__init__()
        config.check_features(dimensions.feature_shape)
        self.languages = dimensions.languages
        self.width = (config.attention_steps + 1) * config.embed_dim
        self.attention = _attention(dimensions.feature_shape[1], config, mapped=True)
        self.sentences = SentenceEncoders(
            dimensions,
            config.word_dim,
            lambda: BidirectionalLSTM(config.word_dim, config.embed_dim),
            lambda: _attention(config.embed_dim, config, mapped=False),
        )

    def encode_images(self, images: ImageBatch) -> Encoded:
        """Return embeddings ``[N, E]`` of images with the features ``[N, R, D]``."""
        return _embedding(self.attention(Encoded(images.features, images.mask)))

    def encode_read(self, read: Encoded, language: str) -> Encoded:
        """Return embeddings ``[N, E]`` of captions that were read, in their order."""
        return _embedding(self.sentences.of(language).pooling(_words(read)))

    def scores(self, a: Encoded, b: Encoded) -> Tensor:
        """Return the inner products ``[A, B]`` of embeddings ``[A, E]`` and ``[B, E]``, computed in float32."""
        with torch.autocast(a.values.device.type, enabled=False):
            return inner_product(a.values, b.values)

    def attention_weights(self, images: ImageBatch, captions: CaptionBatch, language: str) -> AttentionWeights:
        """Return how much each step attends to the regions of an image, and to the tokens of a caption.

        Raises:
            ValueError: the model does not read the language.
        """
        regions, words = Encoded(images.features, images.mask), _words(self.read_captions(captions, language))
        pooling = self.sentences.of(language).pooling
        assert isinstance(pooling, AttentionSteps)
        return AttentionWeights(
            regions=self.attention.weights(regions)[0, :, regions.present[0]],
            words=pooling.weights(words)[0, :, words.present[0]],
        )


def _attention(width: int, config: DanConfig, *, mapped: bool) -> AttentionSteps:
    return AttentionSteps(
        width,
        config.embed_dim,
        steps=config.attention_steps,
        attention_dim=config.attention_dim,
        mapped=mapped,
        dropout=config.dropout,
    )


def _words(read: Encoded) -> Encoded:
    """Return the words of captions ``[N, T, H]``, of states that are the means of both directions."""
    return Encoded(2 * read.values, read.mask)


def _embedding(contexts: Tensor) -> Encoded:
    """Make contexts ``[N, E]`` an embedding; bfloat16 becomes float32."""
    return Encoded(contexts.float() if contexts.dtype == torch.bfloat16 else contexts)
