"""``imagepivot tables``: train the rows of a paper's tables, several times each, and measure them.

A row that is trained and measured leaves a file ``results/PRESET/seed-N.json`` in the output folder. Existing results are kept: the
command can be stopped and given again, and rows that need another vocabulary can be added by another command with the same output.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from schemas.dataset import open_dataset
from schemas.errors import DatasetError, UsageError
from schemas.fingerprints import sha256_of_bytes
from schemas.output import hold
from schemas.storage import Folder
from train.config.sections import Config, from_toml, resolve, to_toml
from train.data.captions import labels_of, read_captions
from train.data.corpus import Corpus
from train.data.splits import TEST_SPLITS, LeftOut, check_images, without_images
from train.devices import check_device_name, check_precision_name, resolve_device
from train.evaluation.scoring import portions_in, score_run
from train.jobs import TrainJob
from train.loop import Remark, train
from train.reports.parallel import run_parallel
from train.reports.published import rows_of_paper
from train.reports.results import read_result, write_result
from train.runs.checkpoints import LAST
from train.runs.run import open_run

__all__ = ["Done", "TablesJob", "Task", "run_tables"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TablesJob:
    """The rows of a paper's tables to train, as ``imagepivot tables`` runs them.

    Attributes:
        paper: one of `train.reports.published.PAPERS`.
        output: local folder for runs, results and the report; kept as an absolute path.
        corpus: folders of captions, features and vocabulary.
        seeds: number of runs per row, with seeds 0, 1, ...
        rows: patterns of presets, such as ``bilingual*``; all rows if empty.
        overrides: values in the configurations, as `train.config.resolve` takes them.
        workers: number of runs at a time; 0 means one per GPU, or one per core if there is no GPU.
        device: a name that `train.devices.resolve_device` knows; ``auto`` and ``cuda`` use all GPUs.
        precision: a name that `train.devices.check_precision` knows.
        allow_missing_features: leave out the captions of images that lack features instead of raising an error.

    Raises:
        UsageError: a value is impossible.
    """

    paper: str
    output: str
    corpus: Corpus
    seeds: int = 10
    rows: tuple[str, ...] = ()
    overrides: Mapping[str, str] = field(default_factory=dict)
    workers: int = 0
    device: str = "auto"
    precision: str = "fp32"
    allow_missing_features: bool = False

    def __post_init__(self) -> None:
        rows_of_paper(self.paper)
        if self.seeds < 1:
            raise UsageError(f"--seeds is {self.seeds}, expected 1 or more")
        if self.workers < 0:
            raise UsageError(f"--workers is {self.workers}, expected 0 or more")
        check_device_name(self.device)
        check_precision_name(self.precision)
        if not Folder(self.output).is_local:
            raise UsageError(f"{self.output!r} is not a local folder: train into one, and copy it when it is done")
        # "~" is resolved once, for everything that is written there.
        object.__setattr__(self, "output", str(Folder(self.output).local_path))

    def presets(self) -> list[str]:
        """Return the presets of the selected rows, each once, in the order of the tables.

        Raises:
            UsageError: a pattern matches no row.
        """
        names = list(dict.fromkeys(row.preset for row in rows_of_paper(self.paper)))
        chosen: list[str] = []
        for pattern in self.rows or ("*",):
            matches = [name for name in names if fnmatchcase(name, pattern) or fnmatchcase(name, f"{self.paper}/{pattern}")]
            if not matches:
                raise UsageError(f"--rows {pattern!r} matches no row of {self.paper}: its rows are {', '.join(names)}")
            chosen += matches
        return [name for name in names if name in chosen]


@dataclass(frozen=True)
class Task:
    """One run of one row.

    Attributes:
        preset: the preset to train.
        seed: seed of the run.
        config: configuration of the run.
        job: the job that the task belongs to.
        fingerprints: fingerprints of captions, features and vocabulary.
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
        """File with the measurements."""
        return Path(self.job.output, "results", self.preset, f"seed-{self.seed}.json")

    @property
    def identity(self) -> dict[str, Any]:
        """Everything but the machine that the result depends on."""
        config = to_toml(self.config)
        return {"config": config, "fingerprints": dict(self.fingerprints), "precision": self.job.precision, "seed": self.seed}

    def is_done(self) -> bool:
        """Return whether the result exists.

        Raises:
            DatasetError: the existing result is from other data or another configuration.
        """
        if not self.result.exists():
            return False
        stored = read_result(self.result)
        differing = [name for name, value in self.identity.items() if _with_new_keys(name, stored.get(name)) != value]
        if differing:
            raise DatasetError(
                f"{str(self.result)!r} was measured with other {' and '.join(differing)}: nothing was trained. Choose another "
                "output folder, or delete that file and its run"
            )
        return True


def _with_new_keys(name: str, value: Any) -> Any:
    """Return a value of a stored identity; a configuration with the keys that there are since, at their defaults."""
    return to_toml(from_toml(value, "the result")) if name == "config" and isinstance(value, str) else value


@dataclass(frozen=True)
class Done:
    """A finished run.

    Attributes:
        task: the task of the run.
        count: number of runs finished so far.
        total: number of all runs.
    """

    task: Task
    count: int
    total: int


