"""Writing of datasets: the commit protocol.

1. A run locks the folder, and refuses to replace data that must not be lost.
2. It writes the shards that are not current, in any order and process.
3. It commits: every shard is checked again, and the manifest is written last.

A run killed at any moment leaves finished shards and no manifest; the same command continues from there.

An array task is such a run over some of the shards, with a shared lock. It deletes nothing but the manifest.
The first task that finds all shards current commits.

`write_dataset` runs in this process. A pipeline with workers runs in `complete_dataset`, and its last step is `commit`.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import metadata
from itertools import groupby
from typing import Any

from schemas.console import events
from schemas.errors import CommittedError, DatasetError, TooManyFailuresError, UsageError
from schemas.failures import failures_name
from schemas.fingerprints import sha256_of_bytes, sum_digests
from schemas.manifest import FileEntry, Manifest, ShardEntries, ShardEntry
from schemas.process.shutdown import DetachedError
from schemas.sample_outputs import SampleOutputs, are_equal
from schemas.storage.folder import Folder
from schemas.writing.attempts import publish_manifest
from schemas.writing.file_names import PROBE_NAME, is_temporary
from schemas.writing.locks import lock_folder, publishing
from schemas.writing.output import OutputDataset
from schemas.writing.output_state import OutputState, ShardState, Status
from schemas.writing.reuse_policy import ArrayTask, ReusePolicy
from schemas.writing.shard_writer import ShardWriter, open_shard

_MAX_RANGES = 20


def write_dataset(
    output: OutputDataset,
    write_shard: Callable[[int, ShardWriter], object],
    policy: ReusePolicy = ReusePolicy(),
    *,
    check: Callable[[], object] = lambda: None,
    libraries: tuple[str, ...] = (),
) -> Manifest:
    """Write the missing shards of a dataset in this process, and commit it.

    ``write_shard`` receives index and writer of each missing shard, in order. For the rest see `complete_dataset`.
    """

    def write_missing(finished: frozenset[int]) -> None:
        for index in output.missing(finished):
            with open_shard(output, index) as shard:
                write_shard(index, shard)

    return complete_dataset(output, write_missing, policy, check=check, libraries=libraries)


def complete_dataset(
    output: OutputDataset,
    write_missing: Callable[[frozenset[int]], Manifest | None],
    policy: ReusePolicy = ReusePolicy(),
    *,
    task: ArrayTask | None = None,
    check: Callable[[], object] = lambda: None,
    libraries: tuple[str, ...] = (),
) -> Manifest:
    """Lock the folder of a dataset, write its missing shards, and commit it.

    A shard counts as missing, too, if its size or that of its failures is wrong, or a digest if the policy verifies.

    Args:
        output: the dataset.
        write_missing: function that writes all shards except those with the given indices, and returns the manifest if it commits.
        policy: reuse of existing shards.
        task: array task that writes only its own shards; None to write all.
        check: function that raises if the run cannot succeed; called before anything is replaced, if shards are missing.
        libraries: distributions with versions that determine the content.

    Raises:
        DetachedError: shards of other tasks are missing; the message lists the tasks to run again.
        UsageError: the number of tasks or the kind of update is not possible.
        DatasetError: the folder is in use, holds data that must not be lost, or damaged shards of other tasks.
    """
    if task is not None:
        return _complete_task(output, task, write_missing, policy, check, libraries)
    with lock_folder(output.folder):
        state = OutputState(output, policy)
        manifest = state.committed_manifest()
        if manifest is not None:
            events.remark(f"{output.folder.location!r} is up to date: nothing was left to do", style="dim")
            return manifest
        state.check_compatible()
        if len(state.finished_shards()) < output.shards:
            state.check_model()
        _probe(output.folder)
        check()
        finished = state.finished_shards()
        state.clear()
        del state  # It holds the states of all shards.
        return write_missing(finished) or commit(output, libraries=libraries)


def read_compatible(
    output: OutputDataset, policy: ReusePolicy, task: ArrayTask | None = None, *, written: frozenset[int] = frozenset()
) -> OutputState:
    """Return the state of the folder before a run, or after it has written shards.

    Raises:
        UsageError, DatasetError: as in `complete_dataset`.
    """
    if task is None:
        state = OutputState(output, policy)
    else:
        _check_update(output, policy)
        state = OutputState(_drop_states(output, policy), policy, task.shards(output.shards))
    state.check_compatible(_describe_written(written))
    return state


def _probe(folder: Folder) -> None:
    """Write and delete a file in a store, to fail before the first shard is computed."""
    if not folder.is_local:
        folder.put(PROBE_NAME, b"")
        folder.delete(PROBE_NAME)


def _complete_task(
    output: OutputDataset,
    task: ArrayTask,
    write_missing: Callable[[frozenset[int]], object],
    policy: ReusePolicy,
    check: Callable[[], object],
    libraries: tuple[str, ...],
) -> Manifest:
    written: frozenset[int] = frozenset()
    while True:
        with lock_folder(output.folder, shared=True):
            state = read_compatible(output, policy, task, written=written)
            todo = frozenset(state.selected) - state.finished_shards()
            try:
                if todo:
                    state.check_model()
                elif not written:
                    events.remark("the shards of this task are up to date: nothing was left to do", style="dim")
                if todo or not state.is_committed():
                    _probe(output.folder)
                    check()
                    state.uncommit()
                    for name, data in output.files.items():
                        output.folder.put(name, data)
                if todo:
                    write_missing(frozenset(range(output.shards)) - todo)
                    written |= todo
                return _commit_if_done(output, task, policy, libraries, written)
            except CommittedError:
                continue  # Another task committed before this one had replaced its own shards.


def _describe_written(shards: frozenset[int]) -> str:
    return f"this task has written shards {_ranges(sorted(shards))}, which stay" if shards else "nothing was written"


def _commit_if_done(
    output: OutputDataset, task: ArrayTask, policy: ReusePolicy, libraries: tuple[str, ...], written: frozenset[int]
) -> Manifest:
    """Commit if all shards are current; else list the tasks to run again."""
    state, unfinished = _read_after_task(output, policy, written)
    if not unfinished:
        manifest = state.committed_manifest()
        if manifest is not None:
            return manifest
        # Files of other tasks stay.
        files = tuple(name for name in state.entries if output.is_other_file(name) and name not in output.files)
        try:
            return commit(output, libraries=libraries, files=files)
        except DatasetError:
            state, unfinished = _read_after_task(output, policy, written)
            if not unfinished and (manifest := state.committed_manifest()) is not None:
                return manifest  # Another task has committed first, with other libraries.
            if not unfinished:
                raise
            unfinished = dict.fromkeys(unfinished, Status.DAMAGED)  # The commit has deleted them.
    groups = {"missing": (Status.MISSING, Status.CLAIMED), "damaged": (Status.DAMAGED,), "out of date": (Status.STALE,)}
    shards = {group: [index for index, status in unfinished.items() if status in groups[group]] for group in groups}
    listed = "; ".join(f"{group} {_ranges(indices)}" for group, indices in shards.items() if indices)
    tasks = sorted({index % task.count for index in unfinished})
    message = (
        f"{output.shards - len(unfinished)} of {output.shards} shards are done; {listed}: "
        f"run {'tasks' if len(tasks) > 1 else 'task'} {_ranges(tasks, limit=None)} of {task.count} again"
    )
    if shards["damaged"] and not shards["missing"]:
        raise DatasetError(f"{output.folder.location!r} cannot be committed, {message}")
    raise DetachedError(message)


def _read_after_task(
    output: OutputDataset, policy: ReusePolicy, written: frozenset[int]
) -> tuple[OutputState, dict[int, Status]]:
    """Return the folder's state, and the status of the shards that are not current.

    A store is read again if a shard seems damaged: an attempt may have published it since the listing.
    """
    for _ in range(1 if output.folder.is_local else 2):
        with publishing(output.folder):
            state = OutputState(_drop_states(output, policy), ReusePolicy(update=policy.update))
            state.check_compatible(_describe_written(written))
            statuses = {index: shard.status for index, shard in state.shards().items()}
        unfinished: dict[int, Status] = {index: status for index, status in statuses.items() if status != Status.CURRENT}
        if Status.DAMAGED not in unfinished.values():
            break
    return state, unfinished


def _drop_states(output: OutputDataset, policy: ReusePolicy) -> OutputDataset:
    """Drop modification times, which differ between machines, unless it is an update."""
    return output if policy.update else replace(output, version_digests=None)


def _check_update(output: OutputDataset, policy: ReusePolicy) -> None:
    """Refuse updates that would not show that a task never ran."""
    if not policy.update:
        return
    start = "the task that commits must see which tasks have brought their shards up to date: leave out --task"
    if policy.keep_removed or policy.only_add or policy.check_content:
        raise UsageError(f"{start}, or --keep-removed, --only-add and --check-content, after which nothing shows it")
    if output.listings is not None and output.version_digests is None:
        raise UsageError(f"{start}. Listing these images does not tell when they changed, so that nothing shows it")


def _ranges(indices: Collection[int], limit: int | None = _MAX_RANGES) -> str:
    """Format sorted indices as schedulers do, e.g. ``0-3,7``."""
    runs = groupby(enumerate(indices), lambda pair: pair[1] - pair[0])
    ranges = [[index for _, index in pairs] for _, pairs in runs]
    text = ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in ranges[:limit])
    return text if limit is None or len(ranges) <= limit else f"{text} and more"


def add_statistics(total: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Add statistics to sums: numbers, and digests of lists, in nested mappings."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            add_statistics(total.setdefault(key, {}), value)
        elif isinstance(value, str):
            total[key] = sum_digests((total.get(key, "0"), value))
        else:
            total[key] = total.get(key, 0) + value


def commit(output: OutputDataset, *, libraries: tuple[str, ...] = (), files: tuple[str, ...] = ()) -> Manifest:
    """Check every shard and write the manifest, last.

    Local shards are read completely. A store keeps checksums: digests come from the records, sizes from the listing.

    The inputs of the shards are not compared. ``files`` are further files of the dataset, besides those of
    the output. The other arguments are those of `complete_dataset`.

    Raises:
        DatasetError: a shard is missing or of another dataset; or damaged, and is then deleted.
        TooManyFailuresError: the dataset is committed, with more failures than allowed.
    """
    folder, files = output.folder, (*files, *output.files)
    with publishing(folder):
        state = OutputState(replace(output, listings=None, version_digests=None), ReusePolicy(verify=folder.is_local))
        shards = _Shards(state)
        entries = ShardEntries(shards.entries())
        shards.check()
        contents = ((name, folder.read(name)) for name in sorted(files))
        manifest = Manifest(
            kind=output.kind,
            fingerprint=output.fingerprint,
            parameters=output.parameters,
            inputs=tuple(output.inputs),
            libraries={name: metadata.version(name) for name in ("imagepivot", "numpy", "pyarrow", *libraries)},
            shards=entries,
            failures=ShardEntries(shards.failures),
            failure_reasons=dict(shards.reasons),
            files=tuple(FileEntry(name, len(data), sha256_of_bytes(data)) for name, data in contents),
            statistics=shards.statistics,
            sample_outputs=next(iter(shards.sample_outputs), ()),
            notes=output.notes,
        )
        # Leftovers of a replaced dataset, of killed or overtaken attempts, and of exchange between workers.
        leftovers = [
            name
            for name in sorted(state.entries)
            if is_temporary(name) or name in shards.stray or (output.is_other_file(name) and name not in files)
        ]
        folder.map(folder.delete, leftovers)
        publish_manifest(folder, manifest, state.entries)
    limit = output.max_failures
    if limit is not None and limit.is_exceeded(failed=manifest.failed, rows=manifest.rows):
        counts = ", ".join(f"{count:,} {reason}" for reason, count in sorted(shards.reasons.items()))
        excess = f"more than --max-failures {limit} allows" if manifest.rows else "which leaves no row"
        raise TooManyFailuresError(
            f"{manifest.failed:,} of {manifest.rows + manifest.failed:,} inputs failed ({counts}), {excess}. The dataset "
            f"{folder.location!r} is committed; imagepivot inspect lists its --failures"
        )
    return manifest


@dataclass
class _Shards:
    """Sums over the shards of a dataset, in one pass that holds one shard.

    Attributes:
        statistics: sums of the statistics of shards.
        stray: names of failures of shards without any.
        sample_outputs: name of the first shard with each sample outputs.
        unfinished: shards that are not current.
    """

    state: OutputState
    statistics: dict[str, Any] = field(default_factory=dict)
    reasons: Counter[str] = field(default_factory=Counter)
    failures: list[ShardEntry] = field(default_factory=list)
    stray: set[str] = field(default_factory=set)
    sample_outputs: dict[SampleOutputs, str] = field(default_factory=dict)
    unfinished: list[ShardState] = field(default_factory=list)

    def entries(self) -> Iterator[ShardEntry]:
        """Yield the entries of the current shards, and add up the rest."""
        for shard in self.state.read_each():
            if shard.status is not Status.CURRENT or shard.footer is None or shard.entry is None:
                self.unfinished.append(shard)
                continue
            add_statistics(self.statistics, shard.footer.statistics)
            self.reasons.update(shard.footer.failures.reasons)
            if shard.failures is not None:
                self.failures.append(shard.failures)
            elif (name := failures_name(shard.name)) in self.state.entries:
                self.stray.add(name)
            if shard.record is not None and shard.record.sample_outputs:
                self.sample_outputs.setdefault(shard.record.sample_outputs, shard.name)
            yield shard.entry

    def check(self) -> None:
        """Check that all shards are current, and delete damaged ones.

        Raises:
            DatasetError: they are not, or two versions of the model's code computed them.
        """
        output, folder = self.state.output, self.state.output.folder
        damaged = [shard for shard in self.unfinished if shard.status is Status.DAMAGED]
        for shard in damaged:
            folder.delete(shard.name, self.state.entries[shard.name].tag)  # Unless an attempt has replaced it.
        if damaged:
            raise DatasetError(
                f"{folder.location!r} cannot be committed, {len(damaged)} of {output.shards} shards were damaged after they had "
                f"been written ({damaged[0].problem or damaged[0].failures_problem}): run the same command again to rewrite them"
            )
        for shard in self.unfinished:
            path = folder.path_of(shard.name)
            if shard.status is Status.CLAIMED:
                raise DatasetError(f"another attempt writes {path}, or was stopped: run the same command again")
            fault = "missing" if shard.status is Status.MISSING else "a file of another dataset"
            raise DatasetError(f"{path} is {fault} after the run: run the same command again")
        (first, first_name), *others = [*self.sample_outputs.items()] or [((), "")]
        for outputs, name in others:
            if not are_equal(outputs, first, output.parameters):
                raise DatasetError(
                    f"{folder.location!r} cannot be committed: {first_name} and {name} were computed by different versions of the "
                    "model's code, which differ beyond rounding. Use one version on all machines, and give --overwrite"
                )
