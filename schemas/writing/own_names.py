"""Names of files in a dataset's folder: those of a dataset, those that look like shards, and those of other tools.

Other tools and file managers leave files of their own beside the shards, e.g. litdata's ``index.json`` or ``.DS_Store``. They are
no part of the dataset: nothing reads, changes or deletes them. A file that looks like a shard is not left alone, because readers
that take a whole folder would take it for data.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from schemas.manifest import MANIFEST_NAMES
from schemas.storage.folder import TEMPORARY_MARK
from schemas.vocabulary import TEXT_NAMES

LOCK_NAME = ".lock"
"""Locked by a run, from its beginning to its end."""

PUBLISHING_NAME = ".publishing"
"""Locked by what publishes a shard, or commits."""

PROBE_NAME = ".probe"
"""Written and deleted before a run, where only writing tells whether that is allowed."""

TASKS_NAME = "_tasks.json"
"""What tasks of array jobs of earlier versions left; nothing reads it, and it is not foreign."""

JOB_NAME = "_job.json"
"""Likewise, of jobs on other machines."""

SUMMARY_NAME = ".records/dataset.json"
"""Likewise, what earlier versions wrote beside the records of a dataset in a store."""

_OF_SHARDS = re.compile(
    r"(failures/)?part-\d{5}-of-\d{5}\.parquet|(_failures|\.records)/part-\d{5}-of-\d{5}\.jsonl"  # "failures/": version 1.
    + f"|{re.escape(SUMMARY_NAME)}"
)
_CONTROL = (*MANIFEST_NAMES, TASKS_NAME, JOB_NAME, LOCK_NAME, PUBLISHING_NAME, PROBE_NAME)
_TEMPORARY = re.compile(rf"(.*/)?\.[^/]+{re.escape(TEMPORARY_MARK)}\d.*", re.DOTALL)  # Of a folder, too, with what is in it.
_SIDE_NAMES = re.compile(
    rf"{'|'.join(map(re.escape, TEXT_NAMES))}|_?truecaser/[^/]+\.model|_?names/(classes|attributes)(\.txt)?"
)


def is_of_shard(name: str) -> bool:
    """Tell whether a file is named like a shard, or like its failures or record."""
    return _OF_SHARDS.fullmatch(name) is not None


def is_control_file(name: str) -> bool:
    """Tell whether a file is a manifest or a lock, or another file by which runs know of each other, or temporary."""
    return name in _CONTROL or is_temporary(name)


def is_temporary(name: str) -> bool:
    """Tell whether a file is what a run leaves that is killed while it writes."""
    return _TEMPORARY.fullmatch(name) is not None


def is_like_shard(name: str) -> bool:
    """Tell whether readers of a whole folder may take a file for a shard."""
    return name.rpartition("/")[2].startswith("part-") or name.endswith(".parquet")


def is_own(name: str) -> bool:
    """Tell whether a dataset of some kind may hold a file of this name."""
    return is_of_shard(name) or is_control_file(name) or _SIDE_NAMES.fullmatch(name) is not None


def left_alone(location: str, names: Sequence[str]) -> str:
    """Say that files beside a dataset are not its own.

    Args:
        location: the dataset's folder.
        names: the files, at least one.
    """
    more = f" and {len(names) - 1:,} more" if len(names) > 1 else ""
    return f"left alone in {location!r}, because it is not of the dataset: {names[0]!r}{more}"
