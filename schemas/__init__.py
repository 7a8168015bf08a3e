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
    from schemas.fingerprints import Identity as Identity
    from schemas.interruption import DetachedError as DetachedError
    from schemas.keys import CaptionKey as CaptionKey
    from schemas.keys import shard_of as shard_of
    from schemas.manifest import Manifest as Manifest
    from schemas.output import Output as Output
    from schemas.output import ReusePolicy as ReusePolicy
    from schemas.output import UpdatePolicy as UpdatePolicy
    from schemas.repairing import Repair as Repair
    from schemas.repairing import repair as repair
    from schemas.storage import Folder as Folder
    from schemas.tasks import Task as Task
    from schemas.tasks import TaskSummary as TaskSummary
    from schemas.tasks import commit_tasks as commit_tasks
    from schemas.validation import validate as validate
    from schemas.vocabulary import Vocabulary as Vocabulary
    from schemas.writing import ShardWriter as ShardWriter
    from schemas.writing import open_shard as open_shard
    from schemas.writing import write_dataset as write_dataset

__all__ = [
    "CaptionKey",
    "Dataset",
    "DatasetError",
    "DetachedError",
    "FeatureSpec",
    "Folder",
    "Identity",
    "ImagepivotError",
    "InputError",
    "Manifest",
    "Output",
    "Repair",
    "ReusePolicy",
    "ShardWriter",
    "Task",
    "TaskSummary",
    "UpdatePolicy",
    "UsageError",
    "Vocabulary",
    "commit_tasks",
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
    "fingerprints": ("Identity",),
    "interruption": ("DetachedError",),
    "keys": ("CaptionKey", "shard_of"),
    "manifest": ("Manifest",),
    "output": ("Output", "ReusePolicy", "UpdatePolicy"),
    "repairing": ("Repair", "repair"),
    "storage": ("Folder",),
    "tasks": ("Task", "TaskSummary", "commit_tasks"),
    "validation": ("validate",),
    "vocabulary": ("Vocabulary",),
    "writing": ("ShardWriter", "open_shard", "write_dataset"),
}


def __getattr__(name: str) -> Any:
    module = next((module for module, names in _MODULES.items() if name in names), None)
    if module is None:
        raise AttributeError(f"module 'schemas' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"schemas.{module}"), name)
    globals()[name] = value
    return value
