"""Manifest of a dataset, written last: a folder without it is not a dataset."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from operator import itemgetter
from typing import Any

import pyarrow as pa

from schemas.conversion import convert, hints_of
from schemas.errors import DatasetError
from schemas.failures import failures_name
from schemas.fingerprints import FORMAT_VERSION, canonical_json, fingerprint_of, sha256_of_json
from schemas.keys import shard_name
from schemas.kinds import KEY_COLUMNS, schema_of
from schemas.parameters import (
    CaptionsParameters,
    EncodedParameters,
    FeaturesParameters,
    TokenFeaturesParameters,
    VocabularyParameters,
    WordVectorsParameters,
    feature_of,
)
from schemas.storage.folder import Folder

MANIFEST_NAME = "_manifest.json"
"""Data tools ignore names with a leading underscore."""

_NAME_IN_VERSION_1 = "manifest.json"

_FORMAT = "imagepivot"

_PARAMETERS: dict[str, Any] = {
    "captions": CaptionsParameters,
    "encoded": EncodedParameters,
    "vocabulary": VocabularyParameters,
    "features": FeaturesParameters,
    "regions": FeaturesParameters,
    "embeddings": FeaturesParameters,
    "word-vectors": WordVectorsParameters,
    "token-features": TokenFeaturesParameters,
}

_MAX_SIZE = 1 << 48  # Of bytes and rows of a file.
_NUMBERS = ("bytes", "rows")
_DIGESTS = ("sha256", "footer_sha256")


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file of a dataset: path in the folder, size in bytes, hexadecimal SHA-256."""

    path: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class ShardEntry(FileEntry):
    """A shard of rows or of failures.

    Attributes:
        footer_sha256: SHA-256 of a Parquet file from its metadata to its end, to check before parsing: a damaged footer can crash
            pyarrow. Empty for failures.
    """

    rows: int
    footer_sha256: str = ""


