"""State of the shards in a dataset's folder, before and after a run.

| status | meaning |
| --- | --- |
| missing | no shard |
| claimed | a shard without a digest in manifest or record: its attempt was stopped, or still runs |
| damaged | size, digest, tag, failures or footer disagree with the manifest or the record |
| other | a shard with another fingerprint, or of a newer version of the format |
| foreign | a Parquet file of another tool |
| stale | intact, written from other inputs |
| current | intact, written from the present inputs |

A run writes all shards except current ones. It refuses other and foreign shards, and stale ones unless it
updates. A commit lists current shards and refuses all others. A repair deletes damaged shards.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import islice
from typing import Any

from schemas.console import events
from schemas.conversion import shorten
from schemas.errors import DatasetError, OtherDatasetError
from schemas.failures import failures_name
from schemas.fingerprints import FORMAT_VERSION, canonical_json, sha256_of_bytes, sha256_of_file
from schemas.footers import FOREIGN, Footer, inspect_shard, shard_entry
from schemas.manifest import MANIFEST_NAME, FileEntry, Manifest, ShardEntry, other_version
from schemas.sample_outputs import SampleOutputs, are_equal
from schemas.storage.folder import FileInfo, Folder
from schemas.writing.file_names import is_control_file, is_like_shard, is_of_shard, is_temporary, left_alone
from schemas.writing.locks import publishing
from schemas.writing.output import OutputDataset
from schemas.writing.records import Record, read_record, record_name
from schemas.writing.reuse_policy import ReusePolicy

_BATCH_SHARDS = 1024


class Status(StrEnum):
    """Status of a shard; see the table of this module."""

    MISSING = "missing"
    CLAIMED = "claimed"
    DAMAGED = "damaged"
    OTHER = "other"
    FOREIGN = "foreign"
    STALE = "stale"
    CURRENT = "current"


@dataclass(frozen=True)
class ShardState:
    """Status of a shard with its metadata.

    Attributes:
        problem: fault of its bytes, a sentence; empty without a fault.
        failures_problem: fault of its file of failures, a sentence; empty without a fault.
        entry: the manifest's entry for the shard; None if only reading all bytes would tell.
        footer: its footer; None for a foreign or unreadable file.
        record: the record that describes it, if it has one.
    """

    name: str
    status: Status
    problem: str = ""
    failures_problem: str = ""
    entry: ShardEntry | None = None
    footer: Footer | None = None
    record: Record | None = None

    @property
    def is_intact(self) -> bool:
        """Whether the shard belongs to the dataset, without known damage."""
        return self.status in (Status.STALE, Status.CURRENT)

    @property
    def failures(self) -> ShardEntry | None:
        """The manifest's entry for the shard's failures; None without failures."""
        if self.footer is None or not self.footer.failures.rows:
            return None
        stated = self.footer.failures
        return ShardEntry(failures_name(self.name), stated.bytes, stated.sha256, stated.rows)


def read_state(output: OutputDataset, shard: int, manifest: Manifest | None = None, *, read_all: bool = False) -> ShardState:
    """Return the state of a shard without listing the folder or comparing its inputs."""
    folder, name = output.folder, output.name(shard)
    found = map(folder.stat, (name, failures_name(name), record_name(name)))
    entries = {entry.name: entry._replace(tag="") for entry in found if entry is not None}
    return state_of(folder, name, entries, manifest, fingerprint=output.fingerprint, read_all=read_all)


def state_of(
    folder: Folder,
    shard: str,
    entries: Mapping[str, FileInfo],
    manifest: Manifest | None = None,
    *,
    fingerprint: str | None = None,
    listing: str | None = None,
    version_digest: str | None = None,
    read_all: bool = False,
) -> ShardState:
    """Determine the state of a shard.

    The shard is compared with the manifest, or without one with its record. Sizes are always compared; digests with ``read_all``,
    or if the record describes another file (the folder was copied, or one attempt overtook another).

    Args:
        folder: the dataset's folder.
        shard: file name of the shard.
        entries: listing of the folder, or of the shard, its failures and its record; missing tags are not compared.
        manifest: the manifest of the dataset, if it exists.
        fingerprint: fingerprint of the dataset; None for that of the manifest, else that in the record, or any.
        listing: digest of the shard's inputs; None to skip the comparison.
        version_digest: digest of sizes and versions of the inputs in their listing; None to skip the comparison.
        read_all: compare all digests.

    Raises:
        DatasetError: the store does not respond.
    """
    listed = None if manifest is None else manifest.shard_entries.get(shard)
    if shard not in entries or entries[shard].size < 0:  # -1: a dangling link.
        return ShardState(shard, Status.MISSING, f"{shard} is missing", entry=listed)
    fingerprint = manifest.fingerprint if fingerprint is None and manifest is not None else fingerprint
    record = read_record(folder, shard, whole=read_all) if record_name(shard) in entries else None
    footer = _read_footer(folder, shard, entries, None if read_all else record, fingerprint)
    fingerprint = fingerprint or (None if record is None else record.shard.get("fingerprint"))
    reference = "its record" if manifest is None else "the manifest"
    expected, record, digest = _expected_entry(shard, entries, listed, record, footer, read_all)
    problem, entry = _compare_shard(folder, shard, entries, expected, record, footer, reference, digest=digest)
    status, failures_problem = _classify(footer, record, fingerprint, listing, version_digest), ""
    if status in (Status.FOREIGN, Status.OTHER):
        return ShardState(shard, status, problem, entry=listed, footer=None if footer is FOREIGN else footer)
    if footer is not None:
        failures_problem = _compare_failures(folder, shard, entries, footer, manifest, reference, digest)
    if failures_problem or (problem and expected is not None):
        status = Status.DAMAGED
    elif problem and footer is not None:
        status = Status.CLAIMED
    entry = entry if status in (Status.STALE, Status.CURRENT) else listed
    return ShardState(shard, status, problem, failures_problem, entry, footer, record)


def _expected_entry(
    shard: str,
    entries: Mapping[str, FileInfo],
    listed: ShardEntry | None,
    record: Record | None,
    footer: Footer | None,
    read_all: bool,
) -> tuple[ShardEntry | Record | None, Record | None, bool]:
    """Return the expected entry, the record, and whether to compare digests.

    The entry is the manifest's or else the record; the record is None if it does not match the shard and the entry.
    """
    if record is None:
        return listed, None, read_all
    expected = record if listed is None else listed
    is_described = record.matches_shard(entries[shard].size, {} if footer is None else footer.statistics)
    if not is_described or record.sha256 != expected.sha256:
        return expected, None, True
    return expected, record, read_all or not record.matches_tags(entries)


def _compare_shard(
    folder: Folder,
    shard: str,
    entries: Mapping[str, FileInfo],
    expected: ShardEntry | Record | None,
    record: Record | None,
    footer: Footer | None,
    reference: str,
    *,
    digest: bool,
) -> tuple[str, ShardEntry | None]:
    """Return the fault of a shard's bytes, and its entry for the manifest.

    The entry is None for a fault, or if only reading all bytes would tell.
    """
    size = entries[shard].size
    if expected is None:
        return f"{shard} has no digest on record", None
    if expected.bytes != size:
        return f"{shard} has {size:,} bytes, {reference} says {expected.bytes:,}", None
    if expected is not record and isinstance(expected, Record):
        return f"{shard} is not what its record describes", None
    listed = expected if isinstance(expected, ShardEntry) else None
    if digest:
        with folder.open(shard) as file:
            stored = shard_entry(file, shard, 0 if footer is None else footer.rows)
        return _compare_digests(stored, expected, reference), listed or stored
    if isinstance(expected, Record):
        return "", (expected.as_footer(shard, size) or (None,))[0]
    return "", expected


def _classify(
    footer: Footer | None, record: Record | None, fingerprint: str | None, listing: str | None, version_digest: str | None
) -> Status:
    """Return the status of a shard whose bytes have no fault."""
    if footer is None:
        return Status.DAMAGED
    if footer is FOREIGN:
        return Status.FOREIGN
    if footer.version != FORMAT_VERSION or fingerprint not in (None, footer.fingerprint):
        return Status.OTHER
    is_changed = listing not in (None, footer.statistics.get("listing"))
    is_moved = version_digest is not None and record is not None and record.version_digest not in ("", version_digest)
    return Status.STALE if is_changed or is_moved else Status.CURRENT


def _read_footer(
    folder: Folder, shard: str, entries: Mapping[str, FileInfo], record: Record | None, fingerprint: str | None
) -> Footer | None:
    """Read a footer; in a store take it from the record, without parameters."""
    if record is not None and not folder.is_local and record.matches_tags(entries):
        recorded = record.as_footer(shard, entries[shard].size)
        if recorded is not None and recorded[1].fingerprint == fingerprint:
            return recorded[1]
    return inspect_shard(folder, shard)


def _compare_failures(
    folder: Folder,
    shard: str,
    entries: Mapping[str, FileInfo],
    footer: Footer,
    manifest: Manifest | None,
    reference: str,
    digest: bool,
) -> str:
    """Return the fault of a shard's failures; leftovers are not a fault."""
    name, stated = failures_name(shard), footer.failures
    expected = FileEntry(name, stated.bytes, stated.sha256) if stated.rows else None
    if manifest is not None:
        listed = manifest.shard_entries.get(name)
        rows, entry = (0, None) if listed is None else (listed.rows, FileEntry(name, listed.bytes, listed.sha256))
        if (stated.rows, expected) != (rows, entry):
            return f"{shard} was made with {stated.rows:,} failures, the manifest lists {rows:,}, or others"
    return "" if expected is None else file_problem(folder, entries, expected, reference, digest=digest)


