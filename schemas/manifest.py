"""``manifest.json``: what a dataset is and which files belong to it. Written last; a folder without one is not a dataset."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from schemas.diagnosis import diagnose
from schemas.errors import DatasetError
from schemas.fingerprints import SCHEMA_VERSION, Identity
from schemas.kinds import KEY_COLUMNS
from schemas.storage import Folder

__all__ = ["MANIFEST_NAME", "FileEntry", "Manifest", "ShardEntry"]

MANIFEST_NAME = "manifest.json"
_FORMAT = "imagepivot"


@dataclass(frozen=True)
class FileEntry:
    """A file of a dataset other than a shard, e.g. ``vocabulary.txt``.

    Attributes:
        path: relative to the dataset's folder.
        bytes: size.
        sha256: SHA-256 of its bytes, hexadecimal.
    """

    path: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class ShardEntry(FileEntry):
    """A shard of rows or of failures.

    Attributes:
        rows: number of rows.
    """

    rows: int


@dataclass(frozen=True)
class Manifest:
    """Content of ``manifest.json``.

    Attributes:
        kind: kind of the dataset.
        fingerprint: see ``Identity``.
        parameters: every parameter that changes content.
        inputs: the inputs that it was made from, with fingerprints or digests.
        libraries: versions of the libraries that made it.
        shards: all shards, by number.
        failures: shards of failures, by number; empty if nothing failed.
        failure_reasons: number of failures by reason.
        files: other files.
        statistics: numbers about the content, for people.
        version: version of the format.
    """

    kind: str
    fingerprint: str
    parameters: Mapping[str, Any]
    inputs: tuple[Mapping[str, Any], ...]
    libraries: Mapping[str, str]
    shards: tuple[ShardEntry, ...]
    failures: tuple[ShardEntry, ...] = ()
    failure_reasons: Mapping[str, int] = field(default_factory=dict)
    files: tuple[FileEntry, ...] = ()
    statistics: Mapping[str, Any] = field(default_factory=dict)
    version: int = SCHEMA_VERSION

    @property
    def identity(self) -> Identity:
        """The identity that the manifest claims; its fingerprint must equal the manifest's own."""
        return Identity(kind=self.kind, parameters=self.parameters, inputs=self.inputs, shards=len(self.shards))

    def input_fingerprint(self, name: str) -> str | None:
        """Return the fingerprint of the dataset of this name that this one was made from; None where none is named."""
        return next((entry.get("fingerprint") for entry in self.inputs if entry.get("name") == name), None)

    @property
    def rows(self) -> int:
        """Number of rows of all shards."""
        return sum(shard.rows for shard in self.shards)

    @property
    def failed(self) -> int:
        """Number of inputs that failed."""
        return sum(shard.rows for shard in self.failures)

    def to_json(self) -> str:
        """Return the manifest as text: keys sorted, two spaces of indentation, so that people can read and compare it."""
        content = {"format": _FORMAT, **asdict(self)}
        return json.dumps(content, sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str, location: str) -> Manifest:
        """Read and check a manifest.

        Args:
            text: content of the file.
            location: the file, for messages.

        Raises:
            DatasetError: it is not a manifest, has a newer version, or contradicts itself.
        """
        try:
            content = json.loads(text)
            if content.pop("format") != _FORMAT:
                raise KeyError("format")
            version = content["version"]
            if not isinstance(version, int):
                raise TypeError(f"version is {version!r}")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DatasetError(f"{location} is not the manifest of a dataset ({type(error).__name__}: {error})") from error
        if version > SCHEMA_VERSION:
            raise DatasetError(
                f"{location} has format version {version}, this version of imagepivot reads up to {SCHEMA_VERSION}: "
                "update imagepivot"
            )
        try:
            manifest = cls(
                **{
                    **content,
                    "inputs": tuple(content["inputs"]),
                    "shards": tuple(ShardEntry(**entry) for entry in content["shards"]),
                    "failures": tuple(ShardEntry(**entry) for entry in content["failures"]),
                    "files": tuple(FileEntry(**entry) for entry in content["files"]),
                }
            )
        except (KeyError, TypeError) as error:
            raise DatasetError(f"{location} is damaged: {error}. Make the dataset again") from error
        if manifest.kind not in list(KEY_COLUMNS):  # A list: in a damaged manifest the kind may be unhashable.
            raise DatasetError(f"{location} is of kind {manifest.kind!r}, expected one of {', '.join(KEY_COLUMNS)}")
        if manifest.identity.fingerprint != manifest.fingerprint:
            raise DatasetError(
                f"{location} was changed by hand: its fingerprint is {manifest.fingerprint[:12]}..., its parameters and "
                f"inputs give {manifest.identity.fingerprint[:12]}.... Make the dataset again"
            )
        return manifest

    @classmethod
    def read(cls, folder: Folder) -> Manifest:
        """Read the manifest of a dataset.

        Raises:
            DatasetError: the folder holds no manifest, or an unusable one.
        """
        location = folder.path_of(MANIFEST_NAME)
        try:
            text = folder.read(MANIFEST_NAME).decode()
        except FileNotFoundError:
            raise DatasetError(diagnose(folder, MANIFEST_NAME)) from None
        except UnicodeDecodeError as error:
            raise DatasetError(f"{location} is damaged: {error}. Make the dataset again") from error
        return cls.from_json(text, location)
