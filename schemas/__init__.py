"""The contract: what datasets look like on disk, and how they are written, read and checked.

Needs the standard library, numpy and pyarrow only.
"""

from schemas.dataset import Dataset, open_dataset
from schemas.errors import DatasetError, ImagepivotError, InputError, UsageError
from schemas.features import FeatureSpec
from schemas.fingerprints import Identity
from schemas.keys import CaptionKey, shard_of
from schemas.manifest import Manifest
from schemas.output import Output
from schemas.validation import validate
from schemas.vocabulary import Vocabulary
from schemas.writing import ShardWriter, open_shard, write_dataset

__all__ = [
    "CaptionKey",
    "Dataset",
    "DatasetError",
    "FeatureSpec",
    "Identity",
    "ImagepivotError",
    "InputError",
    "Manifest",
    "Output",
    "ShardWriter",
    "UsageError",
    "Vocabulary",
    "open_dataset",
    "open_shard",
    "shard_of",
    "validate",
    "write_dataset",
]
