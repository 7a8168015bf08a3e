"""``imagepivot reproduce``: train and measure the rows of a paper's tables.

The commands ``train`` and ``evaluate`` run in separate processes, see `schemas.process.steps`, in parallel on
the devices. An ensemble is evaluated on the runs of its members.

A run writes ``results/PRESET/seed-N.json`` into the output folder, or ``failed-seed-N.json`` if it fails.
Existing results are kept. The same command resumes interrupted runs and retries failed ones. Rows that need
other data can be added by another command with the same output.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any, TypeAlias

import torch

from schemas.console.events import Remark
from schemas.dataset import Dataset, open_dataset
from schemas.errors import DatasetError, ImagepivotError, UsageError, errno_of
from schemas.fingerprints import sha256_of_bytes
from schemas.options import takes_fields
from schemas.parameters import untrained_remark
from schemas.process import steps
from schemas.process.devices import check_precision
from schemas.process.resources import bfloat16_remark
from schemas.storage.folder import Folder
from schemas.vocabulary import SPECIALS
from schemas.writing.locks import lock_folder
from train.config.sections import Config, load_config, to_toml
from train.data.captions import labels_of, read_captions
from train.data.feature_checks import find_feature_outliers
from train.data.features import read_features
from train.data.splits import TEST_SPLITS, leave_out_missing
from train.devices import choose_device
from train.evaluation.scores import portions_in
from train.jobs import Corpus, ReproduceJob
from train.loop.training_data import contents_of, validation_portions
from train.reports.published import ENSEMBLES, rows_of_paper
from train.reports.row_datasets import OPTIONAL_DATASETS, corpora_of
from train.reports.row_results import FailedRun, Failure, read_failure, read_result, results_folder, write_failure, write_result
from train.reports.score_report import EVALUATION
from train.runs.checkpoints import LAST, read_checkpoint
from train.runs.history import read_history

logger = logging.getLogger(__name__)

Labels: TypeAlias = Mapping[tuple[str, str, str], int]
"""Numbers of captions by split, language and portion, see `train.data.captions.labels_of`."""

NO_MEMORY_ADVICE = "give fewer --workers, a smaller schedule.batch_size, or --memory-map FOLDER"

_TRACEBACK = "traceback.txt"
_MAX_CHARACTERS = 200
# Torch has an exception class for GPU memory, but not for that of the host.
_NO_MEMORY = re.compile(
    r"MemoryError|out of ?memory|can't allocate memory|cannot allocate memory|alloc_failed|unable to find an engine",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Task:
    """One run of one row.

    Attributes:
        config: its configuration; of an ensemble, that of the first member.
        contents: digests of the content of its datasets, see `train.loop.training_data.contents_of`.
        splits: splits to measure it on.
        members: tasks of the members of an ensemble; empty for a single model.
    """

    preset: str
    seed: int
    config: Config
    job: ReproduceJob
    corpus: Corpus
    fingerprints: Mapping[str, str]
    contents: Mapping[str, str]
    splits: tuple[str, ...]
    members: tuple[Task, ...] = ()

    @property
    def run(self) -> Path:
        """Folder of the run."""
        return Path(self.job.output, "runs", self.preset, f"seed-{self.seed}")

    @property
    def result(self) -> Path:
        """File with the measurements."""
        return results_folder(self.job.output, self.preset) / f"seed-{self.seed}.json"

    @property
    def failure(self) -> Path:
        """File with the failure of a run without a result."""
        return self.result.with_name(f"failed-{self.result.name}")

    @property
    def evaluation(self) -> Path:
        """Folder of ``evaluation.json`` and ``ranks.parquet``, beside the result."""
        return self.result.with_suffix("")

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that the result depends on, except the machine."""
        configs: dict[str, Any] = {"config": to_toml(self.config)}
        if self.members:
            configs = {"members": {member.preset: to_toml(member.config) for member in self.members}}
        data = {"fingerprints": dict(self.fingerprints), "contents": dict(self.contents)}
        return {**configs, **data, "precision": self.job.precision, "seed": self.seed, "split": self.job.split}

    def is_done(self) -> bool:
        """Return whether the result exists.

        Raises:
            DatasetError: the existing result is from other data or another configuration.
        """
        if not self.result.exists():
            return False
        stored = read_result(self.result)
        if differing := [name for name, value in self.identity.items() if stored.get(name) != value]:
            raise DatasetError(
                f"{str(self.result)!r} was measured with other {' and '.join(differing)}: nothing was "
                "trained. Choose another output folder, or delete that file and its run"
            )
        return True

    def end(self, failure: Failure | None) -> None:
        """Write the failure of the run if possible, or delete that of an earlier attempt."""
        if failure is None:
            self.failure.unlink(missing_ok=True)
        else:
            with suppress(DatasetError):
                write_failure(self.failure, failure, {"preset": self.preset, **self.identity})
        if failure is not None and failure.traceback:
            with suppress(DatasetError):
                Folder(str(self.run)).put(_TRACEBACK, failure.traceback.encode())
        else:
            (self.run / _TRACEBACK).unlink(missing_ok=True)

    def train_words(self, device: str) -> list[str]:
        """Return the command that trains the run, or resumes its training."""
        options = {"seed": self.seed, "precision": self.job.precision, "resume": True, "no_tensorboard": True}
        settings = [f"--set={key}={value}" for key, value in self.job.overrides.items()]
        return ["train", self.preset, str(self.run), *settings, *self._options(device, **vars(self.corpus), **options)]

    def evaluate_words(self, device: str) -> list[str]:
        """Return the command that measures the run, or the ensemble of its members."""
        runs = (str(task.run) for task in self.members or (self,))
        data = {name: getattr(self.corpus, name) for name in ("captions", "features", "token_features")}
        return ["evaluate", *runs, *self._options(device, **data, splits=",".join(self.splits), output=self.evaluation)]

    def _options(self, device: str, **options: Any) -> list[str]:
        options |= {"device": device, "log_json": True, "memory_map": self.job.memory_map}
        options |= {"allow_missing_features": self.job.allow_missing_features}
        set_options = {key: value for key, value in options.items() if value not in (None, "") and value is not False}
        flags = {f"--{key.replace('_', '-')}": value for key, value in set_options.items()}
        return [flag if value is True else f"{flag}={value}" for flag, value in flags.items()]


