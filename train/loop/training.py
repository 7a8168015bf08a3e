"""The training loop.

After initialization only the sampler is random, and its state is its position. A killed run resumes from its last checkpoint
and reaches the weights of an uninterrupted one. On a CPU with the same number of threads they are equal bit for bit.
"""

import logging
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from math import ceil, isfinite, isnan, nan

import torch
from torch import Tensor

from schemas.console.events import Remark
from schemas.errors import UsageError
from schemas.fingerprints import sha256_of_json
from schemas.options import takes_fields
from schemas.parameters import untrained_remark
from schemas.process.devices import check_precision
from schemas.process.resources import bfloat16_remark
from schemas.process.shutdown import DeferredSignal, defer_signals, set_shutdown_notice
from schemas.storage.folder import TEMPORARY_MARK, Folder
from schemas.user_code import user_code
from schemas.writing.locks import lock_folder
from train.config.sections import Config, to_toml
from train.data.sampling import Batch
from train.devices import choose_device, computing
from train.evaluation.ranks import RANKS, write_ranks
from train.jobs import DivergedError, TrainJob, TrainResult
from train.loop.batch_loader import BatchLoader
from train.loop.distributed import DistributedContext, join_processes
from train.loop.schedules import learning_rate, max_total_steps, stop_reason
from train.loop.training_data import TrainingInputs, load_training_inputs, overlap_remark
from train.losses import LossSums, Objective, is_at_margin, terms_of
from train.models.catalogue import build_model
from train.models.encoders import freeze_word_embeddings, load_pretrained_embeddings
from train.progress import Report
from train.runs.checkpoints import BEST, LAST, Checkpoint, TrainingProgress, write_checkpoint
from train.runs.init_from_run import init_from_run, provenance
from train.runs.log import CONFIG, CURVES, LOG, METRICS, LogSink, RunLog, Stopwatch
from train.runs.restoring import restore_model, restore_optimizer, restore_sampler
from train.runs.run import (
    MODULES,
    Run,
    check_same_run,
    checkpoint_to_resume,
    contents_since,
    holds_a_run,
    is_finished,
    open_run,
)

_LOG_EVERY_STEPS = 10
# Steps at the margin before a collapse is reported, also where an epoch has fewer: embeddings may begin nearly equal.
_MIN_STEPS_AT_MARGIN = 100

_NAMES = "|".join(map(re.escape, (BEST, LAST, CONFIG, LOG, METRICS, CURVES, RANKS)))
_TEMPORARY_FILE = re.compile(rf"\.({_NAMES}){re.escape(TEMPORARY_MARK)}\d+")

Watch = Callable[[Report], None]

logger = logging.getLogger(__name__)


