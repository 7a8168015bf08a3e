"""Models: what training needs of one, the kinds that there are, and what they are made of."""

from train.models.catalogue import build_model, register_model
from train.models.dan import Dan
from train.models.dimensions import Dimensions
from train.models.joint_embedding import SIMILARITIES, JointEmbedding
from train.models.mha_d import MhaD
from train.models.mlmme import Mlmme
from train.models.multi_head_attention import MultiHeadAttention
from train.models.retrieval_model import AttentionWeights, Encoded, ImageBatch, RetrievalModel
from train.models.similarity import cosine, order

__all__ = [
    "SIMILARITIES",
    "AttentionWeights",
    "Dan",
    "Dimensions",
    "Encoded",
    "ImageBatch",
    "JointEmbedding",
    "MhaD",
    "Mlmme",
    "MultiHeadAttention",
    "RetrievalModel",
    "build_model",
    "cosine",
    "order",
    "register_model",
]
