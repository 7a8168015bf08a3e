"""Building a plan: steps in order, side by side where independent, and only those that have something to do.

Each step is its command, run as a process of its own, and whatever the command keeps and continues is kept and continued here, too.
What other values have made is not lost: it is moved below ``.plan/earlier``, and taken back where these values are wanted again.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipelines.plans.catalogue import CommandLine
from pipelines.plans.deciding import Look, Places, changes, result_of
from pipelines.plans.job import Build, BuildJob, LockError, StepEnd, StepError
from pipelines.plans.locking import Lock
from pipelines.plans.processes import Outcome, StepProcess
from pipelines.plans.reading import Plan, Step, read_plan
from pipelines.plans.records import Memory, Record, hold_build
from pipelines.plans.states import Result
from schemas.errors import DatasetError, ImagepivotError, UsageError
from schemas.interruption import orderly
from schemas.locations import is_remote
from schemas.manifest import Manifest
from schemas.storage import Folder

__all__ = ["Tell", "build"]

Tell = Callable[[str, Mapping[str, Any]], None]
"""Gets the name of a step and an event: those of its command, and ``step`` with a ``status`` at its start and end."""

_MOST_BEFORE = 4


def build(job: BuildJob, line: CommandLine, tell: Tell = lambda step, event: None) -> Build:
    """Build a plan.

    Args:
        job: what to build.
        line: the commands.
        tell: gets what there is to say of each step.

    Raises:
        UsageError: the plan is not understood.
        StepError: a step failed; those that are done are kept.
        LockError: something differs from the lock file.
        ImagepivotError: an input is missing, or another build is at work.
    """
    plan = read_plan(job.plan, line, output=job.output, settings=job.settings)
    steps = plan.chosen(job.targets)
    lock = Lock.read(plan)
    memory = Memory.read(plan.output)
    look = Look(Places(plan), line, memory.records, {})
    first = {step.name: look.at(step) for step in steps}  # Inputs that are missing show before anything is made.
    if job.locked:
        _refuse([cause for step in steps for cause in lock.causes(step, first[step.name])], lock, "nothing was made")
    with hold_build(plan.output) as handle:
        memory.records.update(Memory.read(plan.output).records)  # Another build may have ended meanwhile.
        work = _Work(job, plan, first, line, memory, tell, () if handle is None else (handle,))
        ends = work.run()
        made = {step.name: (step, memory.records[step.name], work.results[step.name]) for step in steps}
        if job.locked:
            differing: set[str] = set()
            found = [text for step in steps for text in lock.effects(step, work.results[step.name], differing)]
            _refuse(found, lock, "the results are kept")
        else:
            lock.write(made, plan)
        if job.prune:
            for folder in memory.earlier():
                shutil.rmtree(folder)
    return Build(plan.output, lock.location, ends)


def _refuse(differences: Sequence[str], lock: Lock, end: str) -> None:
    if differences:
        raise LockError(f"{len(differences)} differences from {lock.location!r}; {end}:\n  " + "\n  ".join(differences))


class _Work:
    """The steps of one build."""

    def __init__(
        self,
        job: BuildJob,
        plan: Plan,
        looked: Mapping[str, Record],
        line: CommandLine,
        memory: Memory,
        tell: Tell,
        holding: tuple[int, ...],
    ) -> None:
        self.results: dict[str, Result] = {}
        self._job, self._line, self._looked = job, line, looked
        self._steps = [plan.steps[name] for name in looked]
        self._memory, self._tell, self._holding = memory, tell, holding
        self._places = Places(plan)
        self._lock = threading.Lock()
        self._running: dict[str, StepProcess] = {}
        self._stopped = False

    def run(self) -> tuple[StepEnd, ...]:
        """Make all steps; return what became of each."""
        ends: dict[str, StepEnd] = {}
        waiting = {step.name: step for step in self._steps}
        at_work: dict[Future[StepEnd], Step] = {}
        failed: BaseException | None = None
        with orderly(), ThreadPoolExecutor(self._job.jobs or len(self._steps)) as pool:
            try:
                while at_work or (waiting and failed is None):
                    for step in [step for step in waiting.values() if failed is None and self._may_start(step, ends, at_work)]:
                        if self._may_start(step, ends, at_work):
                            at_work[pool.submit(self._make, waiting.pop(step.name))] = step
                    done, _ = wait(at_work, return_when=FIRST_COMPLETED)
                    for future in done:
                        step = at_work.pop(future)
                        if (error := future.exception()) is None:
                            ends[step.name] = future.result()
                            continue
                        failed = failed or error
                        self._tell(step.name, {"event": "step", "status": "failed", "message": str(error)})
            except BaseException:
                self._stop()  # Leaving the block waits for the processes, which put their folders in order.
                raise
        if failed is not None:
            raise failed
        return tuple(ends[step.name] for step in self._steps)

    def _may_start(self, step: Step, ends: Mapping[str, StepEnd], at_work: Mapping[Future[StepEnd], Step]) -> bool:
        if any(name not in ends for name in step.needs) or (self._job.jobs and len(at_work) >= self._job.jobs):
            return False
        return bool(self._job.jobs) or not step.kind.computes or not any(other.kind.computes for other in at_work.values())

    def _stop(self) -> None:
        with self._lock:
            self._stopped = True
            for process in self._running.values():
                process.send(signal.SIGTERM)

    # --- one step ----------------------------------------------------------------------------------------------------

    def _make(self, step: Step) -> StepEnd:
        """Make a step, or find that there is nothing to do."""
        started = time.monotonic()
        location = self._places.result(step)
        now = self._looked[step.name]
        if step.needs:
            now = Look(self._places, self._line, self._memory.records, self.results).at(step)
        record = self._memory.records.get(step.name)
        done = "up to date"
        if record is not None and record.key != now.key and self._memory.has_earlier(step.name, now.key):
            if _exists(location):
                self._move(step, location, record, now)
            record, done = self._memory.take_back(step.name, now.key, location), "taken back"
            self._note(step, record)
        result = None if self._job.check else self._unchanged(step, location, record, now)
        if result is None:
            why = _why(record, now, is_there=_exists(location))
            self._tell(step.name, {"event": "step", "status": "started", "message": why})
            result, done = self._run(step, location, record, now), "made"
        with self._lock:
            self.results[step.name] = result
        end = StepEnd(step.name, location, done, result.rows, result.bytes, time.monotonic() - started)
        self._tell(step.name, {"event": "step", "status": done, "rows": end.rows, "bytes": end.bytes, "seconds": end.seconds})
        return end

    def _unchanged(self, step: Step, location: str, record: Record | None, now: Record) -> Result | None:
        """Return the result of a step that has nothing to do."""
        if record is None or record.result is None or changes(record, now):
            return None
        result = result_of(step, location, record.result)
        if result is None or result.content != record.result.content:
            return None
        if (record.inputs, record.result) != (now.inputs, result):  # Other times of the same content.
            self._note(step, replace(record, inputs=now.inputs, result=result))
        return result

    def _run(self, step: Step, location: str, record: Record | None, now: Record) -> Result:
        is_other = record is None or record.key != now.key
        if is_other and _exists(location) and not _goes_on(step, record, now):
            self._move(step, location, record, now)
        is_new = not _exists(location)
        before = record if is_other else record.before  # type: ignore[union-attr]
        self._note(step, replace(now, before=_limited(before)))
        started = time.monotonic()
        outcome = self._call(step, location, now)
        if outcome.refused:
            self._move(step, location, record, now)
            self._note(step, now)
            outcome = self._call(step, location, now, anew=self._job.replace)
        if outcome.code:
            message = f"step {step.name} ({step.command}) failed: {outcome.message or f'exit code {outcome.code}'}"
            raise UsageError(message) if outcome.code == 2 else StepError(message, outcome.code)
        if step.kind.makes == "report":
            parent, _, name = location.rpartition("/")
            Folder(parent).write(name, self._named(step, outcome.output))
        result = result_of(step, location, None)
        if result is None:
            raise ImagepivotError(f"step {step.name} ({step.command}) has ended, and {location!r} does not hold what it makes")
        seconds = time.monotonic() - started if is_new else 0.0
        self._note(step, replace(now, result=result, seconds=seconds))
        return result

    def _call(self, step: Step, location: str, now: Record, *, anew: bool = False) -> Outcome:
        values: dict[str, Any] = {**step.values, **step.kind.given}
        for parameter, references in step.inputs.items():
            values[parameter] = [self._places.location(reference) for reference in references]
        if step.like is not None:
            values["shards"] = now.options["shards"]
        if step.kind.runs_elsewhere:
            values |= self._job.execution
        if anew:
            values = {name: value for name, value in values.items() if name != "update"} | {"overwrite": True}
        elif self._job.check and step.kind.checks:
            values["check"] = True
        if "log-json" in self._line.names(step.command):
            values["log_json"] = True
        if step.kind.output:
            values[step.kind.output] = location
        prefix = f"IMAGEPIVOT_{step.command.upper().replace('-', '_')}_"
        variables = {name: value for name, value in os.environ.items() if not name.startswith(prefix)}
        process = StepProcess(
            self._line.words(step.command, values),
            {**variables, **step.environment},
            self._holding,
            lambda event: self._tell(step.name, event),
        )
        with self._lock:
            if self._stopped:
                process.send(signal.SIGTERM)
            self._running[step.name] = process
        if not is_remote(location):
            Path(location).parent.mkdir(parents=True, exist_ok=True)
        return process.run()

    def _named(self, step: Step, report: bytes) -> bytes:
        """Put names in place of locations, so that a report is the same wherever the plan is built."""
        names = {}
        for reference in step.references:
            location = self._places.location(reference)
            name = reference.step or location.rstrip("/").rpartition("/")[2]
            names[location] = f"{name}/{reference.location}" if reference.step and reference.location else name
        every = list(names.values())
        for location, name in sorted(names.items(), key=lambda item: len(item[0]), reverse=True):
            if every.count(name) == 1:  # Else nobody could tell them apart.
                before, after = (json.dumps(text, ensure_ascii=False)[1:-1].encode() for text in (location, name))
                report = report.replace(before, after)
        return report

    def _move(self, step: Step, location: str, record: Record | None, now: Record) -> None:
        """Make room for what other values make: move what is there aside, or let it be replaced."""
        if is_remote(location):
            if not (self._job.replace and (step.kind.overwrites or step.kind.makes in ("file", "report"))):
                raise DatasetError(
                    f"step {step.name}: {location!r} holds what other values made ({_why(record, now, is_there=True)}), and in a "
                    "store nothing can be moved aside: give --replace to delete it, or another --output. Nothing was changed"
                )
            return
        if self._job.replace:
            if step.kind.makes != "dataset":
                shutil.rmtree(location) if Path(location).is_dir() else Path(location).unlink()
            return
        kept = self._memory.set_aside(step.name, location, _of(location, record, step))
        self._tell(step.name, {"event": "remark", "message": f"what other values made is kept in {str(kept)!r}"})

    def _note(self, step: Step, record: Record) -> None:
        with self._lock:
            self._memory.note(step.name, record)


def _exists(location: str) -> bool:
    if not is_remote(location):
        return os.path.lexists(location)
    parent, _, name = location.rpartition("/")
    return Folder(parent).size(name) is not None or bool(Folder(location).names())


def _goes_on(step: Step, record: Record | None, now: Record) -> bool:
    """Whether a command itself does right by what other values made in its place: recognises it, or adds to it."""
    if step.kind.makes == "dataset":
        return True
    if record is None:
        return step.kind.makes in ("run", "results")
    keys = [step.keys.get(name, name) for name in step.kind.adds]
    before, after = (
        replace(one, options={key: value for key, value in one.options.items() if key not in keys}) for one in (record, now)
    )
    return bool(keys) and before.key == after.key


def _limited(record: Record | None, most: int = _MOST_BEFORE) -> Record | None:
    """Return a record with at most so many before it."""
    if record is None or most == 0:
        return None
    return replace(record, before=_limited(record.before, most - 1))


def _of(location: str, record: Record | None, step: Step) -> Record | None:
    """Return the record of what is at a location, as far as one can tell, from that of a step and those before."""
    if record is None or step.kind.makes != "dataset":
        return record
    try:
        fingerprint = Manifest.read(Folder(location)).fingerprint
    except DatasetError:
        fingerprint = ""
    candidate: Record | None = record
    while candidate is not None:
        made = candidate.result.fingerprint if candidate.result is not None else ""
        if made == fingerprint:
            return candidate
        candidate = candidate.before
    return None


def _why(record: Record | None, now: Record, *, is_there: bool) -> str:
    """Say why a step runs."""
    if record is None:
        return "continues" if is_there else "not made yet"
    if record.result is None:
        return "continues" if is_there and record.key == now.key else "was stopped"
    return "; ".join(changes(record, now)) or ("its result was changed" if is_there else "its result is gone")
