"""The training loop.

After initialization nothing is random but the sampler, whose whole state is its position. A run that was killed continues from its
last checkpoint to the same weights as an uninterrupted one, bit for bit on a CPU with the same number of threads.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import isfinite, isnan, nan

import torch
from torch import Tensor

from schemas.errors import UsageError
from schemas.process.resources import bfloat16_remark
from schemas.process.shutdown import DeferredSignal, defer_signals, set_shutdown_notice
from schemas.storage.folder import TEMPORARY_MARK, Folder
from schemas.writing.shard_writer import lock_folder
from train.batch_loader import BatchLoader
from train.config.sections import Config, to_toml
from train.data.sampling import Batch
from train.devices import check_precision, computing, resolve_device
from train.distributed import DistributedContext, join_processes
from train.jobs import DivergedError, Result, TrainJob
from train.losses import Objective, per_query, terms_of
from train.models.catalogue import build_model
from train.models.encoders import freeze_word_embeddings, load_pretrained_embeddings
from train.progress import Report
from train.runs.checkpoints import (
    BEST,
    LAST,
    Checkpoint,
    TrainingProgress,
    restore_model,
    restore_optimizer,
    restore_sampler,
    write_checkpoint,
)
from train.runs.init_from_run import init_from_run, provenance
from train.runs.log import CONFIG, CURVES, LOG, METRICS, RunLog, Stopwatch
from train.runs.run import Run, check_same_run, checkpoint_to_resume, contents_since, holds_a_run, is_finished, open_run
from train.schedules import learning_rate, steps_in_all, steps_per_epoch, stop_reason
from train.training_data import TrainingInputs, TrainingInputsProtocol, load_training_inputs, overlap_remark


@dataclass(frozen=True)
class Step:
    """A step of the optimizer.

    Attributes:
        batches: its batches.
        losses: the objective of each batch, and the losses that it is the weighted sum of, by name.
        norm: norm of the gradient before it was clipped.
    """

    batches: tuple[Batch, ...]
    losses: tuple[tuple[Tensor, Mapping[str, Tensor]], ...]
    norm: Tensor

    @property
    def loss(self) -> Tensor:
        """The objective, the sum over the batches."""
        return torch.stack([loss for loss, _ in self.losses]).sum()

    def per_query(self) -> tuple[float, dict[str, float]]:
        """Return objective and losses as means over their queries; the last batch of an epoch may be smaller."""
        return per_query((batch, *losses) for batch, losses in zip(self.batches, self.losses, strict=True))


def find_divergence(step: Step, state: Iterable[Tensor] = ()) -> str:
    """Return the value of a step that is not finite, in words; an empty string if all are.

    A step with a finite loss can spoil weights and state of the optimizer. A GPU is waited for once.
    """
    if not torch.isfinite(step.loss + step.norm):
        return f"the loss is {float(step.loss)} and the norm of its gradient {float(step.norm)}"
    finite = [values.isfinite().all().to(step.norm.device) for values in state]
    return "weights are not finite" if finite and not torch.stack(finite).all() else ""


_LOG_EVERY = 10

_OURS = (BEST, LAST, CONFIG, LOG, METRICS, CURVES)
_LEFT_BEHIND = re.compile(rf"\.({'|'.join(map(re.escape, _OURS))}){re.escape(TEMPORARY_MARK)}\d+")
"""Temporary names of the files that a run writes; nothing else in its folder belongs to it."""

Watch = Callable[[Report], None]
Remark = Callable[[str], None]

logger = logging.getLogger(__name__)


def train(
    job: TrainJob,
    watch: Watch = lambda report: None,
    remark: Remark = logger.warning,
    *,
    training_inputs: TrainingInputsProtocol | None = None,
) -> Result:
    """Train a model.

    The folder then holds ``best.pt`` (the model with the greatest sum of recalls on the validation split), ``last.pt``,
    ``config.toml``, ``log.jsonl``, and made of the latter ``metrics.csv`` and ``curves.png``. Under ``torchrun`` every process
    calls this with the same job.

    A run that is finished stays as it is where everything that determines its weights is the same.

    Args:
        job: what to train.
        watch: receives a report every few steps and after each evaluation.
        remark: receives a sentence about a precision that is emulated, about the captions that are left out, for each split that
            lacks features, about training images with captions in other splits, about features of zeros or of unusual norms, about
            the words and weights that were taken from elsewhere, and about content that has changed.
        training_inputs: what to train on, instead of the job's corpus.

    Raises:
        UsageError: the job does not fit this host or its data, or ``output`` holds a run that is not finished and ``resume`` is not
            set.
        DatasetError: a dataset is missing, of the wrong kind, or does not belong with the others, or ``output`` holds another
            run, or one of content that has changed since; nothing was trained.
        DivergedError: a loss, gradient or weight is no longer finite. The checkpoints are those of earlier steps.
        KeyboardInterrupt: Ctrl-C was pressed; ``last.pt`` holds the step at whose end the training stopped. SIGTERM and SIGHUP stop
            it in the same way, and then do what they did before. A second signal is not waited for.
    """
    config, device = job.resolved(), resolve_device(job.device)
    if not job.output or (job.corpus is None and training_inputs is None):
        missing = "--captions, --features and --vocabulary are missing" if job.output else "OUTPUT is missing"
        raise UsageError(f"{missing}: imagepivot train CONFIG OUTPUT --captions ... --features ... --vocabulary ...")
    check_precision(job.precision, device)
    if job.compile:
        config.model.check_compile()
    if job.compile and device.type == "cpu":
        raise UsageError("--compile needs a GPU, but the device is 'cpu': leave it out, or choose a GPU")
    folder = Folder(job.output)
    with ExitStack() as stack:
        processes = stack.enter_context(join_processes(device))
        if processes.is_rank_zero:
            stack.enter_context(lock_folder(folder))
        stack.enter_context(computing(job.precision, device))
        before = checkpoint_to_resume(folder, resume=job.resume)
        source = open_run(job.init_from) if job.init_from else None
        if training_inputs is None:
            assert job.corpus is not None
            options = {name: getattr(job, name) for name in ("seed", "memory_map", "allow_missing_features")}
            training_inputs = load_training_inputs(config, job.corpus, **options)
        start = Checkpoint(
            config=to_toml(config),
            dimensions=training_inputs.dimensions,
            model={},
            tokens=training_inputs.vocabulary.tokens,
            fingerprints=training_inputs.fingerprints,
            captions=training_inputs.captions_parameters,
            seed=job.seed,
            precision=job.precision,
            progress=TrainingProgress(),
            missing_features={missing.split: missing.to_dict() for missing in training_inputs.missing_features},
            started_from={} if source is None else provenance(source),
            contents=training_inputs.contents,
        )
        remarks, is_whole = [], False
        if before is not None:
            remarks = check_same_run(before, start, folder, allow_changed_content=job.allow_changed_content)
            is_whole = is_finished(before, start, folder, curves=job.curves)
            start = replace(start, started_from=before.started_from, contents=contents_since(before, start))
        loop = _Loop(job, config, training_inputs, start, processes, device, watch)
        reason = loop.stop_reason(before.progress) if before is not None and is_whole else ""
        if before is not None and not reason and not job.resume:
            raise holds_a_run(folder)
        taken = loop.begin(before, source)
        if processes.is_rank_zero:
            remarks += [bfloat16_remark(job.precision, device.type), *taken, overlap_remark(config, job.corpus)]
            remarks += [missing.remark for missing in training_inputs.missing_features]
            remarks += [outliers.remark for outliers in training_inputs.feature_outliers]
            for sentence in filter(None, remarks):
                remark(sentence)
        if before is not None and reason:
            return Result(job.output, replace(before.progress, stop_reason=reason), training_inputs.missing_features)
        with defer_signals() as interruption, loop.batches.prefetching():
            progress = loop.run(interruption)
    return Result(job.output, progress, training_inputs.missing_features)


class _Loop:
    """A training under way; checkpoints are made from ``start``, that of the run without a model."""

    def __init__(
        self,
        job: TrainJob,
        config: Config,
        training_inputs: TrainingInputsProtocol,
        start: Checkpoint,
        processes: DistributedContext,
        device: torch.device,
        watch: Watch,
    ) -> None:
        self.job, self.config, self.training_inputs, self.start = job, config, training_inputs, start
        self.processes, self.device, self.watch = processes, device, watch
        self.folder = Folder(job.output)
        self.progress = TrainingProgress()
        self.kept_step = 0  # Of last.pt.
        self.stopwatch = Stopwatch()
        self.batches = BatchLoader(training_inputs, training_inputs.sampler(config, job.seed), processes, device)
        self.epoch_steps = steps_per_epoch(config.schedule, self.batches.epoch_steps)
        self.model = build_model(config.model, start.dimensions, job.seed).to(device)
        if config.model.frozen_words:
            freeze_word_embeddings(self.model, start.dimensions.vocabulary_size)
        self.terms = terms_of(config.loss, self.model)
        optimizer = torch.optim.AdamW if config.optimizer.name == "adamw" else torch.optim.Adam
        self.optimizer = optimizer(
            [parameter for parameter in self.model.parameters() if parameter.requires_grad],
            lr=config.optimizer.learning_rate,
            betas=config.optimizer.betas,
            eps=config.optimizer.epsilon,
            weight_decay=config.optimizer.weight_decay,
            fused=True,
        )

    def begin(self, before: Checkpoint | None, other: Run | None) -> list[str]:
        """Restore the state in which an earlier process stopped, or take pretrained weights, and build the objective.

        Returns:
            What was taken from word vectors, and from another run, in words.
        """
        taken = []
        if before is not None:
            assert before.optimizer is not None
            assert before.sampler is not None
            source = self.folder.path_of(LAST)
            restore_model(self.model, before.model, source)
            restore_optimizer(self.optimizer, before.optimizer, source)
            restore_sampler(self.batches, before.sampler, source)
            self.progress = replace(before.progress, stop_reason="")
            self.kept_step = self.progress.step
            set_shutdown_notice(_kept(self.progress.step))
        else:
            set_shutdown_notice("stopped before the first checkpoint: nothing is kept")
            if self.training_inputs.word_vectors is not None:
                counts = self.training_inputs.vocabulary.counts
                taken.append(load_pretrained_embeddings(self.model, self.training_inputs.word_vectors, counts))
        if before is None and other is not None:  # Words that it knows are further than pretrained ones.
            began = init_from_run(self.model, self.start.tokens, other)
            self.start = replace(self.start, started_from=began.to_dict())
            taken.append(began.remark)
        objective = Objective(self.model, self.terms, gather_rows=self.processes.gather_rows)
        if self.job.compile:
            objective.compile()
        self.objective = self.processes.wrap(objective)
        return taken

    def run(self, interruption: DeferredSignal) -> TrainingProgress:
        """Train to the end, or until the step after which an interruption stops all processes."""
        if not self.processes.is_rank_zero:
            return self._run(None, interruption)
        for path in self.folder.local_path.glob(".*"):
            if _LEFT_BEHIND.fullmatch(path.name) and path.is_file():  # A process was killed while it wrote this file.
                path.unlink()
        with RunLog(
            self.folder.local_path,
            step=self.progress.step,
            tensorboard=self.job.tensorboard,
            curves=self.job.curves,
            config=self.start.config,
            hparams={"seed": self.start.seed, "precision": self.start.precision},
        ) as log:
            self.folder.write(CONFIG, self.start.config.encode())
            if self.progress.step and self.progress.best_step == self.progress.step:
                self._save(BEST)  # A process may have been killed between writing last.pt and best.pt.
            if not self.progress.step:
                if isinstance(self.training_inputs, TrainingInputs):
                    log.write("training_data", 0, self.training_inputs.counts(self.config))
                for missing in self.training_inputs.missing_features:
                    log.write("missing_features", 0, missing.to_dict())
                for outliers in self.training_inputs.feature_outliers:
                    log.write("feature_outliers", 0, outliers.to_dict())
                if self.start.started_from:
                    log.write("started_from", 0, self.start.started_from)
            return self._run(log, interruption)

    def _run(self, log: RunLog | None, interruption: DeferredSignal) -> TrainingProgress:
        eval_every_steps = self.config.schedule.eval_every_steps or self.epoch_steps
        self._stop_if_over()
        self.stopwatch.begin()
        while not self.progress.stop_reason:
            done = self._step()
            step = self.progress.step
            evaluates = step % eval_every_steps == 0 or bool(self.stop_reason(self.progress))
            saves = evaluates or step % self.job.save_every == 0
            if saves or step % _LOG_EVERY == 0 or self.device.type == "cpu":
                self._check_finite(done, weights=saves)
            if log is not None and step % _LOG_EVERY == 0:
                self._log_step(log, done)
            if evaluates:
                self._evaluate(log, done)
                self._stop_if_over()
            asked = self.processes.all_reduce_max(interruption.received)
            if asked:
                self._check_finite(done, weights=True)
            if saves or asked:
                self._save(LAST)
            if evaluates and self.progress.evals_since_best == 0:
                self._save(BEST)  # After last.pt, which holds the same model, so that best.pt is never there alone.
            if evaluates and log is not None:
                log.write("timing", step, self.stopwatch.lap() | {"threads": torch.get_num_threads()})
                with self.stopwatch.measure("curves"):
                    log.refresh()
            if asked:
                interruption.agreed = asked
                set_shutdown_notice(f"stopped at step {step:,}; {LAST} holds it, the same command with --resume goes on")
                self.processes.all_reduce_max(0)  # The end of one process ends the others: the checkpoint comes first.
                break
        return self.progress

    def _step(self) -> Step:
        """Train on the batches of a step: their gradients add up, as those of the queries of a batch do."""
        config, epoch = self.config, self.batches.epoch
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(config, step=self.progress.step, epoch=epoch, epoch_steps=self.epoch_steps)
        hinges = "sum" if self.progress.step < config.loss.sum_warmup_steps else config.loss.hinges
        self.optimizer.zero_grad()
        batches: list[Batch] = []
        losses: list[tuple[Tensor, Mapping[str, Tensor]]] = []
        while len(batches) < config.schedule.grad_accum_steps and self.batches.epoch == epoch:
            with self.stopwatch.measure("data"):
                batch, inputs = self.batches.next()
            loss, terms = self.objective(inputs, hinges)
            # Several processes exchange the gradients of each batch: the encoders of another may be others.
            loss.backward()
            batches.append(batch)
            losses.append((loss.detach(), terms))
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.optimizer.max_grad_norm or torch.inf)
        self.optimizer.step()
        self.progress = replace(self.progress, step=self.progress.step + 1)
        self.stopwatch.count(sum(batch.pairs for batch in batches))
        return Step(tuple(batches), tuple(losses), norm)

    def _evaluate(self, log: RunLog | None, done: Step) -> None:
        """Measure recalls on the validation split; only the first process does, and tells the others the score."""
        score = 0.0
        if log is not None:
            with self.stopwatch.measure("evaluation"):
                validation = self.training_inputs.evaluate(self.model, self.config, self.terms)
            results = validation.retrieval
            monitored = self.config.schedule.monitor_languages or self.config.data.languages
            score = sum(results[language].sum_of_recalls for language in monitored)
            if not all(map(isfinite, (validation.loss or 0.0, *validation.terms.values()))):
                score = nan
        score = self.processes.broadcast(score, self.device)
        if isnan(score):  # In all processes.
            raise self._diverged("the loss on the validation split is not finite")
        if log is not None:
            by_language = {language: retrieval.to_dict() for language, retrieval in results.items()}
            log.write("evaluation", self.progress.step, {"score": score, **by_language})
            if validation.loss is not None:
                log.write("validation", self.progress.step, {"loss": validation.loss, "terms": dict(validation.terms)})
        self.progress = self.progress.evaluated(score)
        if log is not None:
            scores = {language: retrieval.sum_of_recalls for language, retrieval in results.items()}
            self.watch(replace(self._report(done.per_query()[0], scores), validation_loss=validation.loss))

    def _check_finite(self, done: Step, *, weights: bool) -> None:
        """Stop a training that has diverged, before anything of it is written; a GPU is waited for."""
        moments = (value for state in self.optimizer.state.values() for value in state.values())
        if finding := find_divergence(done, (*self.model.state_dict().values(), *moments) if weights else ()):
            raise self._diverged(finding)

    def _diverged(self, finding: str) -> DivergedError:
        rate, kept = self.optimizer.param_groups[0]["lr"], self.kept_step
        where = f"into another folder; {LAST} keeps step {kept:,}" if kept else "again; no checkpoint was written"
        return DivergedError(
            f"{finding} at step {self.progress.step:,}, with a learning rate of {rate:g}: the training has diverged. Lower "
            f"optimizer.learning_rate, or look at feature outliers if any were reported, and train {where}"
        )

    def _log_step(self, log: RunLog, done: Step) -> None:
        loss, terms = done.per_query()
        log.write(
            "step",
            self.progress.step,
            {
                "loss": loss,
                "terms": terms,
                "task": "+".join(dict.fromkeys(batch.task for batch in done.batches)),
                "languages": list(dict.fromkeys(language for batch in done.batches for language in batch.languages)),
                "gradient_norm": float(done.norm),
                "learning_rate": self.optimizer.param_groups[0]["lr"],
            },
        )
        self.watch(self._report(loss, {}))

    def _report(self, loss: float, scores: dict[str, float]) -> Report:
        progress, limit = self.progress, steps_in_all(self.config.schedule, self.epoch_steps)
        return Report(progress.step, limit, self.batches.epoch, loss, scores, progress.best_score)

    def stop_reason(self, progress: TrainingProgress) -> str:
        """Return why a training ends after this progress; an empty string if it goes on."""
        return stop_reason(progress, self.config.schedule, self.epoch_steps)

    def _stop_if_over(self) -> None:
        self.progress = replace(self.progress, stop_reason=self.stop_reason(self.progress))

    def _save(self, name: str) -> None:
        if name == LAST:
            self.kept_step = self.progress.step
        if not self.processes.is_rank_zero:
            return
        checkpoint = replace(self.start, model=self.model.state_dict(), progress=replace(self.progress, stop_reason=""))
        if name == LAST:
            optimizer, sampler = self.optimizer.state_dict(), self.batches.state()
            checkpoint = replace(checkpoint, progress=self.progress, optimizer=optimizer, sampler=sampler)
        with self.stopwatch.measure("checkpoints"):
            write_checkpoint(self.folder, name, checkpoint)
        if name == LAST:
            set_shutdown_notice(_kept(self.progress.step))


def _kept(step: int) -> str:
    return f"stopped; {LAST} holds step {step:,}, the same command with --resume goes on from there"
