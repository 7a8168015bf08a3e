"""What a trained model retrieves: metrics, scores, embeddings, search."""

from train.evaluation.embedding import EmbedJob, embed, embed_run
from train.evaluation.evaluating import Embeddings, chance, embed_all, embed_captions, embed_images, evaluate, sum_of_recalls
from train.evaluation.matching import check_captions, check_features
from train.evaluation.metrics import CUTOFFS, Direction, Ranks, Retrieval, Similarity, ranks_of, retrieval
from train.evaluation.scoring import EvaluateJob, Score, evaluate_run, score_run
from train.evaluation.searching import (
    Gallery,
    Hit,
    SearchJob,
    Tokenize,
    embed_gallery,
    read_gallery,
    search,
    search_gallery,
)

__all__ = [
    "CUTOFFS",
    "Direction",
    "EmbedJob",
    "Embeddings",
    "EvaluateJob",
    "Gallery",
    "Hit",
    "Ranks",
    "Retrieval",
    "Score",
    "SearchJob",
    "Similarity",
    "Tokenize",
    "chance",
    "check_captions",
    "check_features",
    "embed",
    "embed_all",
    "embed_captions",
    "embed_gallery",
    "embed_images",
    "embed_run",
    "evaluate",
    "evaluate_run",
    "ranks_of",
    "read_gallery",
    "retrieval",
    "score_run",
    "search",
    "search_gallery",
    "sum_of_recalls",
]
