"""What a folder holds before a run writes to it: what is finished, what is damaged, and what must not be lost."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import cached_property
from typing import Any

from schemas import events
from schemas.errors import DatasetError, OtherDatasetError
from schemas.failures import failures_name
from schemas.fingerprints import FORMAT_VERSION, Identity, canonical_json, sha256_of_bytes, sha256_of_file
from schemas.manifest import MANIFEST_NAME, MANIFEST_NAMES, TASKS_NAME, Manifest, newer
from schemas.shards import FOREIGN, Footer, inspect_shard, read_footer
from schemas.writing.output import PROBE_NAME, OutputDataset, ReusePolicy
from schemas.writing.own_names import is_control_file, is_like_shard, is_of_shard, is_temporary, left_alone
from schemas.writing.records import Record, read_record, read_sources, record_name, write_record
from schemas.writing.summary import is_summarised

__all__ = ["Survey", "difference"]


class Survey:
    """What an output's folder holds before a run. The folder is listed once; manifest, footers and records are read at most once.

    Args:
        output: the dataset that is to be written.
        policy: what the run keeps.
        only: numbers of the shards to look at, as if there were no others; all if None.
    """

    def __init__(
        self,
        output: OutputDataset,
        policy: ReusePolicy = ReusePolicy(),
        *,
        only: Collection[int] | None = None,
    ) -> None:
        self._output = output
        self._is_partial = only is not None
        self._policy = policy
        self._stored = output.folder.tagged()
        self._sizes = {name: entry.size for name, entry in self._stored.items()}
        others = set(range(output.shards)).difference(only) if only is not None else ()
        for name in map(output.name, others):
            for part in (name, failures_name(name), record_name(name)):
                self._sizes.pop(part, None)
        self._footers: dict[str, Footer | None] = {}
        self._records: dict[str, Record | None] = {}
        self._whole: dict[int, bool] = {}

    def finished(self) -> frozenset[int]:
        """Return the numbers of the shards in which this run has nothing to do."""
        return frozenset(number for number in self.usable() if self._is_finished(number))

    def usable(self) -> frozenset[int]:
        """Return the numbers of the shards of the same identity that are not damaged, whatever they were made from."""
        if self._policy.overwrite:
            return frozenset()
        return frozenset(number for number in range(self._output.shards) if self._is_whole(number))

    def footer(self, number: int) -> Footer | None:
        """Return the footer of a shard of the same identity, else None."""
        return self._output.own(self._inspect(self._output.name(number)))

    def complete(self) -> Manifest | None:
        """Return the manifest, where an earlier run of the same identity committed and there is nothing to do."""
        manifest = self._own_manifest
        if manifest is None or self._policy.overwrite:
            return None
        if not self._has_files(manifest):
            return None
        if self._policy.verify and any(self._has_damaged_record(number) for number in range(self._output.shards)):
            return None
        return manifest if self._is_told(manifest) or len(self.finished()) == self._output.shards else None

    def _is_told(self, manifest: Manifest) -> bool:
        """Whether the manifest, the listing of a store and the summary say alone that there is nothing to do."""
        folder, output = self._output.folder, self._output
        policy = self._policy
        if folder.is_local or policy.verify or policy.update is not None or (policy.retry_failed and manifest.failures):
            return False
        named = {entry.path: entry.bytes for entry in (*manifest.shards, *manifest.failures)}
        there = {name: size for name, size in self._sizes.items() if name.startswith(("part-", "_failures/"))}
        return named == there and is_summarised(folder, manifest, output.listings, output.states, self._stored)

    @property
    def has_manifest(self) -> bool:
        """Whether there is a manifest, whatever it says."""
        return not self._sizes.keys().isdisjoint(MANIFEST_NAMES)

    def is_committed(self) -> bool:
        """Whether an earlier run of the same identity committed, with the files besides shards that this run would write."""
        return self._own_manifest is not None and self._has_files(self._own_manifest)

    def refuse(self) -> None:
        """Refuse a folder that holds something that must not be lost.

        Raises:
            DatasetError: the folder holds foreign files and no dataset, or foreign files that look like shards; or a dataset,
                complete or not, of another fingerprint; or shards that were made from other inputs, and nothing says what to do
                with them.
        """
        folder = self._output.folder
        others = self.left_alone()
        foreign = sorted(set(self._foreign) - set(others))
        if foreign:
            raise DatasetError(
                f"{folder.location!r} holds files that do not belong to a dataset, e.g. {foreign[0]!r}: nothing was written. "
                "Choose a new or empty folder"
            )
        if others and not self._is_partial:
            events.remark(left_alone(folder.location, others))
        if self._policy.overwrite:
            return
        if isinstance(self._manifest, DatasetError):
            raise DatasetError(f"{self._manifest}; or give --overwrite to start anew. Nothing was written")
        self._refuse_other(self._manifest)
        for name in sorted(self._sizes):
            if name.startswith("part-"):
                self._refuse_other(self._inspect(name))
        if self._policy.update is None:
            self._refuse_changed()

    def left_alone(self) -> list[str]:
        """Return the names of files of other tools beside a dataset, sorted; none where there is no dataset."""
        others = sorted(name for name in self._foreign if not is_like_shard(name))
        return others if others and self._holds_dataset() else []

    def clear(self, kept: frozenset[int]) -> None:
        """Delete what does not belong to the dataset, and write the files that are known before the run.

        From here on the folder is not a dataset until the run commits.

        Args:
            kept: numbers of the shards that stay, with what lies beside them.
        """
        folder = self._output.folder
        shards = {self._output.name(number) for number in kept}
        stay = {*shards, *map(failures_name, shards), *map(record_name, shards)}
        old = self._files_of_manifest() - self._output.files.keys()
        self.uncommit(kept)
        gone = []
        for name in self._sizes:
            stale = is_of_shard(name) and name not in stay
            left = is_temporary(name) or name in (PROBE_NAME, TASKS_NAME)
            if stale or left or (name in old and not self._output.is_other_file(name)):
                gone.append(name)
        folder.map(folder.delete, gone)
        for name, data in self._output.files.items():
            folder.write(name, data)

    def uncommit(self, kept: Collection[int]) -> None:
        """Delete the manifest: from here on the folder is not a dataset until it is committed again.

        Args:
            kept: numbers of the shards that stay.
        """
        for number in kept:
            self._keep_digest(number)
        for name in MANIFEST_NAMES:
            if name in self._sizes:
                self._output.folder.delete(name)

    def _has_files(self, manifest: Manifest) -> bool:
        for entry in manifest.files:
            if self._sizes.get(entry.path) != entry.bytes or (self._policy.verify and self._digest(entry.path) != entry.sha256):
                return False
        digests = {entry.path: entry.sha256 for entry in manifest.files}
        return all(digests.get(name) == sha256_of_bytes(data) for name, data in self._output.files.items())

    def _keep_digest(self, number: int) -> None:
        """Put a shard's digest on record before the manifest, which is all that names it, is deleted."""
        footer, manifest = self.footer(number), self._own_manifest
        if manifest is not None and footer is not None and self._record(number) is None:
            entry = manifest.shards[number]
            write_record(self._output.folder, entry.path, Record.of(entry, footer))

    @cached_property
    def _manifest(self) -> Manifest | DatasetError | None:
        """The manifest in the folder, or why it cannot be used; None if there is none."""
        if not self.has_manifest:
            return None
        try:
            return Manifest.read(self._output.folder)
        except DatasetError as error:
            if all(self._output.folder.size(name) is None for name in MANIFEST_NAMES):
                return None  # Another task of an array job has deleted it since the folder was listed.
            return error

    @cached_property
    def _own_manifest(self) -> Manifest | None:
        """The manifest in the folder, if a run of the same identity wrote it. Of any other `refuse` says what is wrong."""
        manifest, identity = self._manifest, self._output.identity
        if not isinstance(manifest, Manifest) or manifest.version != FORMAT_VERSION:
            return None
        return manifest if manifest.fingerprint == identity.fingerprint else None

    def _inspect(self, name: str) -> Footer | None:
        if not self._footers and not self._output.folder.is_local:
            names = [name for name in self._sizes if name.startswith("part-")]
            self._footers = dict(zip(names, self._output.folder.map(self._look, names), strict=True))
        if name not in self._footers:
            self._footers[name] = self._look(name) if name in self._sizes else None
        return self._footers[name]

    def _look(self, name: str) -> Footer | None:
        """Read a footer, or in a store the record that stands for it, which takes fewer requests."""
        folder = self._output.folder
        record = None if folder.is_local else self._record_of(name)
        believed = record is not None and not self._policy.verify and record.is_of(self._stored)
        told = record.stands_for(name, self._sizes[name]) if record is not None and believed else None
        if told is not None and self._output.own(told[1]) is not None:
            return told[1]
        return inspect_shard(folder, name)

    def _is_whole(self, number: int) -> bool:
        if number not in self._whole:
            self._whole[number] = self._compare(number)
        return self._whole[number]

    def _compare(self, number: int) -> bool:
        """Compare a shard and its failures with what is on record: in the manifest, beside it, and in its footer.

        A shard whose digest is nowhere on record counts as damaged.
        """
        footer, name = self.footer(number), self._output.name(number)
        if footer is None:
            return False
        record = self._record(number)
        if record is not None and not record.describes(self._sizes[name], footer.statistics):
            return False  # Damaged, or the run was killed between the two.
        recorded = None if record is None else (record.bytes, record.sha256)
        if self._own_manifest is not None:
            entry = self._own_manifest.shards[number]
            recorded = entry.bytes, entry.sha256
        if recorded is None or self._sizes[name] != recorded[0]:
            return False
        failures = failures_name(name)
        if self._sizes.get(failures) != (footer.failures.bytes if footer.failures.rows else None):
            return False
        if not self._policy.verify and (record is None or (record.is_of(self._stored) and record.sha256 == recorded[1])):
            return True  # Else the record was written for another one, or all of it was copied from elsewhere.
        if footer.failures.rows and self._digest(failures) != footer.failures.sha256:
            return False
        return self._digest(name) == recorded[1]

    def _is_finished(self, number: int) -> bool:
        """Whether a shard that is whole was made from the inputs of this run."""
        footer = self.footer(number)
        if footer is None or (self._policy.retry_failed and footer.failures.rows):
            return False
        return self._is_unchanged(number, footer) and not self._needs_look(number, footer)

    def _needs_look(self, number: int, footer: Footer) -> bool:
        """Whether an update reads images of a shard although nothing seems to have changed."""
        if self._policy.update is None or self._policy.update.only_add:
            return False
        # A file may have become readable without a change of its own; without states or a record nothing can be compared here.
        record = self._record(number)
        unrecorded = self._output.listings is not None and (self._output.states is None or record is None or not record.state)
        return self._policy.update.check_content or unrecorded or "unreadable" in footer.failures.reasons

    def _is_unchanged(self, number: int, footer: Footer) -> bool:
        listings, states = self._output.listings, self._output.states
        if listings is not None and footer.statistics.get("listing") != listings[number]:
            return False
        record = self._record(number)
        # Without a record nothing else is known of the inputs.
        return states is None or record is None or record.state in ("", states[number])

    def _record(self, number: int) -> Record | None:
        """Return the record of a shard; None where there is none or a damaged one."""
        return self._record_of(self._output.name(number))

    def _record_of(self, name: str) -> Record | None:
        if name not in self._records:
            self._records[name] = self._read_record(name)
        return self._records[name]

    def _read_record(self, name: str) -> Record | None:
        folder = self._output.folder
        if record_name(name) not in self._sizes:
            return None
        if self._policy.verify:
            whole = read_sources(folder, name)
            return None if whole is None else whole[0]
        return read_record(folder, name)

    def _has_damaged_record(self, number: int) -> bool:
        return record_name(self._output.name(number)) in self._sizes and self._record(number) is None

    def _digest(self, name: str) -> str:
        with self._output.folder.open(name) as file:
            return sha256_of_file(file)

    @cached_property
    def _foreign(self) -> list[str]:
        listed = self._files_of_manifest()
        return [name for name in self._sizes if name not in listed and self._is_foreign(name)]

    def _is_foreign(self, name: str) -> bool:
        if is_of_shard(name):
            return name.endswith(".parquet") and self._inspect(name) is FOREIGN
        return not (is_control_file(name) or self._output.is_other_file(name))

    def _holds_dataset(self) -> bool:
        """Whether the folder holds a manifest or a shard of ours, of whatever dataset, or what tasks leave before."""
        if not self._stored.keys().isdisjoint((MANIFEST_NAME, TASKS_NAME)) or isinstance(self._manifest, Manifest):
            return True
        return any(name.startswith("part-") and read_footer(self._output.folder, name) is not None for name in self._stored)

    def _files_of_manifest(self) -> set[str]:
        """Return the names of the files besides shards that the manifest in the folder lists, whatever dataset it is of."""
        return {entry.path for entry in self._manifest.files} if isinstance(self._manifest, Manifest) else set()

    def _refuse_other(self, stored: Manifest | Footer | None) -> None:
        identity, location = self._output.identity, self._output.folder.location
        if stored is None:
            return
        if stored.fingerprint != identity.fingerprint:
            raise OtherDatasetError(
                f"{location!r} holds another dataset ({difference(stored, identity)}): nothing was written. Choose another folder, "
                "or give --overwrite to replace it"
            )
        if stored.version > FORMAT_VERSION:
            raise DatasetError(f"{location!r} {newer(stored.version)}. Nothing was written")
        if stored.version < FORMAT_VERSION:
            raise DatasetError(
                f"{location!r} holds this dataset in version {stored.version} of the format, which can be read but not continued: "
                f"nothing was written. Keep it, or give --overwrite to make it again in version {FORMAT_VERSION}"
            )

    def _refuse_changed(self) -> None:
        footers = {number: self.footer(number) for number in self.usable()}
        changed = sum(footer is not None and not self._is_unchanged(number, footer) for number, footer in footers.items())
        if changed and self._output.sources:
            sources = " and ".join(map(repr, self._output.sources))
            raise DatasetError(
                f"{self._output.folder.location!r} was not made from what {sources} holds now: of {changed} of "
                f"{self._output.shards} shards the content is another (Manifest.content_sha256), or was not noted by an earlier "
                "version; nothing was written. Give --overwrite to make it again, or choose another folder"
            )
        if changed:
            raise DatasetError(
                f"{self._output.folder.location!r} was made from other images: in {changed} of {self._output.shards} shards some "
                "are new, gone, or differ in size or modification time; nothing was written. Give --update to bring it up to date, "
                "--overwrite to start anew, or choose another folder"
            )


def difference(stored: Manifest | Footer | Identity, identity: Identity) -> str:
    """Say in a few words how a stored dataset differs from the one that a run would write."""
    if stored.kind != identity.kind:
        return f"kind {stored.kind!r} instead of {identity.kind!r}"
    parts = list(_differences(stored.parameters, identity.parameters))
    chosen = [
        part for part in parts if not part.startswith("extractor_fingerprint:")
    ]  # The extractor's parameters say it better.
    return "; ".join((chosen or parts)[:3]) or "made from other inputs, or with another number of shards"


def _differences(before: Any, after: Any, name: str = "") -> Iterator[str]:
    """Say of each value that differs what it is on both sides, with the path of keys to it."""
    if canonical_json(before) == canonical_json(after):  # Stored values hold lists where new ones have tuples.
        return
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in {**after, **before}:  # What a user chose comes first.
            yield from _differences(before.get(key), after.get(key), f"{name}.{key}" if name else str(key))
    else:
        yield f"{name}: there {_short(before)}, now {_short(after)}"


def _short(value: Any) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