@takes_fields(TrainJob)
def train(
    job: TrainJob,
    on_report: Watch = lambda report: None,
    on_warning: Remark = logger.warning,
    *,
    on_log: LogSink | None = None,
    training_inputs: TrainingInputs | None = None,
) -> TrainResult:
    """Train a model.

    The folder of the run then contains:

    * ``best.pt``, the model with the best sum of recalls on the validation split, and ``last.pt``, for resuming;
    * ``ranks.parquet``, the rank of every validation query at the best step, see `train.evaluation.ranks`;
    * ``config.toml`` and ``log.jsonl``;
    * ``metrics.csv`` and ``curves.png``, derived from ``log.jsonl``.

    Under ``torchrun`` every process calls this with the same job. A finished run is not trained again.

    Args:
        job: the job.
        on_report: called with a report every few steps and after each evaluation.
        on_warning: called with sentences about the data, the precision, pretrained weights and changed contents.
        on_log: called by rank 0 with each line of ``log.jsonl``; after a kill, lines since the last checkpoint come again.
        training_inputs: data in place of the job's corpus.

    Raises:
        UsageError: the job does not fit this host or its data, or ``output`` is an unfinished run and ``resume`` is not set.
        DatasetError: a dataset is missing, of the wrong kind, or incompatible with the others; or ``output``
            is another run, or one of changed contents.
        DivergedError: a loss, gradient or weight is NaN or infinite. The checkpoints are those of earlier steps.
        KeyboardInterrupt: Ctrl-C was pressed; ``last.pt`` is the state after the current step. SIGTERM and SIGHUP also stop after
            the current step, then act as without this handler. A second signal stops immediately.
    """
    config, device = job.resolved(), choose_device(job.device)
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
            options = {name: getattr(job, name) for name in ("seed", "memory_map", "allow_missing_features", "exclude")}
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
            contents={**training_inputs.contents, **({MODULES: sha256_of_json(modules)} if (modules := user_code()) else {})},
            untrained=training_inputs.training.untrained,
            sample_outputs=training_inputs.training.sample_outputs,
        )
        remarks, is_whole = [], False
        if before is not None:
            remarks = check_same_run(before, start, folder, allow_changed_content=job.allow_changed_content)
            is_whole = is_finished(before, start, folder, curves=job.curves)
            start = replace(start, started_from=before.started_from, contents=contents_since(before, start))
        loop = _Loop(job, config, training_inputs, start, processes, device, on_report, on_warning, on_log)
        reason = loop.stop_reason(before.progress) if before is not None and is_whole else ""
        if before is not None and not reason and not job.resume:
            raise holds_a_run(folder)
        weight_remarks = loop.begin(before, source)
        if processes.is_rank_zero:
            remarks += [untrained_remark(start.untrained), bfloat16_remark(job.precision, device.type)]
            remarks += [*weight_remarks, overlap_remark(config, job.corpus)]
            remarks += [missing.remark for missing in training_inputs.missing_features]
            remarks += [outliers.remark for outliers in training_inputs.feature_outliers]
            if training_inputs.training.exclusion is not None:
                remarks.append(training_inputs.training.exclusion.remark(config.data.splits))
            for sentence in filter(None, remarks):
                on_warning(sentence)
        if before is not None and reason:
            if 0 < config.schedule.max_steps < before.progress.step:
                on_warning(f"finished: {before.progress.step:,} of {config.schedule.max_steps:,} steps, nothing was trained")
            return loop.result(replace(before.progress, stop_reason=reason))
        with defer_signals() as interruption, loop.batches.prefetching():
            progress = loop.run(interruption)
    return loop.result(progress)


