"""Manifest of a dataset, written last: a folder without it is not a dataset."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from itertools import islice
from operator import itemgetter
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

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

_Entry = TypeVar("_Entry", bound="FileEntry")

_MAX_SIZE = 1 << 48  # Upper bound for bytes and for rows of a file.
_NUMBERS = ("bytes", "rows")
_DIGESTS = ("sha256", "footer_sha256")
_ENTRY_LISTS = ("shards", "failures")
_BATCH_ENTRIES = 4096
_ADVICE = "copy it again, or delete it and run the command that wrote the dataset again, which keeps intact shards"
RUN_FILES = ("best.pt", "last.pt", "log.jsonl")
"""Files of a run, of which a stopped one may lack some; first the one that its results are read from."""
_MAX_NAMED = 5


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
        footer_sha256: SHA-256 of a Parquet file from its metadata to its end, to check before parsing: a
            damaged footer can crash pyarrow. Empty for failures.
    """

    rows: int
    footer_sha256: str = ""


_SCHEMA = pa.schema([(item.name, pa.int64() if item.name in _NUMBERS else pa.string()) for item in fields(ShardEntry)])


class ShardEntries(Sequence[ShardEntry]):
    """Entries of shards or of their failures as an Arrow table, 190 bytes each.

    An entry is created when it is read. For 99,999 shards, objects take three times the memory.
    """

    def __init__(self, entries: Iterable[ShardEntry] = ()) -> None:
        rows, batches = map(asdict, entries), []
        while batch := list(islice(rows, _BATCH_ENTRIES)):
            batches.append(pa.RecordBatch.from_pylist(batch, _SCHEMA))
        self._table = pa.Table.from_batches(batches, _SCHEMA)

    @classmethod
    def from_json(cls, stored: Any, name: str) -> ShardEntries:
        """Convert the list of a manifest, whose name begins messages.

        Raises:
            DatasetError: an entry is not valid; the message names the first one.
        """
        with suppress(TypeError, ValueError, KeyError, AttributeError, OverflowError):
            columns = {key: list(map(itemgetter(key), stored)) for key in _SCHEMA.names[:-1]}
            columns["footer_sha256"] = [item.get("footer_sha256", "") for item in stored]
            table = pa.table(columns)
            if isinstance(stored, list) and table.schema == _SCHEMA and _are_valid(table):
                entries = cls()
                entries._table = table
                return entries
        return cls(_entries(ShardEntry, stored, name))

    def column(self, name: str) -> list[Any]:
        """Return the values of a field of all entries, e.g. ``rows``."""
        return self._table[name].to_pylist()

    def __len__(self) -> int:
        return self._table.num_rows

    def __getitem__(self, index: Any) -> Any:
        indices = range(len(self))[index]
        if isinstance(indices, int):
            return ShardEntry(**self._table.slice(indices, 1).to_pylist()[0])
        return ShardEntries(map(self.__getitem__, indices))

    def __iter__(self) -> Iterator[ShardEntry]:
        for batch in self._table.to_batches(_BATCH_ENTRIES):
            yield from (ShardEntry(**row) for row in batch.to_pylist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ShardEntries) and self._table.equals(other._table)


def _are_valid(table: pa.Table) -> bool:
    """Check whole columns, in a tenth of the time of a check of each value."""
    ranges = [pc.min_max(table[name]).as_py() for name in _NUMBERS]
    digests = {"sha256": "^[0-9a-f]{64}$", "footer_sha256": "^([0-9a-f]{64})?$"}
    return (
        not any(column.null_count for column in table.columns)
        and all(values["min"] >= 0 and values["max"] < _MAX_SIZE for values in ranges)
        and all(pc.all(pc.match_substring_regex(table[name], pattern)).as_py() for name, pattern in digests.items())
    )