@dataclass(frozen=True)
class FinishedRun:
    """A finished run, the ``count``-th of ``total``, with its failure if it has one."""

    task: Task
    count: int
    total: int
    failure: Failure | None = None


@takes_fields(ReproduceJob)
def reproduce(
    job: ReproduceJob, on_report: Callable[[FinishedRun], None] = lambda done: None, on_warning: Remark = logger.warning
) -> tuple[FailedRun, ...]:
    """Train and measure every row that has no result yet.

    A failed or killed run does not end the others. The next call retries them from their last checkpoints, diverged ones anew.

    ``on_report`` is called for every run that has ended, first for those of earlier calls. ``on_warning`` receives warnings about
    emulated precision, skipped rows, missing features, and features of zeros or unusual norms.

    Returns:
        The runs that failed.

    Raises:
        ImagepivotError: an argument or the data is wrong, or an existing result has other data or settings; nothing was trained.
    """
    Folder(job.output).check_writable()
    device = choose_device(job.device)
    check_precision(job.precision, device)
    corpora, skipped = corpora_of(job)
    captions = open_dataset(job.captions, kind="encoded")
    labels = labels_of(captions)
    tasks = list(_tasks(job, corpora, labels))
    remarks = _check_data(tasks, job, captions, labels)
    for sentence in filter(None, (bfloat16_remark(job.precision, device.type), *skipped, *remarks)):
        on_warning(sentence)
    with lock_folder(Folder(job.output)):
        failed = []
        for count, (task, failure) in enumerate(_run_all(tasks, job), start=1):
            task.end(failure)
            on_report(FinishedRun(task, count, len(tasks), failure))
            if failure is not None:
                failed.append(FailedRun(task.preset, task.seed, failure))
        return tuple(failed)


def _tasks(job: ReproduceJob, corpora: Mapping[str, Corpus], labels: Labels) -> Iterator[Task]:
    """Yield tasks by seed, so that interrupted tables have no gaps; ensembles last."""
    fingerprints = {preset: _fingerprints(corpus, job) for preset, corpus in corpora.items()}
    contents = {preset: contents_of(corpus) for preset, corpus in corpora.items()}
    tasks: dict[tuple[str, int], Task] = {}
    for seed in range(job.seeds):
        for preset, corpus in corpora.items():
            members = tuple(tasks[member, seed] for member in ENSEMBLES.get(preset, ()))
            config = members[0].config if members else load_config(preset, job.overrides)
            paper_splits = tuple(split for split in TEST_SPLITS if portions_in(labels, split, config.data.languages))
            splits = (job.split,) if job.split else paper_splits
            digests = fingerprints[preset], contents[preset]
            tasks[preset, seed] = Task(preset, seed, config, job, corpus, *digests, splits, members)
    yield from sorted(tasks.values(), key=lambda task: bool(task.members))