def run_tables(job: TablesJob, watch: Callable[[Done], None] = lambda done: None, remark: Remark = logger.warning) -> None:
    """Train and measure every row that has no result yet.

    Args:
        job: the rows, and how to train them.
        watch: is called for every finished run; those that were there before come first.
        remark: receives a sentence about the captions that are left out, for each split that lacks features.

    Raises:
        ImagepivotError: an argument or the data is wrong, in which case nothing was trained; or any error of a run.
    """
    fingerprints = {
        name: open_dataset(location, kind={"captions": "encoded"}.get(name, name)).fingerprint
        for name, location in vars(job.corpus).items()
    }
    if job.allow_missing_features:
        # Features may grow; with fewer images the results are others.
        ids = sorted(open_dataset(job.corpus.features).image_ids())
        fingerprints["images"] = sha256_of_bytes("".join(f"{image_id}\n" for image_id in ids).encode())
    tasks = [
        Task(preset, seed, resolve(preset, job.overrides), job, fingerprints)
        for seed in range(job.seeds)  # All rows with one seed first, so that a table that is stopped early has no gaps.
        for preset in job.presets()
    ]
    for left_out in _check_data(tasks, job):
        remark(left_out.remark)
    with hold(Folder(job.output)):
        finished = [task for task in tasks if task.is_done()]
        for count, task in enumerate(finished, start=1):
            watch(Done(task, count, len(tasks)))
        remaining = [task for task in tasks if task not in finished]
        for count, task in enumerate(_run_all(remaining, job), start=len(finished) + 1):
            watch(Done(task, count, len(tasks)))


def _check_data(tasks: Sequence[Task], job: TablesJob) -> list[LeftOut]:
    """Check, before anything is trained, that captions and features cover what the rows are trained and measured on.

    Returns:
        By split, the images that lack features, if the job allows it.
    """
    captions, features = open_dataset(job.corpus.captions, kind="encoded"), open_dataset(job.corpus.features)
    labels = labels_of(captions)
    available = {(language, portion) for split, language, portion in labels if split in TEST_SPLITS}
    portions_read: dict[str, dict[str, set[str]]] = {}  # By split and language, of all rows: each split is read once.
    for preset, data in {task.preset: task.config.data for task in tasks}.items():
        needed = {(language, portion) for language, portions in data.portions.items() for portion in portions}
        needed |= {(row.language, row.portion) for row in rows_of_paper(job.paper) if row.preset == preset}
        if missing := sorted(needed - available):
            raise DatasetError(
                f"{preset} needs captions of {', '.join(map(' '.join, missing))}, which {job.corpus.captions!r} does not have in "
                f"split {' or '.join(TEST_SPLITS)}: encode captions that have them, or choose other rows with --rows"
            )
        measured = {split: portions_in(labels, split, data.languages) for split in TEST_SPLITS}
        for split, portions in ((data.split, data.portions), (data.validation_split, data.portions), *measured.items()):
            for language, names in portions.items():
                portions_read.setdefault(split, {}).setdefault(language, set()).update(names)
    left_out = []
    for split, by_language in portions_read.items():
        chosen = read_captions(captions, split=split, portions={language: sorted(n) for language, n in by_language.items()})
        lacking = check_images(chosen, features, allow_missing_features=job.allow_missing_features)
        if lacking is not None:
            without_images(chosen, features)
            left_out.append(lacking)
    return left_out


def _run_all(tasks: Sequence[Task], job: TablesJob) -> Iterator[Task]:
    """Run tasks, several at a time, and yield each when it is done."""
    devices = _devices(job)
    if len(devices) == 1:
        for task in tasks:
            _run(task, devices[0])
            yield task
        return
    yield from run_parallel(_run_alone, tasks, devices)


def _devices(job: TablesJob) -> list[str]:
    """Return one device for each run at a time."""
    device = resolve_device(job.device)
    if device.type == "cpu":
        return ["cpu"] * (job.workers or os.cpu_count() or 1)
    if job.device in ("auto", "cuda"):
        devices = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    else:
        devices = [str(device)]
    return [devices[number % len(devices)] for number in range(job.workers or len(devices))]


def _run_alone(task: Task, device: str) -> None:
    # Threads that share a core wait for each other at every product; one thread per process is much faster.
    torch.set_num_threads(1)
    _run(task, device)


def _run(task: Task, device: str) -> None:
    """Train a row, or continue its training, and measure it."""
    job, corpus = task.job, task.job.corpus
    result = train(
        TrainJob(
            config=task.config,
            corpus=corpus,
            output=str(task.run),
            seed=task.seed,
            device=device,
            precision=job.precision,
            resume=True,
            allow_missing_features=job.allow_missing_features,
        ),
        remark=_keep_quiet,  # `run_tables` has said it for all rows.
    )
    run = open_run(task.run, device=device)
    scores = score_run(
        run, captions=corpus.captions, features=corpus.features, allow_missing_features=job.allow_missing_features
    )
    spec = open_dataset(corpus.features).spec
    content = {
        **task.identity,
        "preset": task.preset,
        "step": run.step,
        "overrides": [f"{key}={value}" for key, value in sorted(job.overrides.items())],
        "feature": "" if spec is None else f"{spec.name}, {spec.source}".rstrip(", "),
        "scores": [score.to_dict() for score in scores],
    }
    if result.left_out:
        content["left_out"] = [left_out.to_dict() for left_out in result.left_out]
    write_result(task.result, content)
    (task.run / LAST).unlink()  # The state of the optimizer is twice the size of the model, and no longer needed.


def _keep_quiet(remark: str) -> None:
    """Take a remark that was made before."""
