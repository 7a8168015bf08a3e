"""Record of a shard beside it: the digest of its bytes, the sources of its rows.

A run uses records to detect damaged shards before the manifest exists, and changed inputs. Records are not part of the dataset and
not in the manifest, since modification times belong to one machine. Without a record, a run knows only the manifest and the
footer. In stores the record replaces the footer, which takes several requests to read; see `Record.as_footer`.

The old record is deleted before a shard is published, and the new one written after it, so a record never describes another shard.

The file has one JSON value per line: the record, then an array per image.

    {"bytes":1311,"format":"shard record 1","sha256":"...","shard":{"path":"part-00000-of-00002.parquet",...},"state":"...",...}
    ["0001","images/0001.jpg",31021,"1700000000000000000","<SHA-256 of the image>"]
    ["0002","images/0002.jpg",28733,"1700000000000000000","<SHA-256 of the image>"]
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple, Self

from schemas.conversion import stored_values
from schemas.errors import DatasetError
from schemas.fingerprints import canonical_json, sha256_of_bytes, sha256_of_json
from schemas.footers import Footer
from schemas.manifest import ShardEntry
from schemas.sample_outputs import SampleOutputs
from schemas.storage.folder import FileInfo, Folder

_FORMAT = "shard record 1"
_FIRST_BYTES = 1 << 16
_SOURCE_TYPES = [str, str, int, str, str]


class Source(NamedTuple):
    """Source image of one row or failure.

    Attributes:
        uri: address of the image, relative to the source if possible.
        bytes: size in bytes; -1 if unknown.
        version: modification time, ETag or similar; empty if unknown.
        sha256: SHA-256 of the image's bytes, hexadecimal; empty if unreadable.
    """

    image_id: str
    uri: str
    bytes: int
    version: str
    sha256: str


@dataclass(frozen=True)
class Record:
    """Digest of a shard, and its sources.

    Attributes:
        statistics_sha256: digest of the statistics in the shard's footer.
        version_digest: digest of ids, addresses, sizes and versions of the images, as the producer defines
            it; empty if the inputs are part of the fingerprint.
        sources_sha256: SHA-256 of the lines of the sources.
        shard: entry of the manifest and content of the footer without parameters. See `as_footer`.
        sample_outputs: sample outputs of the model that computed the rows; empty if unknown.
        tags: tags of the shard and its failures by name, in a store; see `matches_tags`.
        sources: source of each row and failure, in any order; None if not read.
    """

    bytes: int
    sha256: str
    statistics_sha256: str
    version_digest: str = ""
    sources_sha256: str = ""
    shard: Mapping[str, Any] = field(default_factory=dict)
    sample_outputs: SampleOutputs = ()
    tags: Mapping[str, str] = field(default_factory=dict)
    sources: Sequence[Source] | None = None

    @classmethod
    def of(
        cls,
        entry: ShardEntry,
        footer: Footer,
        version_digest: str = "",
        sources: Sequence[Source] = (),
        sample_outputs: SampleOutputs = (),
    ) -> Self:
        """Create the record of a shard."""
        shard = vars(footer) | {"path": entry.path, "rows": entry.rows, "footer_sha256": entry.footer_sha256}
        shard["failures"] = asdict(footer.failures)
        del shard["parameters"]
        statistics = sha256_of_json(footer.statistics)
        return cls(
            entry.bytes,
            entry.sha256,
            statistics,
            version_digest,
            shard=shard,
            sample_outputs=sample_outputs,
            sources=sources,
        )

    def to_json_lines(self) -> str:
        """Return the content of the file, with sources sorted by image id."""
        lines = "".join(f"{canonical_json(list(source))}\n" for source in sorted(self.sources or ()))
        content = {"format": _FORMAT, **vars(self), "sources_sha256": sha256_of_bytes(lines.encode())}
        del content["sources"]
        content["state"] = content.pop("version_digest")  # The key of version 1.
        for name in ("tags", "sample_outputs"):
            if not content[name]:
                del content[name]
        first = canonical_json({**content, "record_sha256": sha256_of_json(content)})
        return f"{first}\n{lines}"

    def as_footer(self, shard: str, size: int | None) -> tuple[ShardEntry, Footer] | None:
        """Return manifest entry and footer, without parameters; None if unknown."""
        if self.shard.get("path") != shard or size != self.bytes:
            return None
        try:
            content = dict(self.shard)
            entry = ShardEntry(content.pop("path"), self.bytes, self.sha256, content["rows"], content.pop("footer_sha256"))
            return entry, Footer(**stored_values(Footer, {**content, "parameters": {}, "failures": content["failures"]}))
        except (KeyError, TypeError, ValueError, DatasetError):
            return None

    def matches_tags(self, stored: Mapping[str, FileInfo]) -> bool:
        """Return whether shard and failures have the recorded tags or none in a listing."""
        return all(name not in stored or stored[name].tag in ("", tag) for name, tag in self.tags.items())

    def matches_shard(self, size: int | None, statistics: Mapping[str, Any]) -> bool:
        """Return whether size and statistics are those of the recorded shard."""
        return size == self.bytes and sha256_of_json(statistics) == self.statistics_sha256


def record_name(shard: str) -> str:
    """Return the path of a shard's record."""
    return f".records/{shard.removesuffix('.parquet')}.jsonl"


def write_record(folder: Folder, shard: str, record: Record) -> None:
    """Write the record of a shard."""
    folder.put(record_name(shard), record.to_json_lines().encode())


def _first_line(folder: Folder, name: str) -> bytes:
    """Return the first line of a file; empty without a line end."""
    line = b""
    while len(part := folder.read(name, len(line), _FIRST_BYTES)) and b"\n" not in part:
        line += part
    first, end, _ = (line + part).partition(b"\n")
    return first if end else b""


def read_record(folder: Folder, shard: str, *, whole: bool = False) -> Record | None:
    """Read a shard's record, with its sources if ``whole``; None if invalid."""
    try:
        if whole:
            first, _, lines = folder.read(record_name(shard)).partition(b"\n")
        else:
            first = _first_line(folder, record_name(shard))
    except FileNotFoundError:
        return None
    try:
        content = json.loads(first)
        digest = content.pop("record_sha256")
        if sha256_of_json(content) != digest or content.pop("format") != _FORMAT:
            return None
        content["version_digest"] = content.pop("state")
        record = Record(**{**content, "sample_outputs": tuple(content.get("sample_outputs", ()))}, sources=None)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):  # A UnicodeDecodeError is a ValueError.
        return None
    if not whole:
        return record
    if sha256_of_bytes(lines) != record.sources_sha256:
        return None
    try:
        sources = [Source(*json.loads(line)) for line in lines.decode().split("\n")[:-1]]
    except (ValueError, TypeError, RecursionError):
        return None
    has_types = all(list(map(type, source)) == _SOURCE_TYPES for source in sources)
    return replace(record, sources=sources) if has_types else None