@dataclass(frozen=True)
class Manifest:
    """Content of ``_manifest.json``.

    Attributes:
        parameters: all parameters that determine the content.
        inputs: names of the inputs, with fingerprints or digests.
        failures: files of failures, in the order of their shards.
        notes: the user's notes about the run that committed the dataset, by key.
        sample_outputs: sample outputs of the model that computed the rows; empty if unknown, see `schemas.sample_outputs`.

    Examples:
        >>> manifest = imagepivot.open_dataset("features").manifest
        >>> manifest.kind, manifest.rows, len(manifest.shards), manifest.failed
        ('features', 6, 2, 0)
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
    sample_outputs: tuple[float, ...] = ()
    notes: Mapping[str, str] = field(default_factory=dict)
    version: int = FORMAT_VERSION

    def input_fingerprint(self, name: str) -> str | None:
        """Return the fingerprint of an input dataset by name; None if missing."""
        return next((entry.get("fingerprint") for entry in self.inputs if entry.get("name") == name), None)

    @cached_property
    def shard_entries(self) -> Mapping[str, ShardEntry]:
        """Entries of shards and failures by name."""
        return {entry.path: entry for entry in (*self.shards, *self.failures)}

    @property
    def content_sha256(self) -> str:
        """Digest of the digests of all shards, hexadecimal.

        Fingerprints of features and regions do not change with the images: consumers that reuse results compare this digest, too.
        """
        return sha256_of_json([shard.sha256 for shard in self.shards])

    @property
    def rows(self) -> int:
        """Number of rows of all shards."""
        return sum(shard.rows for shard in self.shards)

    @property
    def failed(self) -> int:
        """Number of failures."""
        return sum(shard.rows for shard in self.failures)

    def to_json(self) -> str:
        """Return the manifest as indented JSON with the digest of its canonical JSON."""
        content = json.loads(canonical_json({"format": _FORMAT, **asdict(self)}))
        for entry in (*content["shards"], *content["failures"]):
            if not entry["footer_sha256"]:
                del entry["footer_sha256"]
        for name in ("sample_outputs", "notes"):
            if not content[name]:
                del content[name]
        content["sha256"] = sha256_of_json(content)
        return json.dumps(content, sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str, location: str) -> Manifest:
        """Parse and check a manifest; messages start with its location.

        Raises:
            DatasetError: it is not a manifest, has another version, was changed, or contradicts itself.
        """
        try:
            content = json.loads(text)
            if content.pop("format") != _FORMAT:
                raise KeyError("format")
            version = content["version"]
            if isinstance(version, bool) or not isinstance(version, int) or version < 1:
                raise TypeError(f"version is {version!r}")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DatasetError(
                f"{location} is not the manifest of a dataset ({type(error).__name__}: {error}): {_ADVICE}"
            ) from error
        try:
            if content.pop("sha256", None) != sha256_of_json({"format": _FORMAT, **content}):
                raise DatasetError("it was changed since it was written: its sha256 is not that of its content")
            if version == FORMAT_VERSION:
                return _checked(cls, content)
        except (DatasetError, ValueError, RecursionError) as error:  # NaN, surrogates: no canonical JSON.
            raise DatasetError(f"{location} is damaged ({error}): {_ADVICE}") from error
        raise DatasetError(f"{location} {other_version(version)}")

    @classmethod
    def read(cls, folder: Folder) -> Manifest:
        """Read the manifest of a dataset.

        Raises:
            DatasetError: the folder holds no manifest, or an unusable one.
        """
        location = folder.path_of(MANIFEST_NAME)
        try:
            return cls.from_json(folder.read(MANIFEST_NAME).decode(), location)
        except FileNotFoundError:
            raise DatasetError(diagnose(folder)) from None
        except UnicodeDecodeError as error:
            raise DatasetError(f"{location} is damaged ({error}): {_ADVICE}") from error


def other_version(version: int) -> str:
    """Return the end of the message about another version of the format."""
    remedy = "update imagepivot" if version > FORMAT_VERSION else "write the dataset again, into another folder"
    return f"has format version {version}, this version of imagepivot reads version {FORMAT_VERSION}: {remedy}"


_ADVICE = "copy it again, or delete it and run the command that wrote the dataset again, which keeps intact shards"


def _checked(cls: type[Manifest], content: dict[str, Any]) -> Manifest:
    """Create a manifest from untrusted content, or raise a `DatasetError`."""
    kind = content.get("kind")
    if kind not in list(KEY_COLUMNS):  # A list: the kind may be unhashable.
        raise DatasetError(f"kind is {kind!r}, expected one of {', '.join(KEY_COLUMNS)}")
    lists = {"shards": ShardEntry, "failures": ShardEntry, "files": FileEntry}
    entries: dict[str, Any] = {name: tuple(_entries(entry, content.get(name), name)) for name, entry in lists.items()}
    manifest = replace(convert(_known(cls, {**content, **dict.fromkeys(lists, ())}), cls, error=DatasetError), **entries)
    _check_paths(manifest)
    fingerprint = fingerprint_of(manifest.kind, manifest.parameters, manifest.inputs, len(manifest.shards))
    if fingerprint != manifest.fingerprint:
        raise DatasetError(
            f"it was changed by hand: its fingerprint is {manifest.fingerprint[:12]}..., its parameters and inputs give "
            f"{fingerprint[:12]}..."
        )
    _PARAMETERS[kind].from_json(manifest.parameters)
    try:
        schema_of(kind, feature_of(manifest.parameters))
    except (ValueError, OverflowError, pa.ArrowException) as error:
        raise DatasetError(f"the feature has no shape of kind {kind}: {error}") from error
    return manifest


def _known(cls: Any, content: Any) -> Any:
    """Drop keys of a later release."""
    hints = hints_of(cls)
    return {key: value for key, value in content.items() if key in hints} if isinstance(content, dict) else content


def _entries(cls: type[FileEntry], stored: Any, name: str) -> Iterator[FileEntry]:
    """Create the entries of a list, or raise an error that names the first wrong one."""
    if (columns := _columns(cls, stored)) is not None:
        yield from map(cls, *columns)
        return
    for index, item in enumerate(convert(stored, list, name, error=DatasetError)):
        entry = convert(_known(cls, item), cls, f"{name}[{index}]", error=DatasetError)
        for key, value in item.items():
            if (key in _NUMBERS and not 0 <= value < _MAX_SIZE) or (
                key in _DIGESTS and not re.fullmatch("[0-9a-f]{64}", value)
            ):
                raise DatasetError(f"{name}[{index}].{key} is {value!r}")
        yield entry


def _columns(cls: type[FileEntry], stored: Any) -> list[list[Any]] | None:
    """Return the values of valid entries by field; None if one is not valid.

    Checks of whole columns take a tenth of the time of a check of each value, with 99,999 shards.
    """
    names = [item.name for item in fields(cls)]
    if type(stored) is not list or set(map(type, stored)) != {dict} or not all(map(set(names).issubset, stored)):
        return None
    columns = {name: list(map(itemgetter(name), stored)) for name in names}
    for name, values in columns.items():
        if set(map(type, values)) != {int if name in _NUMBERS else str}:
            return None
        if name in _NUMBERS and not (min(values) >= 0 and max(values) < _MAX_SIZE):
            return None
        if name in _DIGESTS and not (set(map(len, values)) == {64} and re.fullmatch("[0-9a-f]*", "".join(values))):
            return None
    return list(columns.values())


def _check_paths(manifest: Manifest) -> None:
    """Check that every file has the expected name, inside the folder."""
    if not manifest.shards:
        raise DatasetError("it lists no shards")
    if not all(shard.footer_sha256 for shard in manifest.shards):
        raise DatasetError("a shard is listed without the footer_sha256 of its footer")
    names = [shard_name(number, len(manifest.shards)) for number in range(len(manifest.shards))]
    for number, (shard, name) in enumerate(zip(manifest.shards, names, strict=True)):
        if shard.path != name:
            raise DatasetError(f"shard {number} is called {shard.path!r}, expected {name!r}")
    has_others = bool(manifest.failures or manifest.files)
    belonging = {failures_name(name) for name in names} if has_others else set()
    failures = [entry.path for entry in manifest.failures]
    stray = next((path for path in failures if path not in belonging), None)
    if stray is not None or failures != sorted(set(failures)):
        raise DatasetError(
            f"failures {stray!r} belong to no shard" if stray else "a file of failures is listed twice, or out of order"
        )
    files = [entry.path for entry in manifest.files]
    taken = {*names, *belonging, MANIFEST_NAME} if files else set()
    for path in files:
        parts = path.split("/")
        if not path.isprintable() or not {"", ".", ".."}.isdisjoint(parts) or path in taken:
            raise DatasetError(f"{path!r} is not a valid name of a file beside the shards")
    if len(set(files)) != len(files):
        raise DatasetError("a file is listed twice")


_RUN_FILES = frozenset({"best.pt", "last.pt", "log.jsonl"})
_MAX_NAMED = 5


def diagnose(folder: Folder) -> str:
    """Return the message about a folder without a manifest.

    Raises:
        DatasetError: the folder cannot be listed.
    """
    start = f"{folder.location!r} is not a dataset"
    kind = folder.kind()
    if kind == "file":
        return f"{start} but a file: give the folder of a dataset"
    if kind == "nothing":
        return f"{start}: the folder does not exist. Check the path"
    files = set(folder.children())
    if "config.toml" in files and files & _RUN_FILES:
        return (
            f"{start} but a run of imagepivot train, which imagepivot evaluate, embed and search take: give the folder of one of "
            "the datasets that it was trained on"
        )
    datasets = [name for name in folder.folders() if MANIFEST_NAME in folder.children(name)]
    if datasets:
        named = ", ".join(repr(folder.path_of(name)) for name in datasets[:_MAX_NAMED])
        more = f" or another of its {len(datasets)}" if len(datasets) > _MAX_NAMED else ""
        return f"{start} but a folder of datasets: give {'one of ' if len(datasets) > 1 else ''}{named}{more}"
    if any(name.startswith("part-") for name in files):
        if _NAME_IN_VERSION_1 in files:
            return f"{folder.location!r} {other_version(1)}"
        return (
            f"{start}: it holds no {MANIFEST_NAME}, which is written last, but shards. Run the command that writes it again to "
            "finish it, or copy the whole folder again"
        )
    return (
        f"{start}: it holds no {MANIFEST_NAME}. Either the path is wrong or the run that writes it has not ended; run its command "
        "again to finish it"
    )
