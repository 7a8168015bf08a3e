"""``imagepivot tables``: trains the rows of a paper's tables, several times each, and measures them.

A row that is trained and measured leaves a file ``results/PRESET/seed-N.json`` in the output folder. What is there is kept: the
command can be stopped and given again, and rows that need another vocabulary can be added by another command with the same output.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from multiprocessing import get_context
from pathlib import Path
from queue import Queue
from typing import Any

import torch

from schemas.dataset import open_dataset
from schemas.errors import DatasetError, UsageError
from schemas.output import hold
from schemas.storage import Folder
from train.config.sections import Config, resolve, to_toml
from train.data.captions import labels_of, read_captions
from train.data.splits import check_images
from train.devices import resolve_device
from train.evaluation.scoring import portions_in, score_run
from train.loop import train
from train.reports.published import TEST_SPLITS, rows_of_paper
from train.runs.checkpoints import LAST
from train.runs.run import open_run

__all__ = ["Done", "TablesJob", "Task", "run_tables"]


@dataclass(frozen=True)
class TablesJob:
    """What ``imagepivot tables`` does.

    Attributes:
        paper: ``gella2017`` or ``kadar2018``.
        output: local folder of runs, results and the report; kept as an absolute path.
        captions: folder of encoded captions.
        features: folder of image features.
        vocabulary: folder of the vocabulary of the captions.
        seeds: runs of each row, with seeds 0, 1, ...
        rows: patterns of presets, such as ``bilingual*``; all rows when there are none.
        overrides: values of the configurations, as ``train.config.sections.resolve`` takes them.
        workers: runs at a time; 0: one a GPU, or one a core where there is no GPU.
        device: as ``train.devices.resolve_device`` takes it; ``auto`` and ``cuda`` use all GPUs.
        precision: as ``train.devices.check_precision`` takes it.
    """

    paper: str
    output: str
    captions: str
    features: str
    vocabulary: str
    seeds: int = 10
    rows: tuple[str, ...] = ()
    overrides: Mapping[str, str] = field(default_factory=dict)
    workers: int = 0
    device: str = "auto"
    precision: str = "fp32"

    def __post_init__(self) -> None:
        rows_of_paper(self.paper)
        if self.seeds < 1:
            raise UsageError(f"--seeds is {self.seeds}, expected 1 or more")
        if not Folder(self.output).is_local:
            raise UsageError(f"{self.output!r} is not a local folder: train into one, and copy it when it is done")
        # "~" is the home folder, once and for all that is written there.
        object.__setattr__(self, "output", str(Folder(self.output).local_path))

    def presets(self) -> list[str]:
        """The presets of the rows that are asked for, each once, in the order of the tables.

        Raises:
            UsageError: a pattern fits no row.
        """
        names = list(dict.fromkeys(row.preset for row in rows_of_paper(self.paper)))
        chosen: list[str] = []
        for pattern in self.rows or ("*",):
            fitting = [name for name in names if fnmatchcase(name, pattern) or fnmatchcase(name, f"{self.paper}/{pattern}")]
            if not fitting:
                raise UsageError(f"--rows {pattern!r} fits no row of {self.paper}: its rows are {', '.join(names)}")
            chosen += fitting
        return [name for name in names if name in chosen]


@dataclass(frozen=True)
class Task:
    """One run of one row.

    Attributes:
        preset: that is trained.
        seed: of the run.
        config: of the run.
        job: that it belongs to.
        fingerprints: of captions, features and vocabulary.
    """

    preset: str
    seed: int
    config: Config
    job: TablesJob
    fingerprints: Mapping[str, str]

    @property
    def run(self) -> Path:
        """Folder of the run."""
        return Path(self.job.output, "runs", self.preset, f"seed-{self.seed}")

    @property
    def result(self) -> Path:
        """File with what was measured."""
        return Path(self.job.output, "results", self.preset, f"seed-{self.seed}.json")

    @property
    def identity(self) -> dict[str, Any]:
        """All that the result depends on but the machine."""
        config = to_toml(self.config)
        return {"config": config, "fingerprints": dict(self.fingerprints), "precision": self.job.precision, "seed": self.seed}

    def is_done(self) -> bool:
        """Whether the result is there.

        Raises:
            DatasetError: a result of other data or another configuration is there.
        """
        if not self.result.exists():
            return False
        found = json.loads(self.result.read_text(encoding="utf-8"))
        differing = [name for name, value in self.identity.items() if found.get(name) != value]
        if differing:
            raise DatasetError(
                f"{str(self.result)!r} was measured with other {' and '.join(differing)}: nothing was trained. Choose another "
                "output folder, or delete that file and its run"
            )
        return True


@dataclass(frozen=True)
class Done:
    """A run that has ended.

    Attributes:
        task: what was run.
        count: runs that have ended so far.
        total: runs in all.
    """

    task: Task
    count: int
    total: int


def run_tables(job: TablesJob, watch: Callable[[Done], None] = lambda done: None) -> None:
    """Trains and measures every row that is not there yet.

    Args:
        job: what to do.
        watch: is told of every run that ends; those that were there at the beginning come first.

    Raises:
        ImagepivotError: an argument or the data is not what it has to be, before anything is trained; or what a run met.
    """
    fingerprints = {
        kind: open_dataset(getattr(job, kind), kind=each).fingerprint
        for kind, each in (("captions", "encoded"), ("features", "features"), ("vocabulary", "vocabulary"))
    }
    tasks = [
        Task(preset, seed, resolve(preset, job.overrides), job, fingerprints)
        for seed in range(job.seeds)  # All rows with one seed first: a table that is stopped early has no gaps.
        for preset in job.presets()
    ]
    _check_data(tasks, job)
    with hold(Folder(job.output)):
        finished = [task for task in tasks if task.is_done()]
        for count, task in enumerate(finished, start=1):
            watch(Done(task, count, len(tasks)))
        left = [task for task in tasks if task not in finished]
        for count, task in enumerate(_run_all(left, job), start=len(finished) + 1):
            watch(Done(task, count, len(tasks)))


def _check_data(tasks: Sequence[Task], job: TablesJob) -> None:
    """Checks that captions and features hold what the rows are trained and measured on, before the first is trained."""
    captions, features = open_dataset(job.captions, kind="encoded"), open_dataset(job.features)
    labels = labels_of(captions)
    there = {(language, portion) for split, language, portion in labels if split in TEST_SPLITS}
    read: dict[str, dict[str, set[str]]] = {}  # Portions by split and language, of all rows: each split is read once.
    for preset, data in {task.preset: task.config.data for task in tasks}.items():
        needed = {(language, portion) for language, portions in data.portions.items() for portion in portions}
        needed |= {(row.language, row.portion) for row in rows_of_paper(job.paper) if row.preset == preset}
        if missing := sorted(needed - there):
            raise DatasetError(
                f"{preset} needs captions of {', '.join(map(' '.join, missing))}, which {job.captions!r} does not have in "
                f"split {' or '.join(TEST_SPLITS)}: encode captions that have them, or choose other rows with --rows"
            )
        measured = {split: portions_in(labels, split, data.languages) for split in TEST_SPLITS}
        for split, portions in ((data.split, data.portions), (data.validation_split, data.portions), *measured.items()):
            for language, names in portions.items():
                read.setdefault(split, {}).setdefault(language, set()).update(names)
    for split, wanted in read.items():
        chosen = {language: sorted(names) for language, names in wanted.items()}
        check_images(read_captions(captions, split=split, portions=chosen), features)


def _run_all(tasks: Sequence[Task], job: TablesJob) -> Iterator[Task]:
    """Runs tasks, several at a time, and gives each when it is done."""
    devices = _devices(job)
    if len(devices) == 1:
        for task in tasks:
            _run(task, devices[0])
            yield task
        return
    spawn = get_context("spawn")
    with spawn.Manager() as manager:
        free = manager.Queue()
        for device in devices:
            free.put(device)
        with ProcessPoolExecutor(len(devices), mp_context=spawn) as pool:
            waiting = {pool.submit(_run_on_free, task, free): task for task in tasks}
            try:
                for future in as_completed(waiting):
                    future.result()
                    yield waiting[future]
            finally:
                pool.shutdown(wait=False, cancel_futures=True)


def _devices(job: TablesJob) -> list[str]:
    """The device of each run that goes on at a time."""
    device = resolve_device(job.device)
    if device.type == "cpu":
        return ["cpu"] * (job.workers or os.cpu_count() or 1)
    several = (
        [f"cuda:{number}" for number in range(torch.cuda.device_count())] if job.device in ("auto", "cuda") else [str(device)]
    )
    return [several[number % len(several)] for number in range(job.workers or len(several))]


def _run_on_free(task: Task, free: Queue[str]) -> None:
    # Threads that share a core wait for each other at every product; one a process is much faster.
    torch.set_num_threads(1)
    device = free.get()
    try:
        _run(task, device)
    finally:
        free.put(device)


def _run(task: Task, device: str) -> None:
    """Trains a row, or goes on with it, and measures it."""
    job = task.job
    train(
        task.config,
        captions=job.captions,
        features=job.features,
        vocabulary=job.vocabulary,
        output=str(task.run),
        seed=task.seed,
        device=device,
        precision=job.precision,
        resume=True,
    )
    run = open_run(task.run, device=device)
    scores = score_run(run, captions=job.captions, features=job.features)
    spec = open_dataset(job.features).spec
    result = {
        **task.identity,
        "preset": task.preset,
        "step": run.step,
        "overrides": [f"{key}={value}" for key, value in sorted(job.overrides.items())],
        "feature": "" if spec is None else f"{spec.name}, {spec.source}".rstrip(", "),
        "scores": [score.to_dict() for score in scores],
    }
    text = json.dumps(result, ensure_ascii=False, indent=2) + "\n"
    Folder(str(task.result.parent)).write(task.result.name, text.encode())
    (task.run / LAST).unlink()  # The state of the optimizer is twice the model, and of no more use.