class _Loop:
    """State of a training run; ``start`` is its checkpoint before the first step."""

    def __init__(
        self,
        job: TrainJob,
        config: Config,
        training_inputs: TrainingInputs,
        start: Checkpoint,
        processes: DistributedContext,
        device: torch.device,
        on_report: Watch,
        on_warning: Remark,
        on_log: LogSink | None,
    ) -> None:
        self.job, self.config, self.training_inputs, self.start = job, config, training_inputs, start
        self.processes, self.device, self.on_report, self.on_warning = processes, device, on_report, on_warning
        self.log_sinks = () if on_log is None else (on_log,)
        self.folder = Folder(job.output)
        self.chance = training_inputs.chance()
        self.progress = TrainingProgress()
        self.loss = 0.0  # The loss in the last line of the log.
        self.new_losses: list[tuple[Batch, Tensor, Mapping[str, Tensor]]] = []  # Losses that the progress lacks, on the device.
        self.saved_step = 0  # Step of last.pt.
        self.stopwatch = Stopwatch()
        self.batches = BatchLoader(training_inputs, training_inputs.sampler(config, job.seed), processes, device)
        # The last step of an epoch may accumulate fewer batches.
        self.epoch_steps = ceil(self.batches.epoch_steps / config.schedule.grad_accum_steps)
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
        """Restore a checkpoint or load pretrained weights, and build the objective.

        Returns:
            Remarks about weights from word vectors and from another run.
        """
        remarks = []
        if before is not None:
            assert before.optimizer is not None
            assert before.sampler is not None
            source = self.folder.path_of(LAST)
            restore_model(self.model, before.model, source)
            restore_optimizer(self.optimizer, before.optimizer, source)
            restore_sampler(self.batches.restore, before.sampler, source)
            self.progress = replace(before.progress, stop_reason="")
            self.saved_step = self.progress.step
            set_shutdown_notice(_saved_notice(self.progress.step))
        else:
            set_shutdown_notice("stopped before the first checkpoint: nothing is kept")
            if self.training_inputs.word_vectors is not None:
                counts = self.training_inputs.vocabulary.counts
                remarks.append(load_pretrained_embeddings(self.model, self.training_inputs.word_vectors, counts))
        if before is None and other is not None:  # After the word vectors, which its weights replace.
            remarks.append(init_from_run(self.model, self.start.tokens, other))
        objective = Objective(self.model, self.terms, gather_rows=self.processes.gather_rows)
        if self.job.compile:
            objective.compile()
        self.objective = self.processes.wrap(objective)
        return remarks

    def run(self, interruption: DeferredSignal) -> TrainingProgress:
        """Train to the end, or stop all processes after the step of an interruption."""
        if not self.processes.is_rank_zero:
            return self._run(None, interruption)
        for path in self.folder.local_path.glob(".*"):
            if _TEMPORARY_FILE.fullmatch(path.name) and path.is_file():  # A file of a killed process.
                path.unlink()
        with RunLog(
            self.folder.local_path,
            step=self.progress.step,
            tensorboard=self.job.tensorboard,
            curves=self.job.curves,
            config=self.start.config,
            hparams={"seed": self.start.seed, "precision": self.start.precision},
            sinks=self.log_sinks,
        ) as log:
            self.folder.put(CONFIG, self.start.config.encode())
            if self.progress.step and self.progress.best_step == self.progress.step:
                self._save(BEST)  # The process may have been killed between last.pt and best.pt.
            if not self.progress.step:
                log.write("training_data", 0, self.training_inputs.counts(self.config))
                log.write("chance", 0, {language: chance.to_dict() for language, chance in self.chance.items()})
                if self.training_inputs.training.exclusion is not None:
                    log.write("excluded", 0, self.training_inputs.training.exclusion.to_dict())
                for missing in self.training_inputs.missing_features:
                    log.write("missing_features", 0, missing.to_dict())
                for outliers in self.training_inputs.feature_outliers:
                    log.write("feature_outliers", 0, vars(outliers))
                if self.start.untrained:
                    log.write("untrained", 0, {"features": list(self.start.untrained)})
                if self.start.started_from:
                    log.write("started_from", 0, self.start.started_from)
            return self._run(log, interruption)

    def _run(self, log: RunLog | None, interruption: DeferredSignal) -> TrainingProgress:
        eval_every_steps = self.config.schedule.eval_every_steps or self.epoch_steps
        self._stop_if_over()
        self.stopwatch.begin()
        while not self.progress.stop_reason:
            losses, norm = self._step()
            step = self.progress.step
            evaluates = step % eval_every_steps == 0 or bool(self.stop_reason(self.progress))
            saves = evaluates or step % self.job.save_every == 0
            if saves or step % _LOG_EVERY_STEPS == 0 or self.device.type == "cpu":
                self._check_finite(losses, norm, weights=saves)
            if step % _LOG_EVERY_STEPS == 0:
                self._log_step(log, norm)
            if evaluates:
                self._evaluate(log)
                self._stop_if_over()
            signal = self.processes.all_reduce_max(interruption.received)
            if signal:
                self._check_finite(losses, norm, weights=True)
            if saves or signal:
                self._save(LAST)
            if evaluates and self.progress.evals_since_best == 0:
                self._save(BEST)  # After last.pt, so that best.pt never exists alone.
            if evaluates and log is not None:
                log.write("timing", step, self.stopwatch.lap() | {"threads": torch.get_num_threads()})
                with self.stopwatch.measure("curves"):
                    log.refresh()
            if signal:
                interruption.agreed = signal
                set_shutdown_notice(f"stopped at step {step:,}; {LAST} holds it, the same command with --resume goes on")
                self.processes.all_reduce_max(0)  # Wait for the checkpoint: the end of one process ends the others.
                break
        return self.progress

    def _step(self) -> tuple[list[Tensor], Tensor]:
        """Accumulate the gradients of the batches of a step, and update the weights.

        Returns:
            Objectives of the batches, and norm of the gradient before clipping.
        """
        config, epoch = self.config, self.batches.epoch
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(config, step=self.progress.step, epoch=epoch, epoch_steps=self.epoch_steps)
        hinges = "sum" if self.progress.step < config.loss.sum_warmup_steps else config.loss.hinges
        self.optimizer.zero_grad()
        losses: list[tuple[Batch, Tensor, Mapping[str, Tensor]]] = []
        while len(losses) < config.schedule.grad_accum_steps and self.batches.epoch == epoch:
            with self.stopwatch.measure("data"):
                batch, inputs = self.batches.next()
            loss, terms = self.objective(inputs, hinges)
            # Processes exchange gradients after each batch: the next one may use other encoders.
            loss.backward()
            losses.append((batch, loss.detach(), terms))
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.optimizer.max_grad_norm or torch.inf)
        self.optimizer.step()
        self.progress = replace(self.progress, step=self.progress.step + 1)
        self.new_losses += losses
        self.stopwatch.count(sum(batch.pairs for batch, *_ in losses))
        return [loss for _, loss, _ in losses], norm

    def _evaluate(self, log: RunLog | None) -> None:
        """Measure recalls on the validation split on rank 0, and broadcast the score."""
        score = 0.0
        if log is not None:
            with self.stopwatch.measure("evaluation"):
                validation = self.training_inputs.evaluate(self.model, self.config, self.terms)
            results = validation.retrieval
            score = sum(results[language].sum_of_recalls for language in self.config.monitored)
            if not all(map(isfinite, (validation.loss or 0.0, *validation.terms.values()))):
                score = nan
        score = self.processes.broadcast(score, self.device)
        if isnan(score):  # Equal in all processes.
            raise self._diverged("the loss on the validation split is not finite")
        self.progress = self.progress.evaluated(score)
        if log is not None:
            by_language = {language: retrieval.to_dict() for language, retrieval in results.items()}
            log.write("evaluation", self.progress.step, {"score": score, **by_language})
            if validation.loss is not None:
                log.write("validation", self.progress.step, {"loss": validation.loss, "terms": dict(validation.terms)})
            if validation.ranks is not None and self.progress.evals_since_best == 0:
                # Before the checkpoints: a resumed run evaluates this step again, or has a checkpoint of it.
                with self.stopwatch.measure("checkpoints"):
                    write_ranks(self.folder, validation.ranks, {"step": str(self.progress.step)})
            scores = {language: retrieval.sum_of_recalls for language, retrieval in results.items()}
            losses = self._add_losses()
            loss = losses.per_query()[0] if losses.sums else self.loss
            self.on_report(replace(self._report(loss, scores), validation_loss=validation.loss))

    def _check_finite(self, losses: list[Tensor], norm: Tensor, *, weights: bool) -> None:
        """Raise a `DivergedError` before invalid values are written.

        This synchronises with a GPU. A step with a finite loss may still corrupt weights or optimizer state.
        """
        loss = torch.stack(losses).sum()
        if not torch.isfinite(loss + norm):
            raise self._diverged(f"the loss is {float(loss)} and the norm of its gradient {float(norm)}")
        if weights:
            moments = (value for state in self.optimizer.state.values() for value in state.values())
            values = (*self.model.state_dict().values(), *moments)
            if not torch.stack([value.isfinite().all().to(norm.device) for value in values]).all():
                raise self._diverged("weights are not finite")

    def _diverged(self, finding: str) -> DivergedError:
        rate, saved = self.optimizer.param_groups[0]["lr"], self.saved_step
        where = f"into another folder; {LAST} keeps step {saved:,}" if saved else "again; no checkpoint was written"
        return DivergedError(
            f"{finding} at step {self.progress.step:,}, with a learning rate of {rate:g}: the training has diverged. Lower "
            f"optimizer.learning_rate, or look at feature outliers if any were reported, and train {where}"
        )

    def _add_losses(self) -> LossSums:
        """Add the losses of new steps to the progress; this synchronises with a GPU."""
        self.progress = replace(self.progress, losses=self.progress.losses.add(self.new_losses))
        self.new_losses = []
        return self.progress.losses

    def _log_step(self, log: RunLog | None, norm: Tensor) -> None:
        """Log mean losses since the last line, and begin the next mean."""
        losses = self._add_losses()
        self.progress = replace(self.progress, losses=LossSums())
        self.loss, terms = losses.per_query()
        if log is not None:
            values = {"loss": self.loss, "terms": terms, "task": "+".join(losses.tasks), "languages": list(losses.languages)}
            values |= {"gradient_norm": float(norm), "learning_rate": self.optimizer.param_groups[0]["lr"]}
            log.write("step", self.progress.step, values)
            self.on_report(self._report(self.loss, {}))
        self._warn_of_collapse(log, terms)

    def _warn_of_collapse(self, log: RunLog | None, terms: Mapping[str, float]) -> None:
        """Warn once of a loss that stays at the margin for an epoch."""
        loss, steps, limit = self.config.loss, self.progress.steps_at_margin, max(self.epoch_steps, _MIN_STEPS_AT_MARGIN)
        if loss.hinges != "max" or steps >= limit:
            return
        is_warm = self.progress.step >= loss.sum_warmup_steps + _LOG_EVERY_STEPS
        steps = steps + _LOG_EVERY_STEPS if is_warm and is_at_margin(terms, loss.margin) else 0
        self.progress = replace(self.progress, steps_at_margin=steps)
        if log is not None and steps >= limit:
            log.write("collapse", self.progress.step, {"margin": loss.margin, "steps": steps})
            self.on_warning(
                f"the training has collapsed: for {steps:,} steps the loss has stayed at the margin {loss.margin:g}, its value if "
                f"all scores are equal. Train again with the sum of hinges at first, e.g. --set loss.sum_warmup_steps={limit}, or "
                f"with a lower optimizer.learning_rate than {self.config.optimizer.learning_rate:g}"
            )

    def _report(self, loss: float, scores: dict[str, float]) -> Report:
        progress, schedule, monitored = self.progress, self.config.schedule, self.config.monitored
        position = progress.step, max_total_steps(schedule, self.epoch_steps), self.batches.epoch
        stops_early = schedule.patience > 0
        return Report(*position, loss, scores, progress.best_score, self.chance, monitored, stops_early=stops_early)

    def result(self, progress: TrainingProgress) -> TrainResult:
        """Return the result of the training."""
        chance = {language: self.chance[language] for language in self.config.monitored if self.chance}
        return TrainResult(self.job.output, progress, self.training_inputs.missing_features, chance)

    def stop_reason(self, progress: TrainingProgress) -> str:
        """Return the reason to stop, see `train.loop.schedules.stop_reason`."""
        return stop_reason(progress, self.config.schedule, self.epoch_steps)

    def _stop_if_over(self) -> None:
        self.progress = replace(self.progress, stop_reason=self.stop_reason(self.progress))

    def _save(self, name: str) -> None:
        if name == LAST:
            self.saved_step = self.progress.step
        self._add_losses()
        if not self.processes.is_rank_zero:
            return
        progress = replace(self.progress, stop_reason="", losses=LossSums())
        checkpoint = replace(self.start, model=self.model.state_dict(), progress=progress)
        if name == LAST:
            optimizer, sampler = self.optimizer.state_dict(), self.batches.position
            checkpoint = replace(checkpoint, progress=self.progress, optimizer=optimizer, sampler=sampler)
        with self.stopwatch.measure("checkpoints"):
            write_checkpoint(self.folder, name, checkpoint)
        if name == LAST:
            set_shutdown_notice(_saved_notice(self.progress.step))


def _saved_notice(step: int) -> str:
    return f"stopped; {LAST} holds step {step:,}, the same command with --resume goes on from there"
