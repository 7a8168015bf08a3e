"""Array jobs: tasks that run at the same time write the shards of one dataset, each its own, and a commit at the end finishes it.

The tasks share the lock on a local folder and keep plain runs and the commit out. A task touches only what belongs to its own
shards; temporary files that a killed task left stay until the commit. Beside the shards every task leaves the same small file, the
plan, which tells the commit everything that it cannot read in the shards; the tasks of another job, which would write another
plan, are refused. The commit reads every shard again, writes the manifest, and deletes the plan: the folder then holds the bytes
of one plain run.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from schemas import events
from schemas.errors import DatasetError, UsageError
from schemas.manifest import TASKS_NAME, Manifest
from schemas.storage.folder import ANY, Folder
from schemas.writing.dataset_writer import commit
from schemas.writing.output import OutputDataset, ReusePolicy, UpdatePolicy, hold
from schemas.writing.own_names import left_alone
from schemas.writing.publishing import publishing
from schemas.writing.survey import Survey
from schemas.writing.task_plan import TaskPlan

__all__ = ["ArrayTask", "TaskSummary", "commit_tasks", "complete_task", "survey_task"]

_MOST_NAMED = 20


@dataclass(frozen=True)
class ArrayTask:
    """One of the tasks of an array job. Of ``N`` shards it makes those whose number modulo ``count`` is ``index``.

    Attributes:
        index: number of the task, from 0 to ``count - 1``.
        count: number of tasks.

    Raises:
        UsageError: there is no such task.
    """

    index: int
    count: int

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise UsageError(
                f"--task is '{self}', expected I/N with I from 0 to N - 1: tasks are numbered from 0, the first of 64 is 0/64"
            )

    @classmethod
    def parse(cls, text: str) -> ArrayTask:
        """Read a task as ``--task`` takes it, e.g. ``3/64``.

        Raises:
            UsageError: it is not written like that, or there is no such task.
        """
        if re.fullmatch(r"[0-9]+/[0-9]+", text) is None:
            raise UsageError(
                f"--task is {text!r}, expected I/N, e.g. 0/64 for the first of 64 tasks: check the variable with the number of "
                "the task"
            )
        index, _, count = text.partition("/")
        return cls(int(index), int(count))

    def shards(self, shards: int) -> range:
        """Return the numbers of the task's shards, of a dataset with so many.

        Raises:
            UsageError: there are more tasks than shards.
        """
        if self.count > shards:
            raise UsageError(
                f"--task is '{self}', and there are {shards} shards: a task makes whole shards, so that {self.count - shards} of "
                f"the {self.count} tasks would have nothing to do. Give all tasks --shards {self.count} or more, or make them fewer"
            )
        return range(self.index, shards, self.count)

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


@dataclass(frozen=True)
class TaskSummary:
    """What a task has done.

    Attributes:
        task: the task.
        shards: numbers of its shards, all of them finished.
        made: number of shards that were not finished before.
        rows: number of rows in its shards.
        failure_reasons: number of failures in its shards, by reason.
    """

    task: ArrayTask
    shards: tuple[int, ...]
    made: int
    rows: int
    failure_reasons: Mapping[str, int]

    @property
    def failed(self) -> int:
        """Number of inputs that failed."""
        return sum(self.failure_reasons.values())


def complete_task(
    output: OutputDataset,
    task: ArrayTask,
    make_missing: Callable[[frozenset[int]], object],
    policy: ReusePolicy = ReusePolicy(),
    *,
    libraries: tuple[str, ...] = (),
    check: Callable[[], object] = lambda: None,
) -> TaskSummary:
    """Share the folder of a dataset with other tasks while the missing shards of one task are written, if there are any.

    Args:
        output: folder and identity of the dataset.
        task: which shards to make.
        make_missing: writes all shards but those with the numbers that it is given.
        policy: what the task keeps of its shards.
        libraries: distributions whose versions matter to the content.
        check: raises where the task cannot succeed; called before anything is written, and only if there is something to do.

    Raises:
        UsageError: the task does not go with the number of shards or with the kind of update.
        DatasetError: a run that is no task writes to the folder, or the folder holds something that must not be lost.
    """
    mine, folder = task.shards(output.shards), output.folder
    with hold(folder, shared=True):
        survey, plan = _survey(output, task, policy, libraries)
        todo = frozenset(mine) - survey.finished()
        if todo or not survey.is_committed():
            check()
            if survey.has_manifest:
                whole = Survey(output)
                whole.uncommit(whole.usable())
            for name, data in output.files.items():
                folder.write(name, data)
            plan.write(folder)  # Before the first shard; and it shows at once whether the folder can be written to.
            for number in sorted(todo - survey.usable()):
                _delete_damaged(output, number, verify=policy.verify)
        if todo:
            make_missing(frozenset(range(output.shards)) - todo)
        return _summary(output, task, made=len(todo))


def survey_task(
    output: OutputDataset, task: ArrayTask, policy: ReusePolicy = ReusePolicy(), *, libraries: tuple[str, ...] = ()
) -> Survey:
    """Return what the folder holds of a task's shards; nothing is written. Arguments and errors are those of `complete_task`."""
    return _survey(output, task, policy, libraries)[0]


