"""The output dataset of a run, and the names of files in its folder.

Other tools leave their own files beside the shards, e.g. litdata's ``index.json`` or ``.DS_Store``. Nothing reads, changes or
deletes them. Foreign files named like shards are refused, since readers of a whole folder would read them as data.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import pyarrow as pa

from schemas.dataset import Dataset
from schemas.fingerprints import fingerprint_of, sha256_of_json
from schemas.keys import shard_name
from schemas.kinds import schema_of
from schemas.manifest import MANIFEST_NAME
from schemas.parameters import feature_of
from schemas.sample_outputs import SampleOutputs
from schemas.storage.folder import TEMPORARY_MARK, Folder
from schemas.vocabulary import TEXT_NAME
from schemas.writing.reuse_policy import FailureLimit


@dataclass(frozen=True)
class OutputDataset:
    """A dataset to write.

    Kind, parameters, inputs and number of shards determine content and fingerprint.

    Attributes:
        kind: one of `schemas.kinds.KEY_COLUMNS`.
        parameters: all parameters that determine the content; JSON values.
        inputs: one entry per input: its name, and its fingerprint (a dataset) or digest (other inputs).
        listings: per shard, a digest of the list of its inputs, if they may change. A shard is current only if the statistics in
            its footer have the same ``listing``.
        version_digests: per shard, a digest of sizes and versions of its inputs; see `schemas.writing.records`.
        files: content by name of files beside the shards, known before the run and not part of the fingerprint.
        other_files: regular expression for the names of all files that a run may write beside the shards.
        sources: locations of the datasets behind listings and digests of versions, for messages; empty for images.
        notes: texts about this run for the manifest, by key; not part of the fingerprint.
        sample_outputs: function that returns the sample outputs of the model on this machine; None without a model, or if workers
            on other machines compute them.
        max_failures: limit of failures, which a commit compares after it has written the manifest; None without a limit.

    Examples:
        >>> parameters = {"feature": imagepivot.FeatureSpec("zeros", (3,)).to_json()}
        >>> output = imagepivot.OutputDataset(imagepivot.Folder("build/zeros"), "features", parameters)
        >>> rows = pa.Table.from_pylist([{"image_id": "img-00", "feature": [0, 0, 0]}], schema=output.schema)
        >>> imagepivot.write_dataset(output, lambda index, shard: shard.write(rows)).rows
        1
    """

    folder: Folder
    kind: str
    parameters: Mapping[str, Any]
    inputs: Sequence[Mapping[str, Any]] = ()
    shards: int = 1
    listings: tuple[str, ...] | None = None
    version_digests: tuple[str, ...] | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    other_files: str = ""
    sources: tuple[str, ...] = ()
    notes: Mapping[str, str] = field(default_factory=dict)
    sample_outputs: Callable[[], SampleOutputs] | None = field(default=None, compare=False)
    max_failures: FailureLimit | None = field(default=None, compare=False)

    def made_from(self, *sources: Dataset) -> OutputDataset:
        """Return the output with source datasets as first inputs, and their digest.

        Inputs have only fingerprints, and content may differ at the same fingerprint.
        """
        digest = sha256_of_json([source.manifest.content_sha256 for source in sources])
        return replace(
            self,
            inputs=(*({"name": source.kind, "fingerprint": source.fingerprint} for source in sources), *self.inputs),
            version_digests=(digest,) * self.shards,
            sources=tuple(source.folder.location for source in sources),
        )

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the dataset, see `schemas.fingerprints.fingerprint_of`."""
        return fingerprint_of(self.kind, self.parameters, self.inputs, self.shards)

    @cached_property
    def schema(self) -> pa.Schema:
        """Arrow schema of the rows."""
        return schema_of(self.kind, feature_of(self.parameters))

    def name(self, shard: int) -> str:
        """Return the file name of a shard."""
        return shard_name(shard, self.shards)

    def missing(self, finished: Collection[int]) -> list[int]:
        """Return the indices of all other shards, ascending."""
        return [shard for shard in range(self.shards) if shard not in finished]

    def is_other_file(self, name: str) -> bool:
        """Return whether a file matches `other_files`."""
        return re.fullmatch(self.other_files, name) is not None


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
