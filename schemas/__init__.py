"""The contract: what datasets look like on disk, and how to write, read and check them.

Needs the standard library, numpy and pyarrow only.
"""

from schemas.dataset import Dataset, open_dataset
from schemas.errors import DatasetError, ImagepivotError, InputError, UsageError
from schemas.features import FeatureSpec
from schemas.fingerprints import Identity
from schemas.keys import CaptionKey, shard_of
from schemas.manifest import Manifest
from schemas.validation import validate
from schemas.vocabulary import Vocabulary

__all__ = [
    "CaptionKey",
    "Dataset",
    "DatasetError",
    "FeatureSpec",
    "Identity",
    "ImagepivotError",
    "InputError",
    "Manifest",
    "UsageError",
    "Vocabulary",
    "open_dataset",
    "shard_of",
    "validate",
]
