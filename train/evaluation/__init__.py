"""What a trained model retrieves: metrics, scores, embeddings, search."""

from train.evaluation.averaging import Average, averages, evaluation_report
from train.evaluation.cross_lingual import CrossLingual, evaluate_cross_lingual
from train.evaluation.embedding import embed, embed_run
from train.evaluation.evaluating import (
    chance,
    encode_captions,
    encode_images,
    evaluate,
    evaluate_together,
    sum_of_recalls,
)
from train.evaluation.folds import chance_in_folds, evaluate_folds
from train.evaluation.matching import check_captions, check_features, check_members, check_vectors
from train.evaluation.metrics import CUTOFFS, Direction, Ranks, Retrieval, Scores, ranks_between, ranks_of, retrieval
from train.evaluation.scoring import Score, evaluate_run, score_run, score_together
from train.evaluation.searching import (
    Gallery,
    Hit,
    Tokenize,
    embed_gallery,
    read_gallery,
    search,
    search_gallery,
)
from train.evaluation.sts_pairs import StsPairs, read_sts
from train.evaluation.sts_scoring import OVERLAP, StsResult, StsSystem, score_sts, sts, word_overlap
from train.evaluation.validating import Validation, validate

__all__ = [
    "CUTOFFS",
    "OVERLAP",
    "Average",
    "CrossLingual",
    "Direction",
    "Gallery",
    "Hit",
    "Ranks",
    "Retrieval",
    "Score",
    "Scores",
    "StsPairs",
    "StsResult",
    "StsSystem",
    "Tokenize",
    "Validation",
    "averages",
    "chance",
    "chance_in_folds",
    "check_captions",
    "check_features",
    "check_members",
    "check_vectors",
    "embed",
    "embed_gallery",
    "embed_run",
    "encode_captions",
    "encode_images",
    "evaluate",
    "evaluate_cross_lingual",
    "evaluate_folds",
    "evaluate_run",
    "evaluate_together",
    "evaluation_report",
    "ranks_between",
    "ranks_of",
    "read_gallery",
    "read_sts",
    "retrieval",
    "score_run",
    "score_sts",
    "score_together",
    "search",
    "search_gallery",
    "sts",
    "sum_of_recalls",
    "validate",
    "word_overlap",
]
