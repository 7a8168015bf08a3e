"""The output dataset of a run."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

import pyarrow as pa

from schemas.dataset import Dataset
from schemas.fingerprints import fingerprint_of, sha256_of_json
from schemas.keys import shard_name
from schemas.kinds import schema_of
from schemas.parameters import feature_of
from schemas.sample_outputs import SampleOutputs
from schemas.storage.folder import Folder
from schemas.writing.reuse_policy import FailureLimit


@dataclass(frozen=True)
class OutputDataset:
    """A dataset to write.

    Kind, parameters, inputs and number of shards determine content and fingerprint.

    Attributes:
        kind: one of `schemas.kinds.KEY_COLUMNS`.
        parameters: all parameters that determine the content; JSON values.
        inputs: one entry per input: its name, and its fingerprint (a dataset) or digest (other inputs).
        listings: per shard, a digest of the list of its inputs, if they may change. A shard is current only
            if the statistics in its footer have the same ``listing``.
        version_digests: per shard, a digest of sizes and versions of its inputs; see `schemas.writing.records`.
        files: content by name of files beside the shards, known before the run and not part of the fingerprint.
        other_files: regular expression for the names of all files that a run may write beside the shards.
        sources: locations of the datasets behind listings and digests of versions, for messages; empty for images.
        notes: texts about this run for the manifest, by key; not part of the fingerprint.
        sample_outputs: function that returns the sample outputs of the model on this machine; None without a
            model, or if workers on other machines compute them.
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

    def made_from(self, *sources: Dataset) -> Self:
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
