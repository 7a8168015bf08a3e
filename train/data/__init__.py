"""Captions and features as arrays, and the batches drawn from them. Importing it loads no torch;
`train.data.packing` and `train.data.torch_datasets` do.
"""

from train.data.captions import Captions, labels_of, read_captions
from train.data.features import ImageFeatures, extractor_fingerprint, missing_images, read_features
from train.data.pairs import ByImage, CaptionPairs, caption_pairs
from train.data.sampling import Batch, ImageSampler, Sampler, ShuffledRows, TaskSampler
from train.data.splits import TEST_SPLITS, MissingFeatures, TrainingData, check_fingerprints, check_images, open_data
from train.data.vectors import feature_spec

__all__ = [
    "TEST_SPLITS",
    "Batch",
    "ByImage",
    "CaptionPairs",
    "Captions",
    "ImageFeatures",
    "ImageSampler",
    "MissingFeatures",
    "Sampler",
    "ShuffledRows",
    "TaskSampler",
    "TrainingData",
    "caption_pairs",
    "check_fingerprints",
    "check_images",
    "extractor_fingerprint",
    "feature_spec",
    "labels_of",
    "missing_images",
    "open_data",
    "read_captions",
    "read_features",
]