def _fingerprints(corpus: Corpus, job: ReproduceJob) -> dict[str, str]:
    kinds = {"captions": "encoded", "features": None} | {name: name.replace("_", "-") for name in OPTIONAL_DATASETS}
    fingerprints = {
        name: open_dataset(location, kind=kinds.get(name, name)).fingerprint
        for name, location in vars(corpus).items()
        if location or name not in OPTIONAL_DATASETS
    }
    if job.allow_missing_features:
        # The fingerprint of features does not depend on their images, but the results do.
        ids = sorted(open_dataset(corpus.features).image_ids())
        fingerprints["images"] = sha256_of_bytes("".join(f"{image_id}\n" for image_id in ids).encode())
    return fingerprints


def _check_data(tasks: Sequence[Task], job: ReproduceJob, captions: Dataset, labels: Labels) -> list[str]:
    """Check that captions and features cover the training and test data of all rows.

    Returns:
        Warnings about missing features, if the job allows them, and about outliers among features that are still needed.
    """
    test_splits = (job.split,) if job.split else TEST_SPLITS
    available = {(language, portion) for split, language, portion in labels if split in test_splits}
    # Portions by features, split and language, so that each split is read once for all rows.
    needed_portions: dict[str, dict[str | tuple[str, ...], dict[str, set[str]]]] = {}
    for task in {task.preset: task for task in tasks if not task.members}.values():
        data = task.config.data
        needed = {(language, portion) for language, portions in data.portions.items() for portion in portions}
        if not job.split:
            needed |= {(row.language, row.portion) for row in rows_of_paper(job.paper) if row.preset == task.preset}
        elif job.split in data.splits:
            raise UsageError(f"--split is {job.split!r}, which {task.preset} is trained on: name another split")
        if missing := sorted(needed - available):
            raise DatasetError(
                f"{task.preset} needs captions of {', '.join(map(' '.join, missing))}, which {job.captions!r} does not have "
                f"in split {' or '.join(test_splits)}: encode captions that have them, or choose other rows with --rows"
            )
        measured = {split: portions_in(labels, split, data.languages) for split in test_splits}
        validated = validation_portions(task.config, job.captions)
        for split, portions in ((data.split, data.portions), (data.validation_split, validated), *measured.items()):
            for language, names in portions.items():
                by_split = needed_portions.setdefault(task.corpus.features, {})
                by_split.setdefault(split, {}).setdefault(language, set()).update(names)
    remarks: list[str] = []
    trains = not all(task.result.exists() for task in tasks)
    for location, by_split in needed_portions.items():
        features = open_dataset(location)
        remarks += filter(None, [untrained_remark(features.untrained)])
        for split, by_language in by_split.items():
            all_portions = {language: sorted(names) for language, names in by_language.items()}
            chosen = read_captions(captions, split=split, portions=all_portions)
            missing_features, chosen = leave_out_missing(chosen, features, allow_missing_features=job.allow_missing_features)
            remarks += [missing_features.remark] if missing_features is not None else []
            if trains:
                values = read_features(features, chosen.image_ids, memory_map=job.memory_map)
                outliers = find_feature_outliers(chosen.split, values, chosen.image_ids)
                remarks += [outliers.remark] if outliers is not None else []
    return remarks


def _run_all(tasks: Sequence[Task], job: ReproduceJob) -> Iterator[tuple[Task, Failure | None]]:
    """Yield the finished runs of earlier calls, then run and yield the others."""
    devices = _devices(job)[: len(tasks)]
    # Oversubscribed cores slow down each matrix product.
    variables = {"OMP_NUM_THREADS": "1"} if len(devices) > 1 else {}
    done = [task.is_done() for task in tasks]
    yield from ((task, None) for task, is_done in zip(tasks, done, strict=True) if is_done)
    remaining = [task for task, is_done in zip(tasks, done, strict=True) if not is_done]
    for are_ensembles in (False, True):  # Members are trained before their ensembles are measured.
        due = [task for task in remaining if bool(task.members) == are_ensembles]
        yield from steps.run_side_by_side(lambda task, device: _run(task, device, variables), due, devices)


