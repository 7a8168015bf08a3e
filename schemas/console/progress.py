"""Progress of a run: a line on a terminal, JSON events, a file of metrics."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Any, Self

from schemas.console.events import emit, line
from schemas.errors import DatasetError, UsageError
from schemas.escapes import redact
from schemas.options import Opt

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.progress import Progress

_LIVE_SECONDS = 0.2
_PLAIN_SECONDS = 10.0
_METRICS_SECONDS = 1.0
_WIDE = 140  # Columns of a terminal that fit bar and details into one line.
_MAX_NAME = 30

FAILED = "failed_"
"""Start of the names of counts of failures by reason."""


@dataclass(frozen=True)
class Monitoring:
    """Outputs about a run for other programs.

    Raises:
        UsageError: the file of metrics has another ending than ``.prom``.

    Examples:
        >>> monitoring = imagepivot.Monitoring(metrics_file="build/captions.prom")
    """

    log_json: Annotated[bool, Opt("Write stderr as lines of JSON, for programs.")] = False
    log_seconds: Annotated[float, Opt("Report progress events this often.", min_=0.1)] = 1.0
    metrics_file: Annotated[str, Opt("Write counts for Prometheus to NAME.prom.", metavar="PATH")] = ""

    def __post_init__(self) -> None:
        # The collector reads no other files, and files of values that are not trusted can replace no other ones.
        if self.metrics_file and not self.metrics_file.endswith(".prom"):
            raise UsageError(f"--metrics-file is {self.metrics_file!r}, expected a name that ends with .prom: add it")


def format_rate(rate: float) -> str:
    """Format a rate as ``12.5/s``, or as ``2.4 s each`` if low; empty for 0."""
    if rate <= 0:
        return ""
    if rate >= 1:
        return f"{rate:,.1f}/s"
    return f"{1 / rate:.1f} s each" if rate > 1 / 60 else f"{format_duration(1 / rate)} each"


def format_duration(seconds: float) -> str:
    """Format a time as ``45 s``, ``12 min 30 s`` or ``3 h 20 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600:,} h {whole % 3600 // 60} min"


@dataclass(frozen=True)
class Snapshot:
    """Progress of a run at one moment.

    Attributes:
        task: name of the work, e.g. of the extractor.
        unit: name of the main count, e.g. ``images``.
        counts: counts of all workers, by name.
        total: number of units in the whole run, if known.
        earlier: number of units done before the run began, or not counted by a worker.
        more: further fields of the event.
        is_known: whether counts are known; some runners report them only at the end.
        current_shards: shard of each local worker process.
        seconds_left: time left by the mean rate; None while the total is unknown or nothing is done.
    """

    task: str
    unit: str
    counts: Mapping[str, int]
    seconds: float
    total: int | None = None
    earlier: int = 0
    more: Mapping[str, Any] = field(default_factory=dict)
    is_known: bool = True
    seconds_left: float | None = None
    current_shards: tuple[int, ...] = ()

    @property
    def done(self) -> int:
        """Number of finished units."""
        return self.counts.get(self.unit, 0)

    @property
    def failed(self) -> int:
        """Number of failed units."""
        return self.counts.get("failed", 0)

    @property
    def rate(self) -> float:
        """Units per second since the run began."""
        return max(0, self.done - self.earlier) / self.seconds if self.seconds else 0.0

    @property
    def bottleneck(self) -> str | None:
        """``decoding`` if the model waits over a tenth of the time, else ``model``."""
        waiting, working = self.counts.get("wait_msec", 0), self.counts.get("forward_msec", 0)
        if not working:
            return None
        return "decoding" if waiting > 0.1 * (waiting + working) else "model"

    def to_fields(self) -> dict[str, Any]:
        """Return the fields of the event ``progress``."""
        return {
            "task": self.task,
            "unit": self.unit,
            "done": self.done if self.is_known else None,
            "failed": self.failed if self.is_known else None,
            "total": self.total,
            "seconds": round(self.seconds, 1),
            "per_second": float(f"{self.rate:.3g}"),
            "seconds_left": None if self.seconds_left is None else round(self.seconds_left, 1),
            "bottleneck": self.bottleneck,
            **self.more,
        }

    def to_metrics(self, run: str, *, is_running: bool) -> str:
        """Return the snapshot in Prometheus' text format, version 0.0.4.

        Args:
            run: value of the label ``run``, which tells the files of several runs on a machine apart.
            is_running: whether the command still runs.
        """
        labels = f'run="{_escape_label(run)}",task="{_escape_label(self.task)}",unit="{self.unit}"'
        lines = []
        for name, description, samples in self._metrics(is_running=is_running):
            kind = "counter" if name.endswith("_total") else "gauge"
            lines += [f"# HELP imagepivot_{name} {description}", f"# TYPE imagepivot_{name} {kind}"]
            lines += [f"imagepivot_{name}{{{labels}{label}}} {value}" for label, value in samples.items() if value is not None]
        return "\n".join(lines) + "\n"

    def _metrics(self, *, is_running: bool) -> Iterator[tuple[str, str, Mapping[str, float | None]]]:
        """Yield name, description, and values by further label; None is unknown."""
        done, rate = (self.done, self.rate) if self.is_known else (None, None)
        reasons = {name.removeprefix(FAILED): count for name, count in self.counts.items() if name.startswith(FAILED)}
        parts = {part: self.counts.get(f"{part}_msec") for part in ("decode", "forward", "wait")}
        yield "running", "1 while the command runs, 0 after its end.", {"": int(is_running)}
        yield "elapsed_seconds", "Time since the start of the work.", {"": round(self.seconds, 1)}
        yield "left_seconds", "Estimated time left.", {"": self.seconds_left}
        yield "expected", "Units of the whole run.", {"": self.total}
        yield "done_total", "Units done, with failed ones and those of earlier runs.", {"": done}
        yield "done_per_second", "Mean rate of this run.", {"": rate}
        yield "failed_total", "Failed inputs.", {f',reason="{reason}"': count for reason, count in reasons.items()}
        yield "shards_total", "Shards written.", {"": self.counts.get("shards")}
        yield "written_bytes_total", "Bytes of the shards that this run has written.", {"": self.counts.get("bytes_written")}
        workers = {f',worker="{worker}"': shard for worker, shard in enumerate(self.current_shards)}
        yield "current_shard", "Shard that a worker process on this machine writes.", workers
        times = {f',part="{part}"': None if time is None else time / 1000 for part, time in parts.items()}
        yield "work_seconds_total", "Time of this run's workers, by part of the work.", times

    @property
    def details(self) -> str:
        """Rate, failures and bottleneck as text."""
        if not self.is_known:
            return "running"
        failed = f"{self.failed:,} failed" if self.failed else ""
        bound = f"bound by {self.bottleneck}" if self.bottleneck else ""
        return ", ".join(part for part in (format_rate(self.rate), failed, bound) if part)

    @property
    def left(self) -> str:
        """Time left as text; empty if unknown."""
        return f"{format_duration(self.seconds_left)} left" if self.seconds_left is not None else ""

    def to_line(self) -> str:
        """Return the snapshot as a line of text."""
        if not self.is_known:
            return f"{self.task}: running for {format_duration(self.seconds)}, the runner does not say how far it is"
        count = f"{self.done:,}{f' of {self.total:,}' if self.total else ''} {self.unit}"
        return f"{self.task}: {', '.join(part for part in (count, self.left, self.details) if part)}"


class _TimeLeft:
    """Estimate of the time left from the mean rate.

    Units arrive in bursts (batches, shards). The rate is that of the last burst, and the estimate counts down in between.
    """

    def __init__(self) -> None:
        self._done, self._seconds, self._gap = 0, 0.0, 0.0

    def update(self, snapshot: Snapshot) -> float | None:
        """Return the time left in seconds; None while it is unknown."""
        done = snapshot.done - snapshot.earlier
        if done > self._done:
            self._gap, self._done, self._seconds = snapshot.seconds - self._seconds, done, snapshot.seconds
        if not snapshot.total or not self._done:
            return None
        idle = snapshot.seconds - self._seconds
        seconds = self._seconds + max(0.0, idle - self._gap)  # A pause longer than the gap between bursts slows down.
        return max(0.0, max(0, snapshot.total - snapshot.done) * seconds / self._done - min(idle, self._gap))


def _escape_label(value: str) -> str:
    """Escape the value of a metric's label, without secrets."""
    return redact(value).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


class MetricsFile:
    """File of metrics for the textfile collector of Prometheus' node_exporter.

    The file is replaced atomically, at most once a second. Its name without extension is the label ``run``,
    because two files with equal series would make the collector fail.

    Raises:
        DatasetError: the file cannot be written.
    """

    def __init__(self, location: str) -> None:
        from schemas.storage.folder import file_at  # Loads pyarrow, which `--help` does not need.

        self._folder, self._name = file_at(location)
        self._folder.put(self._name, b"")
        self._written = -math.inf

    def write(self, snapshot: Snapshot, *, is_running: bool = True) -> None:
        """Write a snapshot if it is due, and always the last one."""
        now = time.monotonic()
        if is_running and now - self._written < _METRICS_SECONDS:
            return
        self._written = now
        text = snapshot.to_metrics(PurePath(self._name).stem, is_running=is_running)
        # A failure is not worth the run: the file keeps its time, which the collector exports.
        with contextlib.suppress(DatasetError):
            self._folder.put(self._name, text.encode(errors="replace"))


class ProgressDisplay:
    """Context manager that shows a live line, or without a terminal plain lines.

    Args:
        console: console for text.
        monitoring: writes JSON events instead of lines, or a file of metrics as well.

    Attributes:
        interval: seconds between two updates.
        last: snapshot of the last event; None writes none.
    """

    def __init__(self, console: Console, monitoring: Monitoring = Monitoring()) -> None:
        self.interval = _LIVE_SECONDS if console.is_terminal else _PLAIN_SECONDS
        if monitoring.log_json:
            self.interval = monitoring.log_seconds
        self.last: Snapshot | None = None
        self._console = console
        self._log_json = monitoring.log_json
        self._metrics_file = MetricsFile(monitoring.metrics_file) if monitoring.metrics_file else None
        self._shown = time.monotonic()
        self._live: Live | None = None
        self._lines: list[Progress] = []
        self._time_left = _TimeLeft()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()
        if self._log_json and self.last is not None:
            self._write(self._smooth(self.last))
        if self._metrics_file is not None and self.last is not None:
            self._metrics_file.write(self._smooth(self.last), is_running=False)

    def show(self, snapshot: Snapshot, *, immediately: bool = False) -> None:
        """Update the live line, or write the snapshot if it is due or ``immediately``."""
        self.last = snapshot
        snapshot = self._smooth(snapshot)
        if self._console.is_terminal and not self._log_json:
            self._draw(snapshot)
        elif immediately or time.monotonic() - self._shown >= self.interval:
            self._shown = time.monotonic()
            self._write(snapshot)
        if self._metrics_file is not None:
            self._metrics_file.write(snapshot)

    def _smooth(self, snapshot: Snapshot) -> Snapshot:
        return replace(snapshot, seconds_left=self._time_left.update(snapshot))

    def _write(self, snapshot: Snapshot) -> None:
        if not self._log_json:
            self._print(snapshot.to_line())
        elif not emit("progress", message=snapshot.to_line(), **snapshot.to_fields()):
            self._print(line("progress", message=snapshot.to_line(), **snapshot.to_fields()))

    def _print(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _draw(self, snapshot: Snapshot) -> None:
        """Update the live line, or two lines on a narrow terminal."""
        if self._live is None:
            from rich.console import Group
            from rich.live import Live
            from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

            name = snapshot.task if len(snapshot.task) <= _MAX_NAME else f"…{snapshot.task[1 - _MAX_NAME :]}"
            label, counter = TextColumn("{task.description}", markup=False), TextColumn("{task.fields[count]}")
            head = (SpinnerColumn(), label, BarColumn(20), counter, TextColumn(snapshot.unit))
            details, times = TextColumn("{task.fields[details]}"), (TimeElapsedColumn(), TextColumn("{task.fields[left]}"))
            is_wide = self._console.width >= _WIDE
            columns = [(*head, details, *times)] if is_wide else [(*head, *times), (TextColumn(" "), details)]
            self._lines = [Progress(*line) for line in columns]
            for progress in self._lines:
                progress.add_task(name, total=snapshot.total, count="", details="", left="")
            self._live = Live(Group(*self._lines), console=self._console, transient=True, refresh_per_second=5)
            self._live.start()
        count = "" if not snapshot.is_known else f"{snapshot.done}/{snapshot.total}" if snapshot.total else f"{snapshot.done:,}"
        for progress in self._lines:
            progress.update(
                progress.task_ids[0], completed=snapshot.done, count=count, details=snapshot.details, left=snapshot.left
            )