def file_problem(folder: Folder, entries: Mapping[str, FileInfo], expected: FileEntry, reference: str, *, digest: bool) -> str:
    """Return the fault of a file: missing, another size or digest; empty without any."""
    name = expected.path
    if name not in entries or entries[name].size < 0:
        return f"{name} is missing"
    if entries[name].size != expected.bytes:
        return f"{name} has {entries[name].size:,} bytes, {reference} says {expected.bytes:,}"
    if not digest:
        return ""
    with folder.open(name) as file:
        return _compare_digests(FileEntry(name, entries[name].size, sha256_of_file(file)), expected, reference)


def _compare_digests(stored: FileEntry, expected: FileEntry | Record, reference: str) -> str:
    if stored.sha256 != expected.sha256:
        return (
            f"{stored.path} has SHA-256 {stored.sha256[:12]}..., {reference} says {expected.sha256[:12]}...: its bytes changed"
        )
    footer = expected.footer_sha256 if isinstance(expected, ShardEntry) else ""
    if footer and isinstance(stored, ShardEntry) and stored.footer_sha256 != footer:
        return f"{stored.path} has another footer than {reference} says"
    return ""


class OutputState:
    """State of an output's folder.

    The folder is listed once at the start; manifest and shards are read once, on demand.

    Attributes:
        selected: indices of the shards that the run writes, all by default.
    """

    def __init__(
        self, output: OutputDataset, policy: ReusePolicy = ReusePolicy(), selected: Iterable[int] | None = None
    ) -> None:
        self.output = output
        self.entries = {entry.name: entry for entry in output.folder.list()}
        self.selected = range(output.shards) if selected is None else tuple(selected)
        self._policy = policy
        self._is_task = selected is not None
        self._states: dict[int, ShardState] = {}

    def shards(self, selected: Iterable[int] | None = None) -> dict[int, ShardState]:
        """Return the states of shards by index, by default of those that the run writes."""
        wanted = list(self.selected if selected is None else selected)
        new = [shard for shard in wanted if shard not in self._states]
        self._states.update(zip(new, self.output.folder.map(self.read, new), strict=True))
        return {shard: self._states[shard] for shard in wanted}

    def read_each(self) -> Iterator[ShardState]:
        """Read the states of all shards in order, without keeping them.

        A shard that must be read whole for its entry is.
        """
        size = 1 if self.output.folder.is_local else _BATCH_SHARDS  # In a store, reads wait for the network.
        for start in range(0, self.output.shards, size):
            yield from self.output.folder.map(self._read_entry, range(start, min(start + size, self.output.shards)))

    def _read_entry(self, shard: int) -> ShardState:
        state = self.read(shard)
        return state if state.entry is not None or not state.is_intact else self.read(shard, read_all=True)

    def read(self, shard: int, *, read_all: bool = False) -> ShardState:
        """Read the state of a shard; ``read_all`` compares all digests."""
        output = self.output
        return state_of(
            output.folder,
            output.name(shard),
            self.entries,
            self._own_manifest,
            fingerprint=output.fingerprint,
            listing=None if output.listings is None else output.listings[shard],
            version_digest=None if output.version_digests is None else output.version_digests[shard],
            read_all=read_all or (self._policy.verify and shard in self.selected),
        )

    def intact_shards(self) -> frozenset[int]:
        """Return the indices of intact shards, current or stale."""
        shards = {} if self._policy.overwrite else self.shards()
        return frozenset(index for index, shard in shards.items() if shard.is_intact)

    def finished_shards(self) -> frozenset[int]:
        """Return the indices of the shards that the run skips."""
        shards = {} if self._policy.overwrite else self.shards()
        return frozenset(index for index, shard in shards.items() if self._is_finished(shard))

    def _is_finished(self, shard: ShardState) -> bool:
        policy, footer = self._policy, shard.footer
        if shard.status is not Status.CURRENT or footer is None or (policy.retry_failed and footer.failures.rows):
            return False
        if not policy.update or policy.only_add:
            return True
        # Without digests of versions or a record nothing can be compared. An unreadable file may have become
        # readable without a new time.
        is_unrecorded = self.output.listings is not None and (
            self.output.version_digests is None or shard.record is None or not shard.record.version_digest
        )
        return not (policy.check_content or is_unrecorded or "unreadable" in footer.failures.reasons)

    def is_committed(self) -> bool:
        """Return whether an earlier run committed this dataset with equal other files."""
        manifest = self._own_manifest
        if manifest is None or self._policy.overwrite:
            return False
        folder, verify = self.output.folder, self._policy.verify
        if any(file_problem(folder, self.entries, entry, "the manifest", digest=verify) for entry in manifest.files):
            return False
        digests = {entry.path: entry.sha256 for entry in manifest.files}
        return all(digests.get(name) == sha256_of_bytes(data) for name, data in self.output.files.items())

    def committed_manifest(self) -> Manifest | None:
        """Return the manifest if the run has nothing to do, else None."""
        if not self.is_committed() or len(self.finished_shards()) < len(self.selected):
            return None
        return None if any(self._has_leftovers(shard) for shard in self.shards().values()) else self._own_manifest

    def _has_leftovers(self, shard: ShardState) -> bool:
        has_stray_failures = shard.failures is None and failures_name(shard.name) in self.entries
        return has_stray_failures or (self._policy.verify and shard.record is None and record_name(shard.name) in self.entries)

    def check_compatible(self, written: str = "nothing was written") -> None:
        """Check that the run would not replace data that must not be lost.

        Messages contain ``written``, which states what the command has written.

        Raises:
            DatasetError: the folder has foreign files and no dataset; foreign files named like shards; a
                dataset with another fingerprint; or stale shards, and the policy does not update.
        """
        folder = self.output.folder
        foreign = self._foreign()
        others = sorted(name for name in foreign if not is_like_shard(name))
        if MANIFEST_NAME not in self.entries and all(footer in (None, FOREIGN) for footer in self._footers.values()):
            others = []  # Not the folder of a dataset.
        if refused := sorted(foreign - set(others)):
            raise DatasetError(
                f"{folder.location!r} holds files that do not belong to a dataset, e.g. {refused[0]!r}: "
                f"{written}. Choose a new or empty folder"
            )
        if others and not self._is_task:
            events.remark(left_alone(folder.location, others))
        if self._policy.overwrite:
            return
        for stored in (self._manifest, *self._footers.values()):
            if stored is not None:
                self._check_same_dataset(stored, written)
        if not self._policy.update:
            self._check_not_stale(written)

    def check_model(self) -> None:
        """Check that the model still computes the values of the rows that stay.

        Raises:
            DatasetError: it does not, or nothing tells and the policy does not accept that.
        """
        output = self.output
        if output.sample_outputs is None or self._policy.overwrite:
            return
        kept = [shard for shard in self.shards().values() if shard.is_intact]
        if self._is_task:
            others = (
                index for index in range(output.shards) if index not in self.selected and output.name(index) in self.entries
            )
            states = (shard for index in others for shard in self.shards([index]).values())
            kept += islice((shard for shard in states if shard.is_intact), 1)
        if not kept:
            return
        stored = {shard.name: self._sample_outputs(shard) for shard in kept}
        unknown = [name for name, outputs in stored.items() if not outputs]
        location = output.folder.location
        if unknown and not self._policy.accept_unknown:
            raise DatasetError(
                f"{location!r} does not say which values its model computed for a fixed input, e.g. {unknown[0]}: it is of an "
                "earlier imagepivot, and rows of two versions of a model's code could mix; nothing was written. Give --overwrite "
                "to write it again, or --accept-unknown to keep its rows"
            )
        now = output.sample_outputs()
        if other := [name for name, outputs in stored.items() if not are_equal(outputs, now, output.parameters)]:
            versions = f"the version that wrote {other[0]}"
            if self._own_manifest is not None:
                versions = ", ".join(f"{name} {version}" for name, version in self._own_manifest.libraries.items())
            raise DatasetError(
                f"{location!r} was computed by another version of the model's code ({versions}): for a fixed "
                f"input {other[0]} has other values than this version computes, beyond rounding; nothing was written. Install that "
                "version, give --overwrite to write all rows again, or choose another folder"
            )

    def _sample_outputs(self, shard: ShardState) -> SampleOutputs:
        """Return the sample outputs of a shard, from its record or else the manifest."""
        if shard.record is not None and shard.record.sample_outputs:
            return shard.record.sample_outputs
        return () if self._own_manifest is None else self._own_manifest.sample_outputs

    def clear(self) -> None:
        """Delete manifest, outdated shards and leftovers, and write the output's files.

        The folder is then not a dataset until the run commits.
        """
        folder = self.output.folder
        retained: set[str] = set()
        for index in self.intact_shards():
            shard = self._states[index]
            retained |= {shard.name, record_name(shard.name), *([shard.failures.path] if shard.failures is not None else [])}
        old = self._listed_files() - self.output.files.keys()
        self.uncommit()
        obsolete = [
            name
            for name in self.entries
            if (is_of_shard(name) and name not in retained)
            or is_temporary(name)
            or (name in old and not self.output.is_other_file(name))
        ]
        folder.map(folder.delete, obsolete)
        for name, data in self.output.files.items():
            folder.put(name, data)

    def uncommit(self) -> None:
        """Delete the manifest, so that the folder is not a dataset until the next commit.

        Digests that only the manifest has are written to records first, unless an attempt has replaced the shard.
        """
        folder = self.output.folder
        with publishing(folder):
            if self._own_manifest is not None and not self._policy.overwrite:
                for index, shard in self.shards(range(self.output.shards)).items():
                    if shard.is_intact and shard.record is None:
                        self._record_digest(index)
            if MANIFEST_NAME in self.entries:
                folder.delete(MANIFEST_NAME)

    def _record_digest(self, index: int) -> None:
        folder = self.output.folder
        shard = read_state(self.output, index, self._own_manifest) if folder.is_local else self._states[index]
        if not shard.is_intact or shard.record is not None or shard.entry is None or shard.footer is None:
            return
        record = Record.of(shard.entry, shard.footer, sample_outputs=self._sample_outputs(shard))
        beside = record_name(self.output.name(index))
        old = self.entries[beside].tag if beside in self.entries else None
        folder.put(beside, record.to_json_lines().encode(), if_match=old)

    @cached_property
    def _manifest(self) -> Manifest | DatasetError | None:
        """The manifest in the folder, or the error of reading it; None without a manifest."""
        if MANIFEST_NAME not in self.entries:
            return None
        try:
            return Manifest.read(self.output.folder)
        except DatasetError as error:
            if self.output.folder.stat(MANIFEST_NAME) is None:
                return None  # Another array task has deleted it since the folder was listed.
            return error

    @cached_property
    def _own_manifest(self) -> Manifest | None:
        """The manifest in the folder if it has the output's fingerprint, else None."""
        manifest = self._manifest
        return manifest if isinstance(manifest, Manifest) and manifest.fingerprint == self.output.fingerprint else None

    @cached_property
    def _footers(self) -> dict[str, Footer | None]:
        """Footers of files named like shards, by sorted name.

        An array task reads those of its own shards and one of other tasks.
        """
        folder, own = self.output.folder, {shard.name: shard for shard in self.shards().values()}
        others = [name for name in self.entries if name.startswith("part-") and name not in own]
        if self._is_task:
            ours = {self.output.name(index) for index in range(self.output.shards)}
            others = [name for name in others if name not in ours] + sorted(ours.intersection(others))[:1]
        footers = dict(zip(others, folder.map(lambda name: inspect_shard(folder, name), others), strict=True))
        for name in own.keys() & self.entries.keys():
            footers[name] = FOREIGN if own[name].status is Status.FOREIGN else own[name].footer
        return dict(sorted(footers.items()))

    def _foreign(self) -> set[str]:
        """Return the names of files of other tools."""
        listed = self._listed_files()
        shards = {name for name, footer in self._footers.items() if footer is FOREIGN and is_of_shard(name)}
        unlike = (name for name in self.entries if not is_of_shard(name) and name not in listed)
        return shards | {name for name in unlike if not (is_control_file(name) or self.output.is_other_file(name))}

    def _listed_files(self) -> set[str]:
        """Return the files beside shards that the folder's manifest lists."""
        return {entry.path for entry in self._manifest.files} if isinstance(self._manifest, Manifest) else set()

    def _check_same_dataset(self, stored: Manifest | Footer | DatasetError, written: str) -> None:
        output, location = self.output, self.output.folder.location
        if isinstance(stored, DatasetError):
            raise DatasetError(f"{stored}; or give --overwrite to replace the dataset. {written.capitalize()}")
        if stored.fingerprint != output.fingerprint:
            raise OtherDatasetError(
                f"{location!r} holds another dataset ({difference(stored, output)}): {written}. Choose "
                "another folder, or give --overwrite to replace it"
            )
        if stored.version != FORMAT_VERSION:
            raise DatasetError(f"{location!r} {other_version(stored.version)}. {written.capitalize()}")

    def _check_not_stale(self, written: str) -> None:
        changed = sum(shard.status is Status.STALE for shard in self.shards().values())
        count = f"{changed} of {self.output.shards} shards"
        if changed and self.output.sources:
            sources = " and ".join(map(repr, self.output.sources))
            raise DatasetError(
                f"{self.output.folder.location!r} was made from other content than {sources} now: {count} "
                "differ (Manifest.content_sha256), or are of an earlier version that did not record it; "
                f"{written}. Give --overwrite to write it again, or choose another folder"
            )
        if changed:
            raise DatasetError(
                f"{self.output.folder.location!r} was made from other images: in {count} images are new, "
                f"gone, or differ in size or modification time; {written}. Give --update to bring it up to "
                "date, --overwrite to replace it, or choose another folder"
            )


def difference(stored: Manifest | Footer, output: OutputDataset) -> str:
    """Describe the difference between a stored dataset and an output in a few words."""
    if stored.kind != output.kind:
        return f"kind {stored.kind!r} instead of {output.kind!r}"
    parts = [
        f"{name}: stored {'nothing' if old is None else shorten(old)}, now {'nothing' if new is None else shorten(new)}"
        for name, old, new in parameter_differences(stored.parameters, output.parameters)
    ]
    # The extractor's parameters say more than its fingerprint.
    chosen = [part for part in parts if not part.startswith("extractor_fingerprint:")]
    return "; ".join((chosen or parts)[:3]) or "made from other inputs, or with another number of shards"


def parameter_differences(before: Any, after: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield dotted key and both values, or None, of each parameter that differs."""
    if canonical_json(before) == canonical_json(after):  # Stored values have lists in place of tuples.
        return
    if (before or after) and isinstance(before, Mapping | None) and isinstance(after, Mapping | None):
        before, after = before or {}, after or {}
        for key in {**after, **before}:  # The user's choices first.
            yield from parameter_differences(before.get(key), after.get(key), f"{name}.{key}" if name else str(key))
    else:
        yield name, before, after
