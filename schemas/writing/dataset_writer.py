"""Writing datasets: the commit protocol, in one place.

A run locks the folder, refuses what must not be lost, writes the shards that are not current, in any order and process, and
commits: every shard is looked at again, and the manifest is written last. A run that is killed at any moment leaves finished shards
and no manifest; the same command continues from there.

A task of an array job is such a run over some of the shards, with a lock that it shares. It deletes nothing but the manifest. The
task that finds all shards current commits, as does a run of all shards.

`write_dataset` does all of it in this process. A pipeline, whose shards are written by workers, uses `complete_dataset` around the
pipeline and `commit` as its last step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from importlib import metadata
from typing import Any, TypeAlias

from schemas.errors import CommittedError, DatasetError, UsageError
from schemas.failures import failures_name
from schemas.fingerprints import sha256_of_bytes, sum_digests
from schemas.footers import Footer
from schemas.manifest import FileEntry, Manifest
from schemas.process.shutdown import DetachedError
from schemas.storage.folder import Folder
from schemas.writing.output import PROBE_NAME, OutputDataset, is_leftover
from schemas.writing.output_state import OutputState, ShardState, Status
from schemas.writing.reuse_policy import ArrayTask, ReusePolicy
from schemas.writing.shard_writer import ShardWriter, lock_folder, open_shard, publish_manifest, publishing

Statistics: TypeAlias = Callable[[list[Footer]], Mapping[str, Any]]

_MOST_NAMED = 20


def write_shards(
    output: OutputDataset, numbers: Iterable[int], write_shard: Callable[[int, ShardWriter], object]
) -> Iterator[int]:
    """Write shards one after the other, and yield the number of each when it is published.

    Raises:
        DatasetError: the dataset is committed, or the folder cannot be written.
    """
    for number in numbers:
        with open_shard(output, number) as shard:
            write_shard(number, shard)
        yield number


def write_dataset(
    output: OutputDataset,
    write_shard: Callable[[int, ShardWriter], object],
    policy: ReusePolicy = ReusePolicy(),
    *,
    check: Callable[[], object] = lambda: None,
    libraries: tuple[str, ...] = (),
    statistics: Statistics | None = None,
) -> Manifest:
    """Write a dataset in this process, or what an earlier run left of it to do.

    ``write_shard`` is called for the shards that are missing, in order; other arguments, result and errors are those of
    `complete_dataset`.
    """

    def write_missing(finished: frozenset[int]) -> None:
        for _ in write_shards(output, output.missing(finished), write_shard):
            pass

    return complete_dataset(output, write_missing, policy, check=check, libraries=libraries, statistics=statistics)


def complete_dataset(
    output: OutputDataset,
    write_missing: Callable[[frozenset[int]], bool | None],
    policy: ReusePolicy = ReusePolicy(),
    *,
    task: ArrayTask | None = None,
    check: Callable[[], object] = lambda: None,
    libraries: tuple[str, ...] = (),
    statistics: Statistics | None = None,
) -> Manifest:
    """Lock the folder of a dataset while its missing shards are written, and commit it.

    A shard is missing, too, if it or the failures beside it are damaged, by their sizes, or by digests if the policy verifies.

    Args:
        output: the dataset.
        write_missing: writes all shards but those with the numbers that it is given; returns whether it has committed them, too.
        policy: what the run keeps.
        task: the task of an array job that writes only its own shards; None to write all.
        check: raises where the run cannot succeed; called before anything is replaced, and only if there is something to do.
        libraries: distributions whose versions matter to the content.
        statistics: makes the manifest's statistics from the footers of all shards; `sum_statistics` when None.

    Returns:
        The manifest of the committed dataset.

    Raises:
        DetachedError: shards of other tasks are missing; the message says which tasks to give again.
        UsageError: the task does not go with the number of shards or with the kind of update.
        DatasetError: the folder is in use, or holds something that must not be lost; or all shards are there, and some of other
            tasks are damaged or of another dataset.
    """
    if task is not None:
        return _complete_task(output, task, write_missing, policy, check, libraries)
    with lock_folder(output.folder):
        state = OutputState(output, policy)
        manifest = state.committed_manifest()
        if manifest is not None:
            return manifest
        state.check_compatible()
        _probe(output.folder)
        check()
        finished = state.finished()
        state.clear()
        if write_missing(finished):
            return Manifest.read(output.folder)
        return commit(output, libraries=libraries, statistics=statistics)


def look_before(output: OutputDataset, policy: ReusePolicy, task: ArrayTask | None = None) -> OutputState:
    """Return what the folder holds before a run; arguments and errors are those of `complete_dataset`."""
    if task is None:
        state = OutputState(output, policy)
    else:
        _refuse_update(output, policy)
        state = OutputState(_compared(output, policy), policy, task.shards(output.shards))
    state.check_compatible()
    return state


def _probe(folder: Folder) -> None:
    """Write and delete a file in a store: else hours may pass before the first shard turns out not to be writable."""
    if not folder.is_local:
        folder.write(PROBE_NAME, b"")
        folder.delete(PROBE_NAME)


# --- tasks of an array job -------------------------------------------------------------------------------------------


def _complete_task(
    output: OutputDataset,
    task: ArrayTask,
    write_missing: Callable[[frozenset[int]], bool | None],
    policy: ReusePolicy,
    check: Callable[[], object],
    libraries: tuple[str, ...],
) -> Manifest:
    while True:
        with lock_folder(output.folder, shared=True):
            state = look_before(output, policy, task)
            todo = frozenset(state.numbers) - state.finished()
            try:
                if todo or not state.is_committed():
                    _probe(output.folder)
                    check()
                    state.uncommit()
                    for name, data in output.files.items():
                        output.folder.write(name, data)
                if todo:
                    write_missing(frozenset(range(output.shards)) - todo)
                return _commit_if_done(output, task, policy, libraries)
            except CommittedError:
                continue  # Another task found all shards there before this one had replaced its own.


def _commit_if_done(output: OutputDataset, task: ArrayTask, policy: ReusePolicy, libraries: tuple[str, ...]) -> Manifest:
    """Commit if the shards of all tasks are there; else say which tasks to give again."""
    state, undone = _look_after(output, policy)
    if not undone:
        manifest = state.committed_manifest()
        if manifest is not None:
            return manifest
        # Files that another task has written stay.
        files = tuple(name for name in state.entries if output.is_other_file(name) and name not in output.files)
        try:
            return commit(output, libraries=libraries, files=files)
        except DatasetError:
            state, undone = _look_after(output, policy)
            if not undone and (manifest := state.committed_manifest()) is not None:
                return manifest  # Another task has committed first, with other libraries.
            if not undone:
                raise
            undone = dict.fromkeys(undone, Status.DAMAGED)  # And deleted by the commit.
    kinds = {"missing": (Status.MISSING, Status.CLAIMED), "damaged": (Status.DAMAGED,), "out of date": (Status.STALE,)}
    found = {kind: [number for number, status in undone.items() if status in statuses] for kind, statuses in kinds.items()}
    told = "; ".join(f"{kind} {_ranges(numbers)}" for kind, numbers in found.items() if numbers)
    again = sorted({number % task.count for number in undone})
    message = (
        f"{output.shards - len(undone)} of {output.shards} shards are done; {told}: give {'tasks' if len(again) > 1 else 'task'} "
        f"{_ranges(again, most=None)} of {task.count} again"
    )
    if found["damaged"] and not found["missing"]:
        raise DatasetError(f"{output.folder.location!r} cannot be committed, {message}")
    raise DetachedError(message)


def _look_after(output: OutputDataset, policy: ReusePolicy) -> tuple[OutputState, dict[int, Status]]:
    """Return what the folder holds after a task, and the status of the shards that are not current.

    A store is looked at again where a shard seems to be damaged: an attempt may have published it since the folder was listed.
    """
    for _ in range(1 if output.folder.is_local else 2):
        with publishing(output.folder):
            state = OutputState(_compared(output, policy), ReusePolicy(update=policy.update))
            state.check_compatible()
            statuses = {index: shard.status for index, shard in state.shards().items()}
        undone: dict[int, Status] = {index: status for index, status in statuses.items() if status != Status.CURRENT}
        if Status.DAMAGED not in undone.values():
            break
    return state, undone


def _compared(output: OutputDataset, policy: ReusePolicy) -> OutputDataset:
    """Return the output without modification times, which may differ between machines, unless they say what to update."""
    return output if policy.update else replace(output, states=None)


def _refuse_update(output: OutputDataset, policy: ReusePolicy) -> None:
    """Refuse updates after which a shard does not show whether it is up to date: a task that never ran would go unnoticed."""
    if not policy.update:
        return
    start = "the task that commits must see which tasks have brought their shards up to date: leave out --task"
    if policy.keep_removed or policy.only_add or policy.check_content:
        raise UsageError(f"{start}, or --keep-removed, --only-add and --check-content, after which nothing shows it")
    if output.listings is not None and output.states is None:
        raise UsageError(f"{start}. Listing these images does not tell when they changed, so that nothing shows it")


def _ranges(numbers: Collection[int], most: int | None = _MOST_NAMED) -> str:
    """Return sorted numbers as schedulers write them, e.g. ``0-3,7``."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    named = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges[:most])
    return named if most is None or len(ranges) <= most else f"{named} and more"


