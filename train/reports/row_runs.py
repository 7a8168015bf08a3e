"""One run of a row: its files, its training and its measurement; an ensemble is measured on the runs of its members."""

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
from schemas.storage.folder import Folder
from schemas.vocabulary import SPECIALS
from train.config.sections import Config, to_toml
from train.evaluation.scores import score_together
from train.jobs import Corpus, ReproduceJob, TrainJob
from train.loop import train
from train.reports.failures import Failure, read_failure, write_failure
from train.reports.row_results import failure_file, read_result, result_file, write_result
from train.runs.checkpoints import LAST
from train.runs.run import open_run
from train.training_data import Material, open_material

_TRACEBACK = "traceback.txt"


@dataclass(frozen=True)
class Task:
    """One run of one row.

    Attributes:
        preset: the preset to train.
        seed: seed of the run.
        config: configuration of the run.
        job: the job that the task belongs to.
        corpus: what the run is trained on.
        fingerprints: fingerprints of what it is trained on.
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
    def overrides(self) -> list[str]:
        """The values that the job puts into the configuration, as ``KEY=VALUE``, sorted."""
        return [f"{key}={value}" for key, value in sorted(self.job.overrides.items())]

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
        return [name for name, value in self.identity.items() if stored.get(name) != value]


def train_and_measure(task: Task, device: str) -> None:
    """Train a row, or continue its training, and write its result; of an ensemble, whose members are trained, only write it."""
    task.forget_divergence()
    content = _together(task) if task.members else _train(task, device)
    runs = [open_run(each.run, device=device) for each in task.members or (task,)]
    scores = score_together(
        runs,
        captions=task.corpus.captions,
        features=task.corpus.features,
        memory_map=task.job.memory_map,
        allow_missing_features=task.job.allow_missing_features,
        token_features=task.corpus.token_features,
    )
    content |= {"scores": [score.to_dict() for score in scores]}
    if not task.members:
        content |= {"step": runs[0].step}
    write_result(task.result, content)
    if not task.members:
        (task.run / LAST).unlink()  # The state of the optimizer is twice the size of the model, and no longer needed.


def _together(task: Task) -> dict[str, Any]:
    """Return what the result of an ensemble says of it besides its scores: what its members have in common."""
    results = []
    for member in task.members:
        if not member.result.exists():
            raise DatasetError(
                f"the run of its member {member.preset} with seed {member.seed} failed: nothing is scored together"
            )
        results.append(read_result(member.result))
    named = ("feature", "untrained", "recipe", "vocabulary")
    common = {name: results[0][name] for name in named if name in results[0]}
    return task.identity | {"preset": task.preset, "overrides": task.overrides} | common


def _train(task: Task, device: str) -> dict[str, Any]:
    """Train, and return what the result says of it."""
    job, corpus = task.job, task.corpus
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
        remark=_keep_quiet,  # `reproduce` has said it for all rows.
        material=material,
    )
    content = {
        **task.identity,
        "preset": task.preset,
        "steps": result.progress.step,
        "overrides": task.overrides,
        **_statement(task, material),
    }
    if result.missing_features:
        content["missing_features"] = [missing.to_dict() for missing in result.missing_features]
    return content


def _statement(task: Task, material: Material) -> dict[str, Any]:
    """Say what a run is trained on: the feature, captions by language, and the words that each sentence encoder has vectors of."""
    dimensions, captions = material.dimensions, material.training.captions
    features = open_dataset(task.corpus.features)
    text = EncodedParameters.from_json(material.captions_parameters).text
    languages = dimensions.languages
    every = range(dimensions.vocabulary_size)
    tables = {"+".join(languages): languages} if task.config.model.mixes_languages else {name: (name,) for name in languages}
    ids = {name: dimensions.language_ids.get(of_table[0], every) for name, of_table in tables.items()}
    vectors = material.word_vectors
    pretrained = {} if vectors is None else {name: vectors.known(tables[name], ids[name]) for name in tables}
    return {
        "feature": "" if features.spec is None else f"{features.spec.name}, {features.spec.source}".rstrip(", "),
        "untrained": FeaturesParameters.from_json(features.manifest.parameters).untrained,
        "recipe": "" if text is None else text.recipe,
        "captions": {name: len(captions.rows_of(name)) for name in languages},
        "vocabulary": len(every) - len(SPECIALS),
        "words": {name: len(of_table) - len(SPECIALS) for name, of_table in ids.items()},
        **({"pretrained": pretrained} if pretrained else {}),
    }


def _keep_quiet(remark: str) -> None:
    """Take a remark that was made before."""
