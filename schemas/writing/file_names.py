"""Names of the files in the folder of a dataset.

Other tools leave their own files beside the shards, e.g. litdata's ``index.json`` or ``.DS_Store``. Nothing reads, changes or
deletes them. Foreign files named like shards are refused, since readers of a whole folder would read them as data.
"""

import re
from collections.abc import Sequence

from schemas.manifest import MANIFEST_NAME
from schemas.storage.folder import TEMPORARY_MARK
from schemas.vocabulary import TEXT_NAME

LOCK_NAME = ".lock"
"""Lock file of a run."""

PUBLISHING_NAME = ".publishing"
"""Lock file of the publication of a shard, or of a commit."""

PROBE_NAME = f".probe{TEMPORARY_MARK}0"
"""Temporary file that is written and deleted before a run, to check that a store is writable."""

JOB_NAME = "_job.json"
"""Record of a job on other machines; not foreign."""

_OF_SHARDS = re.compile(r"part-\d{5}-of-\d{5}\.parquet|(_failures|\.records)/part-\d{5}-of-\d{5}\.jsonl")
_CONTROL = (MANIFEST_NAME, JOB_NAME, LOCK_NAME, PUBLISHING_NAME)
_TEMPORARY = re.compile(rf"(.*/)?\.[^/]+{re.escape(TEMPORARY_MARK)}\d.*", re.DOTALL)  # Also files in a temporary folder.
_SIDE_NAMES = re.compile(rf"{re.escape(TEXT_NAME)}|_truecaser/[^/]+\.model|_names/(classes|attributes)")


def is_of_shard(name: str) -> bool:
    """Return whether a file is named like a shard, its failures or its record."""
    return _OF_SHARDS.fullmatch(name) is not None


def is_control_file(name: str) -> bool:
    """Return whether a file is temporary or a file of the protocol, e.g. a manifest."""
    return name in _CONTROL or is_temporary(name)


def is_temporary(name: str) -> bool:
    """Return whether a file is left by a run that was killed while writing it.

    The next run deletes the file.
    """
    return _TEMPORARY.fullmatch(name) is not None


def is_like_shard(name: str) -> bool:
    """Return whether readers of a whole folder may read a file as a shard."""
    return name.rpartition("/")[2].startswith("part-") or name.endswith(".parquet")


def is_own(name: str) -> bool:
    """Return whether a dataset of any kind may have a file of this name."""
    return is_of_shard(name) or is_control_file(name) or _SIDE_NAMES.fullmatch(name) is not None


def left_alone(location: str, names: Sequence[str]) -> str:
    """Return the remark about at least one file of other tools in a dataset's folder."""
    others = f" and {len(names) - 1:,} more" if len(names) > 1 else ""
    return f"ignored in {location!r}: {names[0]!r}{others}, not part of the dataset"