# --- the commit ------------------------------------------------------------------------------------------------------


def sum_statistics(footers: list[Footer]) -> dict[str, Any]:
    """Add up the statistics of shards: numbers, and digests of lists, at the same place of nested mappings."""
    total: dict[str, Any] = {}
    for footer in footers:
        _add(total, footer.statistics)
    return total


def _add(total: dict[str, Any], more: Mapping[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, Mapping):
            _add(total.setdefault(key, {}), value)
        elif isinstance(value, str):
            total[key] = sum_digests((total.get(key, "0"), value))
        else:
            total[key] = total.get(key, 0) + value


def commit(
    output: OutputDataset,
    *,
    libraries: tuple[str, ...] = (),
    files: tuple[str, ...] = (),
    statistics: Statistics | None = None,
) -> Manifest:
    """Look at every shard again and write the manifest, last.

    A shard in a local folder is read again. In a store, which keeps checksums of its own, that would take as long as writing it:
    there its record tells the digest, and the listing the size.

    Args:
        output: the folder, with all its shards. What they were made from is not compared.
        libraries: distributions whose versions matter to the content, besides those that write every dataset.
        files: paths of other files that belong to the dataset, besides those that the output knows.
        statistics: makes the manifest's statistics from the footers of all shards; `sum_statistics` when None.

    Raises:
        DatasetError: a shard is missing or of another dataset; or damaged, and is then deleted.
    """
    with publishing(output.folder):
        return _commit(output, libraries, (*files, *output.files), statistics or sum_statistics)


def _commit(output: OutputDataset, libraries: tuple[str, ...], files: tuple[str, ...], statistics: Statistics) -> Manifest:
    folder = output.folder
    state = OutputState(replace(output, listings=None, states=None), ReusePolicy(verify=folder.is_local))
    states = list(state.shards().values())
    _refuse_unfinished(state, states)
    shards = folder.map(lambda number: states[number].entry or state.read(number).entry, range(output.shards))
    footers = [shard.footer for shard in states if shard.footer is not None]
    reasons: Counter[str] = Counter()
    for footer in footers:
        reasons.update(footer.failures.reasons)
    manifest = Manifest(
        kind=output.kind,
        fingerprint=output.fingerprint,
        parameters=output.parameters,
        inputs=tuple(output.inputs),
        libraries={name: metadata.version(name) for name in ("imagepivot", "numpy", "pyarrow", *libraries)},
        shards=tuple(entry for entry in shards if entry is not None),
        failures=tuple(shard.failures for shard in states if shard.failures is not None),
        failure_reasons=dict(reasons),
        files=tuple(_file_entry(folder, name) for name in sorted(files)),
        statistics=statistics(footers),
    )
    beside = {failures_name(shard.name) for shard in states if shard.failures is None}
    # Left by a dataset that was overwritten, by an attempt that was killed or overtaken, or on the way between workers.
    left = [
        name
        for name in sorted(state.entries)
        if is_leftover(name) or name in beside or (output.is_other_file(name) and name not in files)
    ]
    folder.map(folder.delete, left)
    publish_manifest(folder, manifest, state.entries)
    return manifest


def _refuse_unfinished(state: OutputState, states: list[ShardState]) -> None:
    """Refuse to commit shards that are not there; delete those that are damaged, so that the next run makes them again.

    Raises:
        DatasetError: there is one.
    """
    folder = state.output.folder
    damaged = [shard for shard in states if shard.status is Status.DAMAGED]
    for shard in damaged:
        folder.delete(shard.name, state.entries[shard.name].tag)  # Unless an attempt has replaced it meanwhile.
    if damaged:
        raise DatasetError(
            f"{folder.location!r} cannot be committed, {len(damaged)} of {len(states)} shards were damaged after they had been "
            f"written ({damaged[0].problem or damaged[0].failures_problem}): run the same command again, which makes them again"
        )
    for shard in states:
        path = folder.path_of(shard.name)
        if shard.status is Status.CLAIMED:
            raise DatasetError(f"another attempt writes {path}, or was stopped: run the same command again")
        if shard.status is not Status.CURRENT:
            wrong = "missing" if shard.status is Status.MISSING else "a file of another dataset"
            raise DatasetError(f"{path} is {wrong} after the run: run the same command again")


def _file_entry(folder: Folder, name: str) -> FileEntry:
    data = folder.read(name)
    return FileEntry(path=name, bytes=len(data), sha256=sha256_of_bytes(data))