@dataclass(frozen=True)
class Manifest:
    """Content of ``_manifest.json``.

    Attributes:
        parameters: all parameters that determine the content.
        inputs: names of the inputs, with fingerprints or digests.
        shards: entries of the shards, in order; other iterables are converted.
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
    shards: ShardEntries
    failures: ShardEntries = field(default_factory=ShardEntries)
    failure_reasons: Mapping[str, int] = field(default_factory=dict)
    files: tuple[FileEntry, ...] = ()
    statistics: Mapping[str, Any] = field(default_factory=dict)
    sample_outputs: tuple[float, ...] = ()
    notes: Mapping[str, str] = field(default_factory=dict)
    version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        for name in _ENTRY_LISTS:
            if not isinstance(entries := getattr(self, name), ShardEntries):
                object.__setattr__(self, name, ShardEntries(entries))

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
        return sha256_of_json(self.shards.column("sha256"))

    @property
    def rows(self) -> int:
        """Number of rows of all shards."""
        return sum(self.shards.column("rows"))

    @property
    def failed(self) -> int:
        """Number of failures."""
        return sum(self.failures.column("rows"))

    def to_json(self) -> str:
        """Return the manifest as indented JSON with the digest of its canonical JSON."""
        return "".join(self.json_parts())

    def json_parts(self) -> Iterator[str]:
        """Yield the parts of `to_json`, one per entry, with constant memory."""
        content = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in _ENTRY_LISTS}
        content = json.loads(canonical_json({"format": _FORMAT, **content, "files": list(map(asdict, self.files))}))
        for name in ("sample_outputs", "notes"):
            if not content[name]:
                del content[name]
        content |= {name: _LazyList(getattr(self, name)) for name in _ENTRY_LISTS}
        options: dict[str, Any] = {"sort_keys": True, "ensure_ascii": False, "allow_nan": False, "default": _stored_entry}
        digest = hashlib.sha256()
        for part in json.JSONEncoder(separators=(",", ":"), **options).iterencode(content):
            digest.update(part.encode())
        yield from json.JSONEncoder(indent=2, **options).iterencode({**content, "sha256": digest.hexdigest()})
        yield "\n"

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
        except (FileNotFoundError, DatasetError) as error:
            if isinstance(error, FileNotFoundError) or isinstance(error.__cause__, NotADirectoryError):
                raise DatasetError(diagnose(folder)) from None
            raise
        except UnicodeDecodeError as error:
            raise DatasetError(f"{location} is damaged ({error}): {_ADVICE}") from error


def other_version(version: int) -> str:
    """Return the end of the message about another version of the format."""
    remedy = "update imagepivot" if version > FORMAT_VERSION else "write the dataset again, into another folder"
    return f"has format version {version}, this version of imagepivot reads version {FORMAT_VERSION}: {remedy}"


class _LazyList(list[Any]):
    """List for ``json``, which creates its items while it encodes them."""

    def __init__(self, items: Sequence[Any]) -> None:
        super().__init__()
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)


def _stored_entry(entry: ShardEntry) -> dict[str, Any]:
    return {name: value for name, value in asdict(entry).items() if value != ""}


def _checked(cls: type[Manifest], content: dict[str, Any]) -> Manifest:
    """Create a manifest from untrusted content, or raise a `DatasetError`."""
    kind = content.get("kind")
    if kind not in list(KEY_COLUMNS):  # A list: the kind may be unhashable.
        raise DatasetError(f"kind is {kind!r}, expected one of {', '.join(KEY_COLUMNS)}")
    entries = {name: ShardEntries.from_json(content.get(name), name) for name in _ENTRY_LISTS}
    files = tuple(_entries(FileEntry, content.get("files"), "files"))
    manifest = replace(convert(_known(cls, {**content, **entries, "files": ()}), cls, error=DatasetError), files=files)
    _check_paths(manifest)
    fingerprint = fingerprint_of(manifest.kind, manifest.parameters, manifest.inputs, len(manifest.shards))
    if fingerprint != manifest.fingerprint:
        raise DatasetError(
            f"it was changed by hand: its fingerprint is {manifest.fingerprint[:12]}..., its parameters and "
            f"inputs give {fingerprint[:12]}..."
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


def _entries(cls: type[_Entry], stored: Any, name: str) -> Iterator[_Entry]:
    """Create the entries of a list, or raise an error that names the first wrong one."""
    for index, item in enumerate(convert(stored, list, name, error=DatasetError)):
        entry = convert(_known(cls, item), cls, f"{name}[{index}]", error=DatasetError)
        for key, value in item.items():
            if (key in _NUMBERS and not 0 <= value < _MAX_SIZE) or (
                key in _DIGESTS and not re.fullmatch("[0-9a-f]{64}", value)
            ):
                raise DatasetError(f"{name}[{index}].{key} is {value!r}")
        yield entry


def _check_paths(manifest: Manifest) -> None:
    """Check that every file has the expected name, inside the folder."""
    if not manifest.shards:
        raise DatasetError("it lists no shards")
    if "" in manifest.shards.column("footer_sha256"):
        raise DatasetError("a shard is listed without the footer_sha256 of its footer")
    count = len(manifest.shards)
    names = [shard_name(number, count) for number in range(count)]
    for number, (path, name) in enumerate(zip(manifest.shards.column("path"), names, strict=True)):
        if path != name:
            raise DatasetError(f"shard {number} is called {path!r:.300}, expected {name!r}")
    has_others = bool(manifest.failures or manifest.files)
    belonging = {failures_name(name) for name in names} if has_others else set()
    failures = manifest.failures.column("path")
    stray = next((path for path in failures if path not in belonging), None)
    if stray is not None or failures != sorted(set(failures)):
        raise DatasetError(
            f"failures {stray!r:.300} belong to no shard" if stray else "a file of failures is listed twice, or out of order"
        )
    files = [entry.path for entry in manifest.files]
    taken = {*names, *belonging, MANIFEST_NAME} if files else set()
    for path in files:
        parts = path.split("/")
        if not path.isprintable() or not {"", ".", ".."}.isdisjoint(parts) or path in taken:
            raise DatasetError(f"{path!r} is not a valid name of a file beside the shards")
    if len(set(files)) != len(files):
        raise DatasetError("a file is listed twice")


def diagnose(folder: Folder) -> str:
    """Return the message about a folder without a manifest.

    Raises:
        DatasetError: the folder cannot be listed.
    """
    start = f"{folder.location!r} is not a dataset"
    kind = folder.kind()
    if kind == "file":
        return f"{start} but a file: give the folder of a dataset, as imagepivot captions, features or import writes it"
    if kind == "nothing":
        return f"{start}: the folder does not exist. Check the path"
    children = folder.children()
    files = {name for name in children if not name.endswith("/")}
    if "config.toml" in files and not files.isdisjoint(RUN_FILES):
        return (
            f"{start} but a run of imagepivot train, which imagepivot evaluate, embed and search take: give "
            "the folder of one of the datasets that it was trained on"
        )
    datasets = [name[:-1] for name in children if name.endswith("/") and MANIFEST_NAME in folder.children(name[:-1])]
    if datasets:
        named = ", ".join(repr(folder.path_of(name)) for name in datasets[:_MAX_NAMED])
        more = f" or another of its {len(datasets)}" if len(datasets) > _MAX_NAMED else ""
        return f"{start} but a folder of datasets: give {'one of ' if len(datasets) > 1 else ''}{named}{more}"
    if any(name.startswith("part-") for name in files):
        if _NAME_IN_VERSION_1 in files:
            return f"{folder.location!r} {other_version(1)}"
        return (
            f"{start}: it holds no {MANIFEST_NAME}, which is written last, but shards. Run the command that "
            "writes it again to finish it, or copy the whole folder again"
        )
    return (
        f"{start}: it holds no {MANIFEST_NAME}. Either the path is wrong or the run that writes it has not "
        "ended; run its command again to finish it"
    )
