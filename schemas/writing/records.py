"""What is on record about a shard, in a small file beside it: the digest of its bytes, and what it was made from.

With it a run tells a damaged shard before the manifest is written, and which inputs have changed since. It is not part of the
dataset: the manifest does not list it, since the modification times of images are those of one machine. It names the shard that
it describes, so that it is never believed about another one; where it is missing, a run knows only what manifest and footer say.

A shard is published before its record, and the record of the shard that it replaces is deleted before it: a record that names what
the footer of its shard says may stand for the footer, where reading one costs several requests.

The file holds one JSON value per line: the record, then an array per image.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from schemas.conversion import stored_values
from schemas.errors import DatasetError
from schemas.fingerprints import canonical_json, sha256_of_bytes, sha256_of_json
from schemas.footers import Footer
from schemas.manifest import ShardEntry
from schemas.storage.folder import Entry, Folder

_FORMAT = "shard record 1"
_FIRST_BYTES = 1 << 16


class Source(NamedTuple):
    """What one row or failure of a shard was made from.

    Attributes:
        uri: address of the image as the source names it.
        bytes: size in bytes; -1 if listing did not tell.
        version: modification time, ETag or the like; empty if listing did not tell.
        sha256: SHA-256 of the image's bytes, hexadecimal; empty if they could not be read.
    """

    image_id: str
    uri: str
    bytes: int
    version: str
    sha256: str


@dataclass(frozen=True)
class Record:
    """The digest of a shard, and what the shard was made from.

    Attributes:
        statistics_sha256: digest of the statistics in its footer, which is read faster than the whole shard.
        state: digest of the images' ids, addresses, sizes and versions, as the producer defines it; empty for a kind whose inputs
            are part of its fingerprint.
        sources_sha256: SHA-256 of all other lines.
        shard: the manifest's entry for the shard, without parameters what its footer says, or nothing; see `as_footer`.
        tags: by name the tags of the shard and its failures, where a store gives them; see `matches_tags`.
        sources: one for each row and failure, in any order; None where only the first line was read.
    """

    bytes: int
    sha256: str
    statistics_sha256: str
    state: str = ""
    sources_sha256: str = ""
    shard: Mapping[str, Any] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    sources: Sequence[Source] | None = None

    @classmethod
    def of(cls, entry: ShardEntry, footer: Footer, state: str = "", sources: Sequence[Source] = ()) -> Record:
        """Make the record of a shard from the manifest's entry for it, its footer, and what it was made from."""
        shard = {
            "path": entry.path,
            "rows": entry.rows,
            "footer_sha256": entry.footer_sha256,
            "kind": footer.kind,
            "fingerprint": footer.fingerprint,
            "version": footer.version,
            "statistics": footer.statistics,
            "failures": asdict(footer.failures),
        }
        statistics = sha256_of_json(footer.statistics)
        return cls(entry.bytes, entry.sha256, statistics, state, shard=shard, sources=sources)

    def to_json_lines(self) -> str:
        """Return the content of the file: the record, then the sources sorted by image id."""
        lines = "".join(f"{canonical_json(list(source))}\n" for source in sorted(self.sources or ()))
        content = {"format": _FORMAT, **vars(self), "sources_sha256": sha256_of_bytes(lines.encode())}
        del content["sources"]
        if not self.tags:
            del content["tags"]
        first = canonical_json({**content, "record_sha256": sha256_of_json(content)})
        return f"{first}\n{lines}"

    def as_footer(self, shard: str, size: int | None) -> tuple[ShardEntry, Footer] | None:
        """Return what the shard of this name and size is and says, all but its parameters; None where the record does not tell."""
        if self.shard.get("path") != shard or size != self.bytes:
            return None
        try:
            said = dict(self.shard)
            entry = ShardEntry(said.pop("path"), self.bytes, self.sha256, said["rows"], said.pop("footer_sha256"))
            return entry, Footer(**stored_values(Footer, {**said, "parameters": {}, "failures": said["failures"]}))
        except (KeyError, TypeError, ValueError, DatasetError):
            return None

    def matches_tags(self, stored: Mapping[str, Entry]) -> bool:
        """Whether no tag in a listing says that a file beside this record is another one than that for which it was written."""
        return all(name not in stored or stored[name].tag in ("", tag) for name, tag in self.tags.items())

    def matches_shard(self, size: int | None, statistics: Mapping[str, Any]) -> bool:
        """Whether the shard of this size and with these statistics in its footer is the one that is meant."""
        return size == self.bytes and sha256_of_json(statistics) == self.statistics_sha256


def record_name(shard: str) -> str:
    """Return the path of the record of a shard."""
    return f".records/{PurePosixPath(shard).with_suffix('.jsonl')}"


def write_record(folder: Folder, shard: str, record: Record) -> None:
    """Write the record of a shard."""
    folder.write(record_name(shard), record.to_json_lines().encode())


def read_record(folder: Folder, shard: str, *, whole: bool = False) -> Record | None:
    """Return the record of a shard, with its sources if it is to be read whole, else some 64 KiB; None without a valid one."""
    try:
        if whole:
            first, _, lines = folder.read(record_name(shard)).partition(b"\n")
        else:
            with (folder.stream if folder.is_google else folder.open)(record_name(shard)) as file:
                first, end, lines = _first_line(file).partition(b"\n")
            first = first if end else b""
    except FileNotFoundError:
        return None
    record = _parse(first)
    if record is None or not whole:
        return record
    if sha256_of_bytes(lines) != record.sources_sha256:
        return None
    return replace(record, sources=[Source(*json.loads(line)) for line in lines.decode().split("\n")[:-1]])


def _first_line(file: Any) -> bytes:
    """Return the start of a file at least up to the first line end; one read takes one request."""
    start = b""
    while b"\n" not in start and (more := file.read(_FIRST_BYTES)):
        start += more
    return start


def _parse(line: bytes) -> Record | None:
    try:
        content = json.loads(line)
        digest = content.pop("record_sha256")
        if sha256_of_json(content) != digest or content.pop("format") != _FORMAT:
            return None
        return Record(**content, sources=None)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):  # A UnicodeDecodeError is a ValueError.
        return None