def commit_tasks(path: str | os.PathLike[str]) -> Manifest:
    """Finish the dataset whose shards the tasks of an array job have written. A dataset that is finished stays as it is.

    Args:
        path: the dataset's folder.

    Returns:
        The manifest of the committed dataset.

    Raises:
        DatasetError: a task still runs; or shards are missing or damaged, and the message says which tasks to give again.
    """
    folder = Folder(os.fspath(path))
    if folder.size(TASKS_NAME) is None:
        return Manifest.read(folder)
    with hold(folder):
        plan = TaskPlan.read(folder)
        if plan is None:
            return Manifest.read(folder)
        output = plan.output(folder)
        survey = Survey(output)
        manifest = survey.complete()
        if others := survey.left_alone():
            events.remark(left_alone(folder.location, others))
        if manifest is None:
            _refuse_unfinished(output, survey, plan.tasks)
            manifest = _commit(output, survey, plan)
        folder.delete(TASKS_NAME)
        return manifest


def _commit(output: OutputDataset, survey: Survey, plan: TaskPlan) -> Manifest:
    survey.uncommit(range(output.shards))
    try:
        return commit(output, libraries=plan.libraries)
    except DatasetError:
        # The first damaged shard was found and deleted: find all, so that all can be made again at once.
        survey = Survey(output, ReusePolicy(verify=True))
        for number in set(range(output.shards)) - survey.usable():
            output.folder.delete(output.name(number))
        _refuse_unfinished(output, survey, plan.tasks)
        raise


def _survey(output: OutputDataset, task: ArrayTask, policy: ReusePolicy, libraries: tuple[str, ...]) -> tuple[Survey, TaskPlan]:
    _refuse_update(output, policy.update)
    plan = TaskPlan.of(output, tasks=task.count, libraries=libraries, updates=policy.update is not None)
    stored = TaskPlan.read(output.folder)
    if stored is None:
        Survey(
            output, ReusePolicy(update=policy.update)
        ).refuse()  # Of all shards: where a plan is, a task has done that before.
    else:
        plan = plan.joined(stored, output, updates=policy.update is not None)
    survey = Survey(output, policy, only=task.shards(output.shards))
    survey.refuse()
    return survey, plan


def _refuse_update(output: OutputDataset, update: UpdatePolicy | None) -> None:
    """Refuse updates after which a shard does not show whether it is up to date: a task that never ran would go unnoticed."""
    if update is None:
        return
    start = "the commit must see which tasks have brought their shards up to date: leave out --task"
    if update != UpdatePolicy():
        raise UsageError(f"{start}, or --keep-removed, --only-add and --check-content, after which nothing shows it")
    if output.listings is not None and output.states is None:
        raise UsageError(f"{start}. Listing these images does not tell when they changed, so that nothing shows it")


def _delete_damaged(output: OutputDataset, number: int, *, verify: bool) -> None:
    """Delete a damaged shard of this task, so that nothing of it is used, unless another copy of the task has made it meanwhile."""
    name, folder = output.name(number), output.folder
    with publishing(folder):  # Else a shard whose record is just being published would seem to be damaged.
        tag = folder.tag(name) if folder.has_tags else ANY
        if folder.size(name) is not None and number not in Survey(output, ReusePolicy(verify=verify), only={number}).usable():
            folder.delete(name, tag or ANY)


def _summary(output: OutputDataset, task: ArrayTask, *, made: int) -> TaskSummary:
    shards, rows = tuple(task.shards(output.shards)), 0
    reasons: Counter[str] = Counter()
    for number in shards:
        footer = output.footer(number)
        if footer is None:
            raise DatasetError(f"{output.folder.path_of(output.name(number))} is missing after the task: give the task again")
        rows += footer.rows
        reasons.update(footer.failures.reasons)
    return TaskSummary(task, shards, made, rows, dict(sorted(reasons.items())))


def _refuse_unfinished(output: OutputDataset, survey: Survey, tasks: int) -> None:
    """Say which shards are not finished, why, and which tasks make them."""
    unfinished = sorted(set(range(output.shards)) - survey.finished())
    if not unfinished:
        return
    whys: dict[str, list[int]] = {}
    for number in unfinished:
        if number in survey.usable():
            why = "made from other images"
        elif output.folder.size(output.name(number)) is None:
            why = "missing"
        else:
            why = "damaged, or of another dataset"
        whys.setdefault(why, []).append(number)
    found = "; ".join(f"{why}: {_ranges(numbers)}" for why, numbers in whys.items())
    again = {number % tasks for number in unfinished}
    raise DatasetError(
        f"{output.folder.location!r} cannot be committed, {len(unfinished)} of {output.shards} shards are not there ({found}). "
        f"Give {len(again)} of the {tasks} tasks again, numbered from 0: {_ranges(sorted(again), most=None)}; then give this "
        "command again"
    )


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
