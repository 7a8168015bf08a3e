"""What a dataset's folder holds before and after a run. `state_of` alone says what a shard is.

| status | means |
| --- | --- |
| missing | no shard |
| claimed | a shard whose digest neither the manifest nor a record knows: its attempt was stopped, or still runs |
| damaged | size, digest, tag, failures or footer disagree with the manifest or the record |
| other | a shard of another fingerprint, or in another version of the format |
| foreign | a Parquet file of another tool |
| stale | whole, made from other inputs |
| current | whole, made from these inputs |

A run writes all but current shards. It refuses other and foreign ones, and stale ones unless it updates. A commit lists current
shards and refuses all others. A repair deletes damaged shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

from schemas.console import events
from schemas.conversion import shorten
from schemas.errors import DatasetError, OtherDatasetError
from schemas.failures import failures_name
from schemas.fingerprints import FORMAT_VERSION, canonical_json, sha256_of_bytes, sha256_of_file
from schemas.footers import FOREIGN, Footer, inspect_shard, read_footer, shard_entry
from schemas.manifest import MANIFEST_NAME, MANIFEST_NAMES, FileEntry, Manifest, ShardEntry, newer
from schemas.storage.folder import Entry, Folder
from schemas.writing.output import (
    OutputDataset,
    is_control_file,
    is_leftover,
    is_like_shard,
    is_of_shard,
    left_alone,
)
from schemas.writing.records import Record, read_record, record_name, write_record
from schemas.writing.reuse_policy import ReusePolicy
from schemas.writing.shard_writer import publishing


class Status(StrEnum):
    """What a shard is; the table of this module explains each."""

    MISSING = "missing"
    CLAIMED = "claimed"
    DAMAGED = "damaged"
    OTHER = "other"
    FOREIGN = "foreign"
    STALE = "stale"
    CURRENT = "current"


@dataclass(frozen=True)
class ShardState:
    """A shard's status, and what is known of it.

    Attributes:
        status: see the table of this module.
        problem: what is wrong with its bytes, a sentence; empty if nothing is.
        failures_problem: likewise for the failures beside it.
        entry: the manifest's entry for it; None where only reading all bytes would tell.
        footer: its footer; None for a foreign file, or if it cannot be read.
        record: the record that describes it, if there is one.
    """

    name: str
    status: Status
    problem: str = ""
    failures_problem: str = ""
    entry: ShardEntry | None = None
    footer: Footer | None = None
    record: Record | None = None

    @property
    def is_whole(self) -> bool:
        """Whether the shard belongs to the dataset, undamaged as far as is known."""
        return self.status in (Status.STALE, Status.CURRENT)

    @property
    def failures(self) -> ShardEntry | None:
        """The manifest's entry for the failures beside it, in this version of the format; None without any."""
        said = None if self.footer is None else self.footer.failures
        return (
            ShardEntry(failures_name(self.name), said.bytes, said.sha256, said.rows) if said is not None and said.rows else None
        )


def look_at(output: OutputDataset, number: int, manifest: Manifest | None = None, *, read_all: bool = False) -> ShardState:
    """Return the state of one shard without a listing of the folder, whatever it was made from; see `state_of`."""
    folder, shard = output.folder, output.name(number)
    sizes = {name: folder.size(name) for name in (shard, failures_name(shard), record_name(shard))}
    entries = {name: Entry(name, size) for name, size in sizes.items() if size is not None}
    return state_of(folder, shard, entries, manifest, fingerprint=output.fingerprint, read_all=read_all)


