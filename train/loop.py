"""The training loop.

After the first weights nothing is random but the sampler, whose whole state is how far it is: a run that was killed goes on from
its last checkpoint to the same weights as one that was not, bit for bit on a CPU with the same number of threads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from schemas.errors import ImagepivotError, UsageError
from schemas.output import hold
from schemas.storage import TEMPORARY_MARK, Folder
from train.config.sections import Config, ScheduleConfig, to_toml
from train.devices import check_precision, computing, resolve_device
from train.distributed import Processes, join_processes
from train.evaluation.evaluate import evaluate
from train.material import Material, build_model, build_sampler, open_material
from train.objectives.terms import Objective, gather
from train.progress import Report
from train.runs.checkpoints import BEST, LAST, Checkpoint, Standing, write_checkpoint
from train.runs.logs import LOG, RunLog
from train.runs.resuming import check_same_run, checkpoint_to_resume

__all__ = ["Result", "learning_rate", "stop_reason", "train"]

CONFIG = "config.toml"
_LOG_EVERY = 10

_LEFT_BEHIND = re.compile(rf"\.({'|'.join(map(re.escape, (BEST, LAST, CONFIG, LOG)))}){re.escape(TEMPORARY_MARK)}\d+")
"""Temporary names of the files that a run writes; whatever else lies in its folder is not its own."""

Watch = Callable[[Report], None]


@dataclass(frozen=True)
class Result:
    """What a training came to.

    Attributes:
        folder: of the run; `train.runs.run.open_run` opens it.
        standing: steps, best score, and why it stopped.
    """

    folder: str
    standing: Standing


def learning_rate(config: Config, epoch: int) -> float:
    """The learning rate of an epoch, from 0."""
    falls = epoch // config.schedule.decay_epochs if config.schedule.decay_epochs else 0
    return config.optimizer.learning_rate * config.schedule.decay_factor**falls


def stop_reason(standing: Standing, schedule: ScheduleConfig, epoch_steps: int) -> str:
    """Why a training is over: ``patience``, ``steps`` or ``epochs``; empty where it is not."""
    if schedule.patience and standing.stale >= schedule.patience:
        return "patience"
    if schedule.max_steps and standing.step >= schedule.max_steps:
        return "steps"
    if schedule.max_epochs and standing.step >= schedule.max_epochs * epoch_steps:
        return "epochs"
    return ""


def train(
    config: Config,
    *,
    captions: str,
    features: str,
    vocabulary: str,
    output: str,
    seed: int = 0,
    device: str = "auto",
    precision: str = "fp32",
    compile: bool = False,  # noqa: A002
    resume: bool = False,
    save_every: int = 500,
    tensorboard: bool = False,
    memory_map: str | None = None,
    watch: Watch = lambda report: None,
) -> Result:
    """Trains a model.

    The folder then holds ``best.pt`` (of the greatest sum of recalls on the validation split), ``last.pt``, ``config.toml`` and
    ``log.jsonl``. Under ``torchrun`` every process calls this with the same arguments.

    Args:
        config: what to train, and how.
        captions: folder of the encoded captions.
        features: folder of the image features.
        vocabulary: folder of the vocabulary that the captions were encoded with.
        output: folder of the run.
        seed: of first weights, order and whatever the configuration draws at random.
        device: as `train.devices.resolve_device` takes it.
        precision: as `train.devices.check_precision` takes it.
        compile: compile model and loss; needs a GPU.
        resume: go on from the last checkpoint in ``output`` if there is one. Its configuration, seed, precision and data must be
            the same; ``max_steps``, ``max_epochs`` and ``patience`` may differ.
        save_every: steps between two checkpoints; one is also written after each evaluation.
        tensorboard: also write events for TensorBoard.
        memory_map: folder for a copy of features that do not fit into memory.
        watch: is told how far the training is.

    Raises:
        UsageError: arguments that do not fit together or to this host, or ``output`` holds a run and ``resume`` is not given.
        DatasetError: the data is not what it has to be, or ``output`` holds another run; nothing was trained.
        ImagepivotError: the loss is no number any more.
    """
    on = resolve_device(device)
    check_precision(precision, on)
    if compile and on.type == "cpu":
        raise UsageError("--compile needs a GPU, but the device is 'cpu': leave it out, or choose a GPU")
    if save_every < 1:
        raise UsageError(f"save_every is {save_every}, expected 1 or more")
    folder = Folder(output)
    if not folder.is_local:
        raise UsageError(f"{output!r} is not a local folder: train into one, and copy the run when it is done")
    with join_processes(on) as processes, _held(folder, processes), computing(precision, on):
        before = checkpoint_to_resume(folder, resume=resume)
        material = open_material(
            config, captions=captions, features=features, vocabulary=vocabulary, seed=seed, memory_map=memory_map
        )
        start = Checkpoint(
            config=to_toml(config),
            model_config=material.model_config,
            model={},
            tokens=material.vocabulary.tokens,
            fingerprints=material.training.fingerprints,
            captions=material.captions_parameters,
            seed=seed,
            precision=precision,
            standing=Standing(),
        )
        if before is not None:
            check_same_run(before, start, folder)
        loop = _Loop(config, material, start, folder, processes, on, watch, save_every=save_every)
        loop.begin(before, compiled=compile)
        return Result(output, loop.run(tensorboard=tensorboard))


@contextmanager
def _held(folder: Folder, processes: Processes) -> Iterator[None]:
    if not processes.is_first:
        yield
        return
    with hold(folder):
        yield


class _Loop:
    """A training under way."""

    def __init__(
        self,
        config: Config,
        material: Material,
        start: Checkpoint,
        folder: Folder,
        processes: Processes,
        device: torch.device,
        watch: Watch,
        *,
        save_every: int,
    ) -> None:
        self.config = config
        self.material = material
        self.start = start
        self.folder = folder
        self.processes = processes
        self.device = device
        self.watch = watch
        self.save_every = save_every
        self.standing = Standing()
        self.sampler = build_sampler(config, material.training.captions, start.seed)
        self.model = build_model(start.model_config, start.seed).to(device)
        self.optimizer = torch.optim.Adam(
            self.model.parameters(),
            lr=config.optimizer.learning_rate,
            betas=config.optimizer.betas,
            eps=config.optimizer.epsilon,
            weight_decay=config.optimizer.weight_decay,
            fused=True,
        )

    def begin(self, before: Checkpoint | None, *, compiled: bool) -> None:
        """Goes to where an earlier process stopped, if there was one."""
        if before is not None:
            assert before.optimizer is not None
            assert before.sampler is not None
            self.model.load_state_dict(before.model)
            self.optimizer.load_state_dict(dict(before.optimizer))
            self.sampler.restore(before.sampler)
            self.standing = replace(before.standing, stopped="")
        loss = self.config.loss
        objective = Objective(self.model, margin=loss.margin, parallel=loss.objective == "parallel", whole=self.processes.whole)
        if compiled:
            objective.compile()
        self.objective = self.processes.wrap(objective)

    def run(self, *, tensorboard: bool) -> Standing:
        """Trains to the end."""
        if not self.processes.is_first:
            return self._run(None)
        for path in self.folder.local_path.glob(".*"):
            if _LEFT_BEHIND.fullmatch(path.name) and path.is_file():  # Of a process that was killed while it wrote.
                path.unlink()
        if self.standing.step and self.standing.best_step == self.standing.step:
            self._save(BEST)  # A process may have been killed when it had written the one checkpoint and not yet the other.
        self.folder.write(CONFIG, self.start.config.encode())
        with RunLog(self.folder.local_path, step=self.standing.step, tensorboard=tensorboard) as log:
            return self._run(log)

    def _run(self, log: RunLog | None) -> Standing:
        schedule, epoch_steps = self.config.schedule, self.sampler.epoch_steps
        every = schedule.evaluate_every or epoch_steps
        self._stop_if_over()
        while not self.standing.stopped:
            loss, norm = self._step()
            step = self.standing.step
            evaluates = step % every == 0 or bool(stop_reason(self.standing, schedule, epoch_steps))
            saves = evaluates or step % self.save_every == 0
            if saves or step % _LOG_EVERY == 0:
                self._check_finite(loss, norm)
            if log is not None and step % _LOG_EVERY == 0:
                self._log_step(log, loss, norm)
            if evaluates:
                self._evaluate(log, loss)
                self._stop_if_over()
            if saves:
                self._save(LAST)
            if evaluates and self.standing.stale == 0:
                self._save(BEST)  # After the other one, which holds the same model: there is never a best.pt alone.
        return self.standing

    def _step(self) -> tuple[Tensor, Tensor]:
        """One batch; gives its loss and the norm of its gradient."""
        config = self.config
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(config, self.sampler.epoch)
        batch = self.sampler.next()
        rows = self.processes.rows(len(batch.images))
        hinges = "sum" if self.standing.step < config.loss.warmup_steps else config.loss.hinges
        self.optimizer.zero_grad()
        loss = self.objective(gather(self.material.training, batch, self.device, rows), hinges)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.optimizer.gradient_clipping or torch.inf)
        self.optimizer.step()
        self.standing = replace(self.standing, step=self.standing.step + 1)
        return loss.detach(), norm

    def _evaluate(self, log: RunLog | None, loss: Tensor) -> None:
        """Recalls on the validation split."""
        score = 0.0
        if log is not None:
            found = evaluate(self.model, self.material.validation)
            monitored = self.config.schedule.monitor or self.config.data.languages
            score = sum(found[language].sum_of_recalls for language in monitored)
            log.write("evaluation", self.standing.step, {"score": score, **{k: each.to_dict() for k, each in found.items()}})
        self.standing = self.standing.evaluated(self.processes.agree(score, self.device))
        if log is not None:
            self.watch(self._report(float(loss), {language: each.sum_of_recalls for language, each in found.items()}))

    def _check_finite(self, loss: Tensor, norm: Tensor) -> None:
        """Looked at before anything is written, not at each step: on a GPU it waits for the step to end."""
        if not torch.isfinite(loss + norm):
            raise ImagepivotError(
                f"the loss is {float(loss)} and the norm of its gradient {float(norm)} at step {self.standing.step}: the training "
                "has diverged. Lower optimizer.learning_rate, or look for features that are not finite; the last checkpoint is kept"
            )

    def _log_step(self, log: RunLog, loss: Tensor, norm: Tensor) -> None:
        rate = self.optimizer.param_groups[0]["lr"]
        log.write("step", self.standing.step, {"loss": float(loss), "gradient_norm": float(norm), "learning_rate": rate})
        self.watch(self._report(float(loss), {}))

    def _report(self, loss: float, scores: dict[str, float]) -> Report:
        schedule = self.config.schedule
        limits = [limit for limit in (schedule.max_steps, schedule.max_epochs * self.sampler.epoch_steps) if limit]
        standing = self.standing
        return Report(standing.step, min(limits, default=None), self.sampler.epoch, loss, scores, standing.best_score)

    def _stop_if_over(self) -> None:
        reason = stop_reason(self.standing, self.config.schedule, self.sampler.epoch_steps)
        self.standing = replace(self.standing, stopped=reason)

    def _save(self, name: str) -> None:
        if not self.processes.is_first:
            return
        checkpoint = replace(self.start, model=self.model.state_dict(), standing=replace(self.standing, stopped=""))
        if name == LAST:
            optimizer, sampler = self.optimizer.state_dict(), self.sampler.state()
            checkpoint = replace(checkpoint, standing=self.standing, optimizer=optimizer, sampler=sampler)
        write_checkpoint(self.folder, name, checkpoint)
