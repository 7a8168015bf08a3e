"""A kind of model that attends to regions, for tests: `REGION_CONFIG` names it."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from tests.train.trainings import CONFIG
from train.config.models import ModelConfig
from train.data.batches import CaptionBatch
from train.models.catalogue import register_model
from train.models.retrieval_model import Dimensions, Encoded, ImageBatch, RetrievalModel

REGION_CONFIG = CONFIG.replace("embed_dim = 6\nword_dim = 4", 'kind = "toy-regions"\nwidth = 6')


@dataclass(frozen=True)
class RegionConfig(ModelConfig):
    kind: ClassVar[str] = "toy-regions"
    width: int = 6


class RegionModel(RetrievalModel):
    """An image is the mean of its regions, weighted by attention; a caption is the mean of its words."""

    similarity = "cosine"

    def __init__(self, config: RegionConfig, dimensions: Dimensions) -> None:
        super().__init__()
        self.languages, self.width = dimensions.languages, config.width
        self.attention = nn.Linear(dimensions.feature_shape[1], 1)
        self.images = nn.Linear(dimensions.feature_shape[1], config.width)
        self.words = nn.EmbeddingBag(dimensions.vocabulary_size, config.width, padding_idx=0)

    def encode_images(self, images: ImageBatch) -> Encoded:
        assert images.mask is not None
        assert images.mask.shape == images.features.shape[:2]
        weights = self.attention(images.features)[..., 0].masked_fill(~images.mask, -torch.inf).softmax(1)
        return self._unit(torch.einsum("nr,nre->ne", weights, self.images(images.features)))

    def encode_captions(self, captions: CaptionBatch, language: str) -> Encoded:
        return self._unit(self.words(torch.from_numpy(captions.padded(0)).to(self.device)))

    def scores(self, a: Encoded, b: Encoded) -> Tensor:
        return a.values @ b.values.T

    def _unit(self, vectors: Tensor) -> Encoded:
        return Encoded(nn.functional.normalize(vectors.float(), dim=1))


register_model(RegionConfig, RegionModel)