def state_of(
    folder: Folder,
    shard: str,
    entries: Mapping[str, Entry],
    manifest: Manifest | None = None,
    *,
    fingerprint: str | None = None,
    listing: str | None = None,
    state: str | None = None,
    read_all: bool = False,
) -> ShardState:
    """Say what a shard is.

    Its bytes are compared with the manifest, else with the record: always by size, by digest with ``read_all`` or where the record
    is that of another file (the folder was copied, or one attempt overtook another).

    Args:
        folder: the dataset's folder.
        shard: file name of the shard.
        entries: the listing of the folder, or of the shard, its failures and its record; without tags they are not compared.
        manifest: the manifest of the dataset, if there is one.
        fingerprint: fingerprint of the dataset; None for that which the record names, or any.
        listing: digest of the shard's inputs, to compare; None for any.
        state: digest of what listing the inputs tells of their content, to compare; None for any.
        read_all: compare all digests.

    Raises:
        DatasetError: the store does not answer.
    """
    listed = None if manifest is None else manifest.shard_entries.get(shard)
    if shard not in entries or entries[shard].size < 0:  # Below 0: a link to nothing.
        return ShardState(shard, Status.MISSING, f"{shard} is missing", entry=listed)
    size = entries[shard].size
    record = read_record(folder, shard, whole=read_all) if record_name(shard) in entries else None
    footer = _read_footer(folder, shard, entries, None if read_all else record, fingerprint)
    describes = record is not None and record.matches_shard(size, {} if footer is None else footer.statistics)
    known = listed if listed is not None else record
    is_doubtful = record is not None and not (
        describes and record.matches_tags(entries) and known and record.sha256 == known.sha256
    )
    problem, entry = "", listed
    if known is None:
        problem = f"{shard} has no digest on record"
    elif known.bytes != size:
        problem = f"{shard} has {size:,} bytes, {_teller(manifest)} says {known.bytes:,}"
    elif listed is None and not describes:
        problem = f"{shard} is not what its record describes"
    elif read_all or is_doubtful:
        found = shard_entry(folder, shard, 0 if footer is None else footer.rows)
        problem, entry = _compare_digests(found, known, _teller(manifest)), entry or found
    elif entry is None and record is not None:
        entry = (record.as_footer(shard, size) or (None,))[0]
    if footer is FOREIGN:
        return ShardState(shard, Status.FOREIGN, problem, entry=listed)
    version = FORMAT_VERSION if manifest is None else manifest.version
    wanted = fingerprint or (None if record is None else record.shard.get("fingerprint"))
    if footer is not None and (footer.version != version or wanted not in (None, footer.fingerprint)):
        return ShardState(shard, Status.OTHER, problem, entry=listed, footer=footer)
    beside = (
        "" if footer is None else _compare_failures(folder, shard, entries, footer, manifest, digest=read_all or is_doubtful)
    )
    record = record if describes and record is not None and known is not None and record.sha256 == known.sha256 else None
    if footer is None or problem or beside:
        status = Status.CLAIMED if known is None and footer is not None and not beside else Status.DAMAGED
        return ShardState(shard, status, problem, beside, listed, footer, record)
    changed = listing not in (None, footer.statistics.get("listing"))
    moved = state is not None and record is not None and record.state not in ("", state)
    return ShardState(shard, Status.STALE if changed or moved else Status.CURRENT, "", "", entry, footer, record)


def _read_footer(
    folder: Folder, shard: str, entries: Mapping[str, Entry], record: Record | None, fingerprint: str | None
) -> Footer | None:
    """Read a footer, or in a store the record that stands for it, which takes fewer requests but tells no parameters."""
    if record is not None and not folder.is_local and record.matches_tags(entries):
        told = record.as_footer(shard, entries[shard].size)
        if told is not None and told[1].fingerprint == fingerprint:
            return told[1]
    return inspect_shard(folder, shard)


def _compare_failures(
    folder: Folder, shard: str, entries: Mapping[str, Entry], footer: Footer, manifest: Manifest | None, *, digest: bool
) -> str:
    """Say what is wrong with the failures of a shard; those that lie beside a shard without any are left over, not wrong."""
    name, said = failures_name(shard, footer.version), footer.failures
    expected: FileEntry | None = FileEntry(name, said.bytes, said.sha256) if said.rows else None
    if manifest is not None:
        listed = manifest.shard_entries.get(name)
        rows, entry = (0, None) if listed is None else (listed.rows, FileEntry(name, listed.bytes, listed.sha256))
        if footer.version > 1 and (said.rows, expected) != (rows, entry):
            return f"{shard} was made with {said.rows:,} failures, the manifest lists {rows:,}, or others"
        expected = entry
    return "" if expected is None else matches(folder, entries, expected, _teller(manifest), digest=digest)


