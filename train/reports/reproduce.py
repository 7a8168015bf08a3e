"""``imagepivot reproduce``: train the rows of a paper's tables, several times each, and measure them.

A run that is trained and measured leaves a file ``results/PRESET/seed-N.json`` in the output folder, one that fails
``failed-seed-N.json``, and the others go on. Existing results are kept: the command can be stopped and given again, which also
tries again what failed, and rows that need other data can be added by another command with the same output.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from schemas.dataset import open_dataset
from schemas.errors import DatasetError
from schemas.fingerprints import sha256_of_bytes
from schemas.process.resources import bfloat16_remark
from schemas.storage.folder import Folder
from schemas.writing.shard_writer import lock_folder
from train.config.sections import resolve
from train.data.captions import labels_of, read_captions
from train.data.feature_checks import find_feature_outliers
from train.data.features import read_features
from train.data.splits import TEST_SPLITS, leave_out_missing
from train.devices import check_precision, resolve_device
from train.evaluation.scores import portions_in
from train.jobs import Corpus, ReproduceJob
from train.loop import Remark
from train.reports.failures import Failure, attempt
from train.reports.parallel import run_parallel
from train.reports.published import ENSEMBLES, rows_of_paper
from train.reports.row_needs import FURTHER, corpora_of, left_out
from train.reports.row_results import FailedRun
from train.reports.row_runs import Task, train_and_measure
from train.training_data import contents_of, validation_portions

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Done:
    """A run that has ended.

    Attributes:
        task: the task of the run.
        count: number of runs that have ended so far.
        total: number of all runs.
        failure: why it has no result; None if it has one.
    """

    task: Task
    count: int
    total: int
    failure: Failure | None = None


def reproduce(
    job: ReproduceJob, watch: Callable[[Done], None] = lambda done: None, remark: Remark = logger.warning
) -> tuple[FailedRun, ...]:
    """Train and measure every row that has no result yet. A run that fails, or whose process is killed, does not end the others.

    A run that has failed is tried again by the next call, from its last checkpoint; one that has diverged, from its beginning.

    Args:
        job: the rows, and how to train them.
        watch: is called for every run that has ended; those that had ended before come first.
        remark: receives a sentence about a precision that is emulated, about the captions that are left out, for each split that
            lacks features, about features of zeros or of unusual norms, and about results that do not tell the content of their
            datasets.

    Returns:
        The runs that failed.

    Raises:
        ImagepivotError: an argument or the data is wrong, or an existing result is from something else; nothing was trained.
    """
    Folder(job.output).check_writable()
    device = resolve_device(job.device)
    check_precision(job.precision, device)
    tasks = list(_tasks(job))
    emulated = bfloat16_remark(job.precision, device.type)
    sentences = (emulated, *left_out(job), *_check_data(tasks, job))
    for sentence in filter(None, sentences):
        remark(sentence)
    with lock_folder(Folder(job.output)):
        return tuple(_failed(tasks, job, watch))


def _tasks(job: ReproduceJob) -> Iterator[Task]:
    """Yield the tasks: all rows with one seed first, so that a table that is stopped early has no gaps; ensembles last."""
    corpora = corpora_of(job)
    fingerprints = {preset: _fingerprints(corpus, job) for preset, corpus in corpora.items()}
    contents = {preset: contents_of(corpus) for preset, corpus in corpora.items()}
    tasks: dict[tuple[str, int], Task] = {}
    for seed in range(job.seeds):
        for preset, corpus in corpora.items():
            members = tuple(tasks[member, seed] for member in ENSEMBLES.get(preset, ()))
            config = members[0].config if members else resolve(preset, job.overrides)
            tasks[preset, seed] = Task(preset, seed, config, job, corpus, fingerprints[preset], contents[preset], members)
    yield from sorted(tasks.values(), key=lambda task: bool(task.members))


def _fingerprints(corpus: Corpus, job: ReproduceJob) -> dict[str, str]:
    """Return the fingerprints of what a row is trained on."""
    kinds = {"captions": "encoded", "features": None} | {name: name.replace("_", "-") for name in FURTHER}
    fingerprints = {
        name: open_dataset(location, kind=kinds.get(name, name)).fingerprint
        for name, location in vars(corpus).items()
        if location or name not in FURTHER
    }
    if job.allow_missing_features:
        # Features may grow; with fewer images the results are others.
        ids = sorted(open_dataset(corpus.features).image_ids())
        fingerprints["images"] = sha256_of_bytes("".join(f"{image_id}\n" for image_id in ids).encode())
    return fingerprints


def _failed(tasks: Sequence[Task], job: ReproduceJob, watch: Callable[[Done], None]) -> Iterator[FailedRun]:
    """Train and measure, and yield the runs that failed."""
    for count, (task, failure) in enumerate(_ended(tasks, job), start=1):
        watch(Done(task, count, len(tasks), failure))
        if failure is not None:
            yield FailedRun(task.preset, task.seed, failure)


def _ended(tasks: Sequence[Task], job: ReproduceJob) -> Iterator[tuple[Task, Failure | None]]:
    """Yield the runs that ended before, then the others as they end."""
    finished, remaining = list[Task](), list[Task]()
    for task in tasks:
        (finished if task.is_done() else remaining).append(task)
    for task in finished:
        task.end(None)
        yield task, None
    for ensembles in (False, True):  # These are measured when their members are trained.
        due = [task for task in remaining if bool(task.members) == ensembles]
        for task, failure in _run_all(due, job, alone=len(tasks) == 1):
            task.end(failure)
            yield task, failure


def _check_data(tasks: Sequence[Task], job: ReproduceJob) -> list[str]:
    """Check, before anything is trained, that captions and features cover what the rows are trained and measured on.

    Returns:
        By split, what to say of images that lack features, if the job allows it, and of features that should be looked at, if
        anything is left to train.
    """
    captions = open_dataset(job.captions, kind="encoded")
    labels = labels_of(captions)
    available = {(language, portion) for split, language, portion in labels if split in TEST_SPLITS}
    # By features, split and language, of all rows: each split is read once.
    portions_read: dict[str, dict[str | tuple[str, ...], dict[str, set[str]]]] = {}
    for task in {task.preset: task for task in tasks if not task.members}.values():
        data = task.config.data
        needed = {(language, portion) for language, portions in data.portions.items() for portion in portions}
        needed |= {(row.language, row.portion) for row in rows_of_paper(job.paper) if row.preset == task.preset}
        if missing := sorted(needed - available):
            raise DatasetError(
                f"{task.preset} needs captions of {', '.join(map(' '.join, missing))}, which {job.captions!r} does not have "
                f"in split {' or '.join(TEST_SPLITS)}: encode captions that have them, or choose other rows with --rows"
            )
        measured = {split: portions_in(labels, split, data.languages) for split in TEST_SPLITS}
        validated = validation_portions(task.config, job.captions)
        for split, portions in ((data.split, data.portions), (data.validation_split, validated), *measured.items()):
            for language, names in portions.items():
                by_split = portions_read.setdefault(task.corpus.features, {})
                by_split.setdefault(split, {}).setdefault(language, set()).update(names)
    remarks, looks = [], not all(task.result.exists() for task in tasks)
    for location, by_split in portions_read.items():
        features = open_dataset(location)
        for split, by_language in by_split.items():
            every = {language: sorted(names) for language, names in by_language.items()}
            chosen = read_captions(captions, split=split, portions=every)
            lacking, chosen = leave_out_missing(chosen, features, allow_missing_features=job.allow_missing_features)
            remarks += [lacking.remark] if lacking is not None else []
            if looks:
                odd = find_feature_outliers(
                    chosen.split, read_features(features, chosen.image_ids, memory_map=job.memory_map), chosen.image_ids
                )
                remarks += [odd.remark] if odd is not None else []
    return remarks


def _run_all(tasks: Sequence[Task], job: ReproduceJob, *, alone: bool) -> Iterator[tuple[Task, Failure | None]]:
    """Run tasks, several at a time, and yield each when it has ended."""
    devices = _devices(job)
    if alone:  # There are no others that a process of its own would protect.
        yield from ((task, attempt(train_and_measure, task, devices[0])) for task in tasks)
        return
    # Threads that share a core wait for each other at every product; one thread per process is much faster.
    yield from run_parallel(train_and_measure if len(devices) == 1 else _with_one_thread, tasks, devices)


def _with_one_thread(task: Task, device: str) -> None:
    torch.set_num_threads(1)
    train_and_measure(task, device)


def _devices(job: ReproduceJob) -> list[str]:
    """Return one device for each run at a time."""
    device = resolve_device(job.device)
    if device.type == "cpu":
        return ["cpu"] * (job.workers or os.cpu_count() or 1)
    if job.device in ("auto", "cuda"):
        devices = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    else:
        devices = [str(device)]
    return [devices[number % len(devices)] for number in range(job.workers or len(devices))]
