"""The dataset that a run writes, and the names of files in its folder.

Other tools and file managers leave files of their own beside the shards, e.g. litdata's ``index.json`` or ``.DS_Store``. They are
not part of the dataset: nothing reads, changes or deletes them. A file that looks like a shard is not left alone, because readers
that take a whole folder would take it for data.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from schemas.fingerprints import fingerprint_of, sha256_of_json
from schemas.keys import shard_name
from schemas.kinds import schema_of
from schemas.manifest import MANIFEST_NAMES
from schemas.parameters import feature_of
from schemas.storage.folder import TEMPORARY_MARK, Folder
from schemas.vocabulary import TEXT_NAMES

if TYPE_CHECKING:
    from schemas.dataset import Dataset


@dataclass(frozen=True)
class OutputDataset:
    """A dataset that a run writes.

    Kind, parameters, inputs and number of shards determine the content and make the fingerprint, before the first shard is made.

    Attributes:
        folder: where the dataset goes.
        kind: one of `schemas.kinds.KEY_COLUMNS`.
        parameters: every parameter that changes content; JSON values only.
        inputs: one entry per input: its name, and its fingerprint (a dataset) or digest (anything else).
        listings: for a kind whose inputs may change, a digest of what each shard is made from. A shard counts as finished only
            where the statistics in its footer name the same ``listing``.
        states: likewise, a digest of what listing the inputs tells about their content; see `schemas.writing.records`.
        files: content, by name, of files besides the shards that are known before the run. They are not part of the fingerprint: a
            dataset that lacks nothing but these gets them, and its shards stay.
        other_files: regular expression of the names of all files besides the shards that a run of this kind may write.
        sources: datasets that listings and states are of, for messages; empty where they are of images.
    """

    folder: Folder
    kind: str
    parameters: Mapping[str, Any]
    inputs: Sequence[Mapping[str, Any]] = ()
    shards: int = 1
    listings: tuple[str, ...] | None = None
    states: tuple[str, ...] | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    other_files: str = ""
    sources: tuple[str, ...] = ()

    def made_from(self, *sources: Dataset) -> OutputDataset:
        """Return the output with a note of the content of the datasets that it is made from, for its records.

        The fingerprints of these datasets are among the inputs, but their content may be another, e.g. of another version.
        """
        state = sha256_of_json([source.manifest.content_sha256 for source in sources])
        return replace(self, states=(state,) * self.shards, sources=tuple(source.folder.location for source in sources))

    @property
    def fingerprint(self) -> str:
        """SHA-256 of everything that determines the content; see `schemas.fingerprints.fingerprint_of`."""
        return fingerprint_of(self.kind, self.parameters, self.inputs, self.shards)

    @cached_property
    def schema(self) -> pa.Schema:
        """Arrow schema of the rows."""
        return schema_of(self.kind, feature_of(self.parameters))

    def name(self, number: int) -> str:
        """Return the file name of a shard."""
        return shard_name(number, self.shards)

    def missing(self, finished: Collection[int]) -> list[int]:
        """Return the indices of the shards that are not finished, ascending."""
        return [shard for shard in range(self.shards) if shard not in finished]

    def is_other_file(self, name: str) -> bool:
        """Whether a file is one that a run of this kind may write besides the shards."""
        return re.fullmatch(self.other_files, name) is not None


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


def is_leftover(name: str) -> bool:
    """Tell whether a file is temporary, or one that runs leave and the next one deletes."""
    return is_temporary(name) or name in (PROBE_NAME, TASKS_NAME)


def is_like_shard(name: str) -> bool:
    """Tell whether readers of a whole folder may take a file for a shard."""
    return name.rpartition("/")[2].startswith("part-") or name.endswith(".parquet")


def is_own(name: str) -> bool:
    """Tell whether a dataset of some kind may hold a file of this name."""
    return is_of_shard(name) or is_control_file(name) or _SIDE_NAMES.fullmatch(name) is not None


def left_alone(location: str, names: Sequence[str]) -> str:
    """Return the remark on files beside a dataset that are not its own, at least one."""
    more = f" and {len(names) - 1:,} more" if len(names) > 1 else ""
    return f"left alone in {location!r}, because it is not of the dataset: {names[0]!r}{more}"
