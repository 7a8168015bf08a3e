"""``imagepivot reproduce``: train the rows of a paper's tables, several times each, and measure them.

A row is trained by the command ``train`` and measured by ``evaluate``, each in a process of its own, see `schemas.process.steps`;
rows run side by side, one device each. An ensemble is evaluated on the runs of its members.

A run that is trained and measured leaves a file ``results/PRESET/seed-N.json`` in the output folder, one that fails
``failed-seed-N.json``, and the others go on. Existing results are kept: the command can be stopped and given again, which also
tries again what failed, and rows that need other data can be added by another command with the same output.
"""

from __future__ import annotations

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
from typing import Any

import torch

from schemas.dataset import open_dataset
from schemas.errors import DatasetError, ImagepivotError
from schemas.fingerprints import sha256_of_bytes
from schemas.parameters import EncodedParameters, FeaturesParameters
from schemas.process import steps
from schemas.process.resources import bfloat16_remark
from schemas.storage.folder import Folder
from schemas.vocabulary import SPECIALS
from schemas.writing.shard_writer import lock_folder
from train.config.sections import Config, resolve, to_toml
from train.data.captions import labels_of, read_captions
from train.data.feature_checks import find_feature_outliers
from train.data.features import read_features
from train.data.splits import TEST_SPLITS, leave_out_missing
from train.devices import check_precision, resolve_device
from train.evaluation.scores import portions_in
from train.jobs import Corpus, ReproduceJob
from train.loop import Remark
from train.reports.published import ENSEMBLES, rows_of_paper
from train.reports.row_datasets import OPTIONAL_DATASETS, corpora_of, left_out
from train.reports.row_results import (
    FailedRun,
    Failure,
    read_failure,
    read_result,
    results_folder,
    write_failure,
    write_result,
)
from train.runs.checkpoints import LAST, read_checkpoint
from train.runs.history import read_history
from train.training_data import contents_of, validation_portions

logger = logging.getLogger(__name__)

NO_MEMORY_ADVICE = "give fewer --workers, a smaller schedule.batch_size, or --memory-map FOLDER"

_TRACEBACK = "traceback.txt"
_WIDTH = 200
_FULL = re.compile(r"the disk is full|\[Errno (28|122)\]")
# Torch has a class of its own for a GPU's memory, and for that of the machine only words.
_NO_MEMORY = re.compile(
    r"MemoryError|out of ?memory|can't allocate memory|cannot allocate memory|alloc_failed|unable to find an engine",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Task:
    """One run of one row.

    Attributes:
        contents: content of what it is trained on, see `train.training_data.contents_of`.
        members: of an ensemble, the tasks whose runs are scored together; then ``config`` is that of the first.
    """

    preset: str
    seed: int
    config: Config
    job: ReproduceJob
    corpus: Corpus
    fingerprints: Mapping[str, str]
    contents: Mapping[str, str]
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
        """File that says why the run failed, while it has no result."""
        return self.result.with_name(f"failed-{self.result.name}")

    @property
    def identity(self) -> dict[str, Any]:
        """Everything but the machine that the result depends on."""
        made_of: dict[str, Any] = {"config": to_toml(self.config)}
        if self.members:
            made_of = {"members": {member.preset: to_toml(member.config) for member in self.members}}
        made_of |= {"fingerprints": dict(self.fingerprints), "contents": dict(self.contents)}
        return {**made_of, "precision": self.job.precision, "seed": self.seed}

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
                f"{str(self.result)!r} was measured with other {' and '.join(differing)}: nothing was trained. Choose another "
                "output folder, or delete that file and its run"
            )
        return True

    def end(self, failure: Failure | None) -> None:
        """Keep why the run failed, as far as the disk allows; or forget why it did before, if it did not."""
        trace = self.run / _TRACEBACK
        if failure is None:
            self.failure.unlink(missing_ok=True)
        else:
            with suppress(DatasetError):
                write_failure(self.failure, failure, {"preset": self.preset, **self.identity})
        if failure is not None and failure.traceback:
            with suppress(DatasetError):
                Folder(str(self.run)).write(_TRACEBACK, failure.traceback.encode())
        else:
            trace.unlink(missing_ok=True)

    def train_words(self, device: str) -> list[str]:
        """Return the command that trains the run, or continues its training."""
        options = {"seed": self.seed, "precision": self.job.precision, "resume": True, "no_tensorboard": True}
        settings = [f"--set={key}={value}" for key, value in self.job.overrides.items()]
        return ["train", self.preset, str(self.run), *settings, *self._options(device, **vars(self.corpus), **options)]

    def evaluate_words(self, device: str, output: Path) -> list[str]:
        """Return the command that measures the run, or of an ensemble those of its members together."""
        runs = (str(task.run) for task in self.members or (self,))
        data = {name: getattr(self.corpus, name) for name in ("captions", "features", "token_features")}
        return ["evaluate", *runs, *self._options(device, **data, output=output)]

    def _options(self, device: str, **options: Any) -> list[str]:
        options |= {"device": device, "log_json": True, "memory_map": self.job.memory_map}
        options |= {"allow_missing_features": self.job.allow_missing_features}
        given = {
            key.replace("_", "-"): value for key, value in options.items() if value not in (None, "") and value is not False
        }
        return [f"--{name}" if value is True else f"--{name}={value}" for name, value in given.items()]