def matches(folder: Folder, entries: Mapping[str, Entry], expected: FileEntry, teller: str, *, digest: bool) -> str:
    """Say what is wrong with a file: that it is missing, has another size or another digest; empty if nothing is."""
    name = expected.path
    if name not in entries or entries[name].size < 0:
        return f"{name} is missing"
    if entries[name].size != expected.bytes:
        return f"{name} has {entries[name].size:,} bytes, {teller} says {expected.bytes:,}"
    if not digest:
        return ""
    with folder.open(name) as file:
        found = FileEntry(name, entries[name].size, sha256_of_file(file))
    return _compare_digests(found, expected, teller)


def _compare_digests(found: FileEntry, expected: FileEntry | Record, teller: str) -> str:
    if found.sha256 != expected.sha256:
        return f"{found.path} has SHA-256 {found.sha256[:12]}..., {teller} says {expected.sha256[:12]}...: its bytes changed"
    footer = expected.footer_sha256 if isinstance(expected, ShardEntry) else ""
    if footer and isinstance(found, ShardEntry) and found.footer_sha256 != footer:
        return f"{found.path} has another footer than {teller} says"
    return ""


def _teller(manifest: Manifest | None) -> str:
    return "its record" if manifest is None else "the manifest"


class OutputState:
    """What an output's folder holds. It is listed once, at first; the manifest and each shard are read once, when asked for.

    ``numbers`` are those of the shards that the run writes; None for all.
    """

    def __init__(
        self, output: OutputDataset, policy: ReusePolicy = ReusePolicy(), numbers: Iterable[int] | None = None
    ) -> None:
        self.output = output
        self.entries = output.folder.tagged()
        self.numbers = range(output.shards) if numbers is None else tuple(numbers)
        self._policy = policy
        self._is_task = numbers is not None
        self._states: dict[int, ShardState] = {}

    def shards(self, numbers: Iterable[int] | None = None) -> dict[int, ShardState]:
        """Return the states of some shards, by number; of those that the run writes if None."""
        wanted = list(self.numbers if numbers is None else numbers)
        new = [number for number in wanted if number not in self._states]
        self._states.update(zip(new, self.output.folder.map(self._look, new), strict=True))
        return {number: self._states[number] for number in wanted}

    def read(self, number: int) -> ShardState:
        """Return the state of a shard, all of whose bytes are read."""
        return self._look(number, read_all=True)

    def _look(self, number: int, *, read_all: bool = False) -> ShardState:
        output = self.output
        return state_of(
            output.folder,
            output.name(number),
            self.entries,
            self._own_manifest,
            fingerprint=output.fingerprint,
            listing=None if output.listings is None else output.listings[number],
            state=None if output.states is None else output.states[number],
            read_all=read_all or (self._policy.verify and number in self.numbers),
        )

    def whole(self) -> frozenset[int]:
        """Return the indices of the shards that are whole, whatever they were made from."""
        shards = {} if self._policy.overwrite else self.shards()
        return frozenset(index for index, shard in shards.items() if shard.is_whole)

    def finished(self) -> frozenset[int]:
        """Return the indices of the shards that the run does not look into."""
        shards = {} if self._policy.overwrite else self.shards()
        return frozenset(index for index, shard in shards.items() if self._is_finished(shard))

    def _is_finished(self, shard: ShardState) -> bool:
        policy, footer = self._policy, shard.footer
        if shard.status is not Status.CURRENT or footer is None or (policy.retry_failed and footer.failures.rows):
            return False
        if not policy.update or policy.only_add:
            return True
        # A file may have become readable without a change of its own; without states or a record nothing can be compared here.
        is_unrecorded = self.output.listings is not None and (
            self.output.states is None or shard.record is None or not shard.record.state
        )
        return not (policy.check_content or is_unrecorded or "unreadable" in footer.failures.reasons)

    def is_committed(self) -> bool:
        """Whether an earlier run of this dataset committed, with the files besides shards that this run would write."""
        manifest = self._own_manifest
        if manifest is None or self._policy.overwrite:
            return False
        verify = self._policy.verify
        if any(matches(self.output.folder, self.entries, entry, "the manifest", digest=verify) for entry in manifest.files):
            return False
        digests = {entry.path: entry.sha256 for entry in manifest.files}
        return all(digests.get(name) == sha256_of_bytes(data) for name, data in self.output.files.items())

    def committed_manifest(self) -> Manifest | None:
        """Return the manifest of a dataset in which there is nothing to do; None if there is something."""
        if not self.is_committed() or len(self.finished()) < len(self.numbers):
            return None
        if any(self._has_leftovers(shard) for shard in self.shards().values()):
            return None
        return self._own_manifest

    def _has_leftovers(self, shard: ShardState) -> bool:
        stray = shard.failures is None and failures_name(shard.name) in self.entries
        return stray or (self._policy.verify and shard.record is None and record_name(shard.name) in self.entries)

    def check_compatible(self) -> None:
        """Refuse a folder that holds something that must not be lost.

        Raises:
            DatasetError: the folder holds foreign files and no dataset, or foreign files that look like shards; or a dataset,
                complete or not, of another fingerprint; or shards that were made from other inputs, and nothing says what to do
                with them.
        """
        folder = self.output.folder
        foreign = self._foreign()
        others = sorted(name for name in foreign if not is_like_shard(name))
        others = others if others and self._holds_dataset() else []
        if refused := sorted(foreign - set(others)):
            raise DatasetError(
                f"{folder.location!r} holds files that do not belong to a dataset, e.g. {refused[0]!r}: nothing was written. "
                "Choose a new or empty folder"
            )
        if others and not self._is_task:
            events.remark(left_alone(folder.location, others))
        if self._policy.overwrite:
            return
        if isinstance(self._manifest, DatasetError):
            raise DatasetError(f"{self._manifest}; or give --overwrite to start anew. Nothing was written")
        self._refuse_other(self._manifest)
        for footer in self._footers.values():
            self._refuse_other(footer)
        if not self._policy.update:
            self._refuse_stale()

    def clear(self) -> None:
        """Delete what does not belong to the dataset, and write the files that are known before the run.

        From here on the folder is not a dataset until the run commits.
        """
        folder = self.output.folder
        stay: set[str] = set()
        for number in self.whole():
            shard = self._states[number]
            stay |= {shard.name, record_name(shard.name), *([shard.failures.path] if shard.failures is not None else [])}
        old = self._files_of_manifest() - self.output.files.keys()
        self.uncommit()
        gone = []
        for name in self.entries:
            stale = is_of_shard(name) and name not in stay
            if stale or is_leftover(name) or (name in old and not self.output.is_other_file(name)):
                gone.append(name)
        folder.map(folder.delete, gone)
        for name, data in self.output.files.items():
            folder.write(name, data)

    def uncommit(self) -> None:
        """Delete the manifest: from here on the folder is not a dataset until it is committed again.

        Digests that only the manifest knows are put on record before, unless an attempt has replaced the shard meanwhile.
        """
        folder = self.output.folder
        with publishing(folder):
            if self._own_manifest is not None and not self._policy.overwrite:
                for number, shard in self.shards(range(self.output.shards)).items():
                    if shard.is_whole and shard.record is None:
                        self._keep_digest(number)
            for name in MANIFEST_NAMES:
                if name in self.entries:
                    folder.delete(name)

    def _keep_digest(self, number: int) -> None:
        folder, name = self.output.folder, self.output.name(number)
        shard = self._states[number]
        if folder.is_local:
            shard = look_at(self.output, number, self._own_manifest)
        if not shard.is_whole or shard.record is not None or shard.entry is None or shard.footer is None:
            return
        record, beside = Record.of(shard.entry, shard.footer), record_name(name)
        if folder.has_tags:
            folder.swap(beside, record.to_json_lines().encode(), self.entries[beside].tag if beside in self.entries else None)
        else:
            write_record(folder, name, record)

    @cached_property
    def _manifest(self) -> Manifest | DatasetError | None:
        """The manifest in the folder, or why it cannot be used; None if there is none."""
        if self.entries.keys().isdisjoint(MANIFEST_NAMES):
            return None
        try:
            return Manifest.read(self.output.folder)
        except DatasetError as error:
            if all(self.output.folder.size(name) is None for name in MANIFEST_NAMES):
                return None  # Another task of an array job has deleted it since the folder was listed.
            return error

    @cached_property
    def _own_manifest(self) -> Manifest | None:
        """The manifest in the folder, if a run of the same fingerprint wrote it; `check_compatible` reports any other."""
        manifest = self._manifest
        if not isinstance(manifest, Manifest) or manifest.version != FORMAT_VERSION:
            return None
        return manifest if manifest.fingerprint == self.output.fingerprint else None

    @cached_property
    def _footers(self) -> dict[str, Footer | None]:
        """The footers of all files that are called like shards, by name in order; a task looks at its own and one more."""
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
        """Return the names of files that belong to no dataset."""
        listed = self._files_of_manifest()
        shards = {name for name, footer in self._footers.items() if footer is FOREIGN and is_of_shard(name)}
        unlike = (name for name in self.entries if not is_of_shard(name) and name not in listed)
        return shards | {name for name in unlike if not (is_control_file(name) or self.output.is_other_file(name))}

    def _holds_dataset(self) -> bool:
        """Whether the folder holds a manifest or a shard of ours, of whatever dataset."""
        if MANIFEST_NAME in self.entries or isinstance(self._manifest, Manifest):
            return True
        return any(name.startswith("part-") and read_footer(self.output.folder, name) is not None for name in self.entries)

    def _files_of_manifest(self) -> set[str]:
        """Return the names of the files besides shards that the manifest in the folder lists, whatever dataset it is of."""
        return {entry.path for entry in self._manifest.files} if isinstance(self._manifest, Manifest) else set()

    def _refuse_other(self, stored: Manifest | Footer | None) -> None:
        output, location = self.output, self.output.folder.location
        if stored is None:
            return
        if stored.fingerprint != output.fingerprint:
            raise OtherDatasetError(
                f"{location!r} holds another dataset ({difference(stored, output)}): nothing was written. Choose another folder, "
                "or give --overwrite to replace it"
            )
        if stored.version > FORMAT_VERSION:
            raise DatasetError(f"{location!r} {newer(stored.version)}. Nothing was written")
        if stored.version < FORMAT_VERSION:
            raise DatasetError(
                f"{location!r} holds this dataset in version {stored.version} of the format, which can be read but not continued: "
                f"nothing was written. Keep it, or give --overwrite to make it again in version {FORMAT_VERSION}"
            )

    def _refuse_stale(self) -> None:
        changed = sum(shard.status is Status.STALE for shard in self.shards().values())
        if changed and self.output.sources:
            sources = " and ".join(map(repr, self.output.sources))
            raise DatasetError(
                f"{self.output.folder.location!r} was not made from what {sources} holds now: of {changed} of "
                f"{self.output.shards} shards the content is another (Manifest.content_sha256), or was not noted by an earlier "
                "version; nothing was written. Give --overwrite to make it again, or choose another folder"
            )
        if changed:
            raise DatasetError(
                f"{self.output.folder.location!r} was made from other images: in {changed} of {self.output.shards} shards some "
                "are new, gone, or differ in size or modification time; nothing was written. Give --update to bring it up to date, "
                "--overwrite to start anew, or choose another folder"
            )


def difference(stored: Manifest | Footer, output: OutputDataset) -> str:
    """Say in a few words how a stored dataset differs from the one that a run would write."""
    if stored.kind != output.kind:
        return f"kind {stored.kind!r} instead of {output.kind!r}"
    parts = list(_differences(stored.parameters, output.parameters))
    # The extractor's parameters say it better than its fingerprint.
    chosen = [part for part in parts if not part.startswith("extractor_fingerprint:")]
    return "; ".join((chosen or parts)[:3]) or "made from other inputs, or with another number of shards"


def _differences(before: Any, after: Any, name: str = "") -> Iterator[str]:
    """Say of each value that differs what it is on both sides, with the path of keys to it."""
    if canonical_json(before) == canonical_json(after):  # Stored values hold lists where new ones have tuples.
        return
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in {**after, **before}:  # What a user chose comes first.
            yield from _differences(before.get(key), after.get(key), f"{name}.{key}" if name else str(key))
    else:
        there, now = ("nothing" if value is None else shorten(value) for value in (before, after))
        yield f"{name}: there {there}, now {now}"