def _devices(job: ReproduceJob) -> list[str]:
    """Return a device for each parallel run."""
    device = choose_device(job.device)
    if device.type == "cpu":
        return ["cpu"] * (job.workers or os.cpu_count() or 1)
    devices = [str(device)]
    if job.device in ("auto", "cuda"):
        devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    return [devices[index % len(devices)] for index in range(job.workers or len(devices))]


def _run(task: Task, device: str, variables: Mapping[str, str]) -> Failure | None:
    """Train and measure a row and write its result, or only measure an ensemble."""
    stored = read_failure(task.failure)
    if stored is not None and stored.kind == "diverged":  # Resuming its last checkpoint would diverge again.
        shutil.rmtree(task.run, ignore_errors=True)
        task.failure.unlink()
    for member in task.members:
        if not member.result.exists():
            reason = f"the run of its member {member.preset} with seed {member.seed} failed: nothing is scored together"
            return Failure("refused", reason)
    if not task.members and (failure := _run_command(task.train_words(device), variables)):
        return failure
    if failure := _run_command(task.evaluate_words(device), variables):
        return failure
    try:
        overrides = [f"{key}={value}" for key, value in sorted(task.job.overrides.items())]
        common = {**task.identity, "preset": task.preset, "overrides": overrides}
        scores = json.loads((task.evaluation / EVALUATION).read_bytes())["scores"]
        write_result(task.result, common | _data_and_steps(task) | {"scores": scores})
    except ImagepivotError as error:
        return failure_of(type(error).__name__, str(error), errno_of(error))
    if not task.members:
        (task.run / LAST).unlink()  # The optimizer state is twice the size of the model, and no longer needed.
    return None


def _run_command(words: Sequence[str], variables: Mapping[str, str]) -> Failure | None:
    """Run a command, and return its failure."""
    lines: list[str] = []
    errors: list[dict[str, Any]] = []

    def read(line: str) -> None:
        try:
            event = json.loads(line)
        except ValueError:  # Output of the interpreter, before logging begins or in a crash.
            lines.append(line)
        else:
            errors.extend([event] if event["event"] == "error" and "kind" in event else [])

    code = steps.run_command(words, variables, read)
    if code == 0:
        return None
    if errors:
        last = errors[-1]
        return failure_of(last["kind"], last["message"] or "", last.get("errno"), last.get("traceback", ""))
    if code == 128 + signal.SIGKILL:
        return Failure("killed", f"a training process was killed, probably because memory ran out: {NO_MEMORY_ADVICE}")
    how = f"was ended by {signal.Signals(code - 128).name}" if code > 128 else f"ended with exit code {code}"
    return Failure("killed", f"a training process {how}", "".join(lines))


def failure_of(error: str, message: str, number: int | None = None, traceback: str = "") -> Failure:
    """Classify the error of a run by its class and the system's error behind it.

    Memory that ran out has no class of its own, only texts of torch. Only unexpected errors have a traceback.
    """
    message = " ".join(message.split())
    if error == "DivergedError":
        return Failure("diverged", message)
    if number in (errno.ENOSPC, errno.EDQUOT):
        return Failure("disk", f"the disk is full: free some space ({message})" if traceback else message)
    if not traceback:
        return Failure("refused", message)
    reason = shorten(message, _MAX_CHARACTERS, placeholder=" ...")
    if _NO_MEMORY.search(message):
        return Failure("memory", f"memory ran out ({reason}): {NO_MEMORY_ADVICE}")
    return Failure("fault", reason, traceback)


def _data_and_steps(task: Task) -> dict[str, Any]:
    """Return data and numbers of steps of a run, or the data of an ensemble."""
    if task.members:
        first = read_result(task.members[0].result)
        return {name: first[name] for name in ("feature", "untrained", "recipe", "vocabulary")}
    folder = Folder(str(task.run))
    checkpoint, history = read_checkpoint(folder, LAST), read_history(folder)
    counts = {key: value for key, value in next(history.of("training_data"), {}).items() if key not in ("event", "step")}
    features = open_dataset(task.corpus.features)
    missing = list(checkpoint.missing_features.values())
    return {
        "steps": checkpoint.progress.step,
        "step": checkpoint.progress.best_step,
        "feature": "" if features.spec is None else f"{features.spec.name}, {features.spec.source}".rstrip(", "),
        "untrained": list(checkpoint.untrained),
        "recipe": "" if checkpoint.text is None else checkpoint.text.recipe,
        "vocabulary": len(checkpoint.tokens) - len(SPECIALS),
        **counts,
        **({"missing_features": missing} if missing else {}),
    }
