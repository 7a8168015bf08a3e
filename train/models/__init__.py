"""Models: encoders, similarities and the joint embedding."""

from train.models.encoders import ImageEncoder, SentenceEncoder
from train.models.joint_embedding import SIMILARITIES, JointEmbedding, ModelConfig, build_model
from train.models.packed_gru import PackedGRU
from train.models.similarity import cosine, order

__all__ = [
    "SIMILARITIES",
    "ImageEncoder",
    "JointEmbedding",
    "ModelConfig",
    "PackedGRU",
    "SentenceEncoder",
    "build_model",
    "cosine",
    "order",
]
