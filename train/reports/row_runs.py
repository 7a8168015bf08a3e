"""One run of a row: its files, its training and its measurement."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schemas.dataset import open_dataset
from schemas.errors import DatasetError
from schemas.parameters import EncodedParameters, FeaturesParameters
from schemas.storage import Folder
from schemas.vocabulary import SPECIALS
from train.config.sections import Config, from_toml, to_toml
from train.evaluation.scoring import score_run
from train.jobs import TrainJob
from train.loop import train
from train.material import Material, open_material
from train.reports.failures import Failure, read_failure, write_failure
from train.reports.results import failure_file, read_result, result_file, write_result
from train.reports.table_jobs import TablesJob
from train.runs.checkpoints import LAST
from train.runs.run import open_run

__all__ = ["Task", "train_and_measure"]

_TRACEBACK = "traceback.txt"


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
        return result_file(self.job.output, self.preset, self.seed)

    @property
    def failure(self) -> Path:
        """File that says why the run failed, while it has no result."""
        return failure_file(self.job.output, self.preset, self.seed)

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
        if differing := self._differing(read_result(self.result)):
            raise DatasetError(
                f"{str(self.result)!r} was measured with other {' and '.join(differing)}: nothing was trained. Choose another "
                "output folder, or delete that file and its run"
            )
        return True

    def end(self, failure: Failure | None) -> None:
        """Keep why the run failed, as far as the disk allows; or forget why it did before, if it did not."""
        trace = self.run / _TRACEBACK
        if failure is None:
            for path in (self.failure, trace):
                path.unlink(missing_ok=True)
            return
        with suppress(DatasetError):
            write_failure(self.failure, failure, {"preset": self.preset, **self.identity})
        if failure.traceback:
            with suppress(DatasetError):
                Folder(str(self.run)).write(_TRACEBACK, failure.traceback.encode())
        else:
            trace.unlink(missing_ok=True)

    def forget_divergence(self) -> None:
        """Delete what a training left that diverged: from its last checkpoint it would diverge again, all the sooner."""
        stored = read_failure(self.failure)
        if stored is not None and stored[0].kind == "diverged":
            if self.run.exists():
                shutil.rmtree(self.run)
            self.failure.unlink(missing_ok=True)

    def _differing(self, stored: Mapping[str, Any]) -> list[str]:
        """Return what a result, or a failure, was made of that this task has not."""
        return [name for name, value in self.identity.items() if _with_new_keys(name, stored.get(name)) != value]


def _with_new_keys(name: str, value: Any) -> Any:
    """Return a value of a stored identity; a configuration with the keys that there are since, at their defaults."""
    return to_toml(from_toml(value, "the result")) if name == "config" and isinstance(value, str) else value


def train_and_measure(task: Task, device: str) -> None:
    """Train a row, or continue its training, and write its result."""
    task.forget_divergence()
    content = _train(task, device)
    job, corpus = task.job, task.job.corpus_of(task.config)
    run = open_run(task.run, device=device)
    scores = score_run(
        run,
        captions=corpus.captions,
        features=corpus.features,
        memory_map=job.memory_map,
        allow_missing_features=job.allow_missing_features,
        token_features=corpus.token_features,
    )
    content |= {"step": run.step, "scores": [score.to_dict() for score in scores]}
    write_result(task.result, content)
    (task.run / LAST).unlink()  # The state of the optimizer is twice the size of the model, and no longer needed.


def _train(task: Task, device: str) -> dict[str, Any]:
    """Train, and return what the result says of it."""
    job, corpus = task.job, task.job.corpus_of(task.config)
    material = open_material(
        task.config,
        corpus,
        seed=task.seed,
        memory_map=job.memory_map,
        allow_missing_features=job.allow_missing_features,
    )
    result = train(
        TrainJob(
            config=task.config,
            corpus=corpus,
            output=str(task.run),
            seed=task.seed,
            device=device,
            precision=job.precision,
            resume=True,
            memory_map=job.memory_map,
            allow_missing_features=job.allow_missing_features,
        ),
        remark=_keep_quiet,  # `run_tables` has said it for all rows.
        material=material,
    )
    content = {
        **task.identity,
        "preset": task.preset,
        "steps": result.standing.step,
        "overrides": [f"{key}={value}" for key, value in sorted(job.overrides.items())],
        **_statement(task, material),
    }
    if result.left_out:
        content["left_out"] = [left_out.to_dict() for left_out in result.left_out]
    return content


def _statement(task: Task, material: Material) -> dict[str, Any]:
    """Say what a run is trained on: the feature, captions by language, and the words that each sentence encoder has vectors of."""
    dimensions, captions = material.dimensions, material.training.captions
    features = open_dataset(task.job.corpus.features)
    text = EncodedParameters.from_json(material.captions_parameters).text
    languages = dimensions.languages
    every = range(dimensions.vocabulary_size)
    words = {name: len(dimensions.language_ids.get(name, every)) - len(SPECIALS) for name in languages}
    return {
        "feature": "" if features.spec is None else f"{features.spec.name}, {features.spec.source}".rstrip(", "),
        "untrained": FeaturesParameters.from_json(features.manifest.parameters).untrained,
        "recipe": "" if text is None else text.recipe,
        "captions": {name: len(captions.rows_of(name)) for name in languages},
        "vocabulary": len(every) - len(SPECIALS),
        "words": {"+".join(languages): words[languages[0]]} if task.config.model.mixes_languages else words,
    }


def _keep_quiet(remark: str) -> None:
    """Take a remark that was made before."""