@dataclass(frozen=True)
class FinishedRun:
    """A run that has ended, as the ``count``-th of ``total``; with its failure where it has no result."""

    task: Task
    count: int
    total: int
    failure: Failure | None = None


def reproduce(
    job: ReproduceJob, watch: Callable[[FinishedRun], None] = lambda done: None, remark: Remark = logger.warning
) -> tuple[FailedRun, ...]:
    """Train and measure every row that has no result yet. A run that fails, or whose process is killed, does not end the others.

    A run that has failed is tried again by the next call, from its last checkpoint; one that has diverged, from its beginning.

    ``watch`` is called for every run that has ended; those that had ended before come first. ``remark`` receives a sentence
    about a precision that is emulated, about the captions that are left out, for each split that lacks features, and about
    features of zeros or of unusual norms.

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
        failed = []
        for count, (task, failure) in enumerate(_run_all(tasks, job), start=1):
            task.end(failure)
            watch(FinishedRun(task, count, len(tasks), failure))
            if failure is not None:
                failed.append(FailedRun(task.preset, task.seed, failure))
        return tuple(failed)


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
    kinds = {"captions": "encoded", "features": None} | {name: name.replace("_", "-") for name in OPTIONAL_DATASETS}
    fingerprints = {
        name: open_dataset(location, kind=kinds.get(name, name)).fingerprint
        for name, location in vars(corpus).items()
        if location or name not in OPTIONAL_DATASETS
    }
    if job.allow_missing_features:
        # Features may grow; with fewer images the results are others.
        ids = sorted(open_dataset(corpus.features).image_ids())
        fingerprints["images"] = sha256_of_bytes("".join(f"{image_id}\n" for image_id in ids).encode())
    return fingerprints


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


def _run_all(tasks: Sequence[Task], job: ReproduceJob) -> Iterator[tuple[Task, Failure | None]]:
    """Yield the runs that ended before, then run the others, and yield each when it has ended."""
    devices = _devices(job)[: len(tasks)]
    # Threads that share a core wait for each other at every product; one thread per process is much faster.
    variables = {"OMP_NUM_THREADS": "1"} if len(devices) > 1 else {}
    ended = [task.is_done() for task in tasks]
    yield from ((task, None) for task, is_done in zip(tasks, ended, strict=True) if is_done)
    remaining = [task for task, is_done in zip(tasks, ended, strict=True) if not is_done]
    for ensembles in (False, True):  # These are measured when their members are trained.
        due = [task for task in remaining if bool(task.members) == ensembles]
        yield from steps.run_side_by_side(lambda task, device: _run(task, device, variables), due, devices)


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


def _run(task: Task, device: str, variables: Mapping[str, str]) -> Failure | None:
    """Train and measure a row, and write its result; of an ensemble, whose members are trained, only measure it."""
    stored = read_failure(task.failure)
    if stored is not None and stored.kind == "diverged":  # From its last checkpoint it would diverge again, all the sooner.
        shutil.rmtree(task.run, ignore_errors=True)
        task.failure.unlink()
    scores = task.result.with_name(f"scores-{task.result.name}")
    for member in task.members:
        if not member.result.exists():
            reason = f"the run of its member {member.preset} with seed {member.seed} failed: nothing is scored together"
            return Failure("refused", reason)
    if not task.members and (failure := _run_command(task.train_words(device), variables)):
        return failure
    if failure := _run_command(task.evaluate_words(device, scores), variables):
        return failure
    try:
        content = _common_content(task) if task.members else _trained_content(task)
        write_result(task.result, content | {"scores": json.loads(scores.read_bytes())["scores"]})
    except ImagepivotError as error:
        return failure_of(type(error).__name__, str(error))
    scores.unlink()
    if not task.members:
        (task.run / LAST).unlink()  # The state of the optimizer is twice the size of the model, and no longer needed.
    return None


def _run_command(words: Sequence[str], variables: Mapping[str, str]) -> Failure | None:
    """Run a command, and return why it failed."""
    lines: list[str] = []
    errors: list[dict[str, Any]] = []

    def read(line: str) -> None:
        try:
            event = json.loads(line)
        except ValueError:  # The process has crashed, or not begun yet.
            lines.append(line)
        else:
            errors.extend([event] if event["event"] == "error" and "kind" in event else [])

    code = steps.run_command(words, variables, read)
    if code == 0:
        return None
    if errors:
        return failure_of(errors[-1]["kind"], errors[-1]["message"] or "", errors[-1].get("traceback", ""))
    if code == 128 + signal.SIGKILL:
        return Failure("killed", f"a training process was killed, probably because memory ran out: {NO_MEMORY_ADVICE}")
    how = f"was ended by {signal.Signals(code - 128).name}" if code > 128 else f"ended with exit code {code}"
    return Failure("killed", f"a training process {how}", "".join(lines))


def failure_of(error: str, message: str, traceback: str = "") -> Failure:
    """Say by kind, and in a line, why an error ended a run.

    The error is the name of its class; it has a traceback if nobody expected it.
    """
    message = " ".join(message.split())
    if error == "DivergedError":
        return Failure("diverged", message)
    if _FULL.search(message):
        return Failure("disk", f"the disk is full: free some space ({message})" if traceback else message)
    if traceback and _NO_MEMORY.search(f"{error} {message}"):
        detail = shorten(message.removeprefix(f"{error}:"), _WIDTH, placeholder=" ...")
        return Failure("memory", f"memory ran out{f' ({detail})' if detail else ''}: {NO_MEMORY_ADVICE}")
    if not traceback:
        return Failure("refused", message)
    return Failure("fault", shorten(message, _WIDTH, placeholder=" ..."), traceback)


def _common_content(task: Task) -> dict[str, Any]:
    """Return what the result of an ensemble says of it besides its scores: what its members have in common."""
    first = read_result(task.members[0].result)
    common = {name: first[name] for name in ("feature", "untrained", "recipe", "vocabulary")}
    return task.identity | {"preset": task.preset, "overrides": _overrides(task.job)} | common


def _trained_content(task: Task) -> dict[str, Any]:
    """Return what the result of a run says of it besides its scores: what it was trained on, and for how many steps."""
    folder = Folder(str(task.run))
    checkpoint, history = read_checkpoint(folder, LAST), read_history(folder)
    counts = {key: value for key, value in next(history.of("training_data"), {}).items() if key not in ("event", "step")}
    features = open_dataset(task.corpus.features)
    text = EncodedParameters.from_json(checkpoint.captions).text
    content = {
        **task.identity,
        "preset": task.preset,
        "steps": checkpoint.progress.step,
        "step": checkpoint.progress.best_step,
        "overrides": _overrides(task.job),
        "feature": "" if features.spec is None else f"{features.spec.name}, {features.spec.source}".rstrip(", "),
        "untrained": FeaturesParameters.from_json(features.manifest.parameters).untrained,
        "recipe": "" if text is None else text.recipe,
        "vocabulary": len(checkpoint.tokens) - len(SPECIALS),
        **counts,
    }
    missing = list(checkpoint.missing_features.values())
    return content | ({"missing_features": missing} if missing else {})


def _overrides(job: ReproduceJob) -> list[str]:
    """Return the values that a job puts into configurations, as ``KEY=VALUE``, sorted."""
    return [f"{key}={value}" for key, value in sorted(job.overrides.items())]
