"""The contract: what datasets look like on disk, and how they are written, read and checked.

Needs the standard library, numpy and pyarrow only. Each name is loaded when it is first used: the command starts without pyarrow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from schemas.dataset import Dataset as Dataset
    from schemas.dataset import open_dataset as open_dataset
    from schemas.errors import DatasetError as DatasetError
    from schemas.errors import ImagepivotError as ImagepivotError
    from schemas.errors import InputError as InputError
    from schemas.errors import UsageError as UsageError
    from schemas.features import FeatureSpec as FeatureSpec
    from schemas.keys import CaptionKey as CaptionKey
    from schemas.keys import shard_of as shard_of
    from schemas.manifest import Manifest as Manifest
    from schemas.process.shutdown import DetachedError as DetachedError
    from schemas.storage.folder import Folder as Folder
    from schemas.vocabulary import Vocabulary as Vocabulary
    from schemas.writing.dataset_writer import write_dataset as write_dataset
    from schemas.writing.output import OutputDataset as OutputDataset
    from schemas.writing.repair import Repair as Repair
    from schemas.writing.repair import repair as repair
    from schemas.writing.reuse_policy import ArrayTask as ArrayTask
    from schemas.writing.reuse_policy import ReusePolicy as ReusePolicy
    from schemas.writing.shard_writer import ShardWriter as ShardWriter
    from schemas.writing.shard_writer import open_shard as open_shard
    from schemas.writing.validation import validate as validate

__all__ = [
    "ArrayTask",
    "CaptionKey",
    "Dataset",
    "DatasetError",
    "DetachedError",
    "FeatureSpec",
    "Folder",
    "ImagepivotError",
    "InputError",
    "Manifest",
    "OutputDataset",
    "Repair",
    "ReusePolicy",
    "ShardWriter",
    "UsageError",
    "Vocabulary",
    "open_dataset",
    "open_shard",
    "repair",
    "shard_of",
    "validate",
    "write_dataset",
]

_MODULES = {
    "dataset": ("Dataset", "open_dataset"),
    "errors": ("DatasetError", "ImagepivotError", "InputError", "UsageError"),
    "features": ("FeatureSpec",),
    "process.shutdown": ("DetachedError",),
    "keys": ("CaptionKey", "shard_of"),
    "manifest": ("Manifest",),
    "writing.output": ("OutputDataset",),
    "writing.reuse_policy": ("ArrayTask", "ReusePolicy"),
    "writing.repair": ("Repair", "repair"),
    "storage.folder": ("Folder",),
    "writing.validation": ("validate",),
    "vocabulary": ("Vocabulary",),
    "writing.dataset_writer": ("write_dataset",),
    "writing.shard_writer": ("ShardWriter", "open_shard"),
}


def __getattr__(name: str) -> Any:
    module = next((module for module, names in _MODULES.items() if name in names), None)
    if module is None:
        raise AttributeError(f"module 'schemas' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"schemas.{module}"), name)
    globals()[name] = value
    return value
