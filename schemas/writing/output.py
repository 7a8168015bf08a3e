"""The dataset that a run writes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from schemas.fingerprints import fingerprint_of, sha256_of_json
from schemas.keys import shard_name
from schemas.kinds import schema_of
from schemas.parameters import feature_of
from schemas.storage.folder import Folder

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
        shards: number of shards.
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

    def is_other_file(self, name: str) -> bool:
        """Whether a file is one that a run of this kind may write besides the shards."""
        return re.fullmatch(self.other_files, name) is not None
