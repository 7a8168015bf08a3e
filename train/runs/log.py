"""Log of a training, ``log.jsonl``, and the files derived from it.

Each line of ``log.jsonl`` is an object with a ``step`` and one of these values of ``event``:

* ``step``, every few steps: means per query of the loss and its terms since the last line, with tasks and languages of these
  batches; norm of the last gradient before clipping; learning rate.
* ``collapse``, at most once: the loss has stayed at the margin for an epoch.
* ``evaluation``: recalls on the validation split.
* ``validation``: loss and terms on the validation split, per query.
* ``timing``, after each evaluation: speed and shares of time, see `Stopwatch`, and the number of threads.
* Before the first step: ``training_data``, numbers of captions and words; ``chance``, recalls of a random ranking of the
  validation split and its number of images, by language; ``missing_features``, images without features;
  ``excluded``, numbers of duplicates that were left out;
  ``feature_outliers``, features of zeros or of unusual norms; ``untrained``, features of random weights;
  ``started_from``, initial weights from another run.

Only ``timing`` depends on a clock. The other lines of a killed and resumed run are those of an uninterrupted
one; ``metrics.csv`` and ``curves.png`` derive from them.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeAlias

from schemas.console.events import remark
from schemas.errors import DatasetError, ImagepivotError, UsageError, first_line
from schemas.escapes import to_json
from schemas.storage.folder import Folder
from schemas.storage.storage_errors import storage_errors
from train.runs.history import LOG, History, numbers_in, parse_entries, read_history
from train.runs.tensorboard_events import EventFile, write_all

CONFIG, METRICS, CURVES = "config.toml", "metrics.csv", "curves.png"

_SHARE = 0.01
"""Maximum share of a training's time for drawing its curves."""
_FIRST_SECONDS = 2.0
"""Estimated time of the first drawing, with the import of matplotlib."""


class LogLine(NamedTuple):
    """A line of the log in the folder of a run; ``config.toml`` precedes the first.

    Examples:
        >>> imagepivot.LogLine("runs/demo", "evaluation", 20, {"score": 100.0, "en": {"rank": 5}}).numbers
        {'evaluation/score': 100.0, 'evaluation/en/rank': 5.0}
    """

    run: str
    event: str
    step: int
    values: Mapping[str, Any]

    @property
    def numbers(self) -> dict[str, float]:
        """The numbers by the names of their curves in TensorBoard."""
        return numbers_in({self.event: self.values})


LogSink: TypeAlias = Callable[[LogLine], object]
"""Function that receives each line of the log of a training. An error ends the training."""

_sinks: list[LogSink] = []


def register_log_sink(sink: LogSink) -> None:
    """Pass the lines of all trainings to a function of a module of ``--import``.

    Examples:
        >>> imagepivot.register_log_sink(lambda line: None)
    """
    _sinks.append(sink)


class RunLog:
    """Open log of a run; a context manager.

    `refresh` writes table and picture, and so does the end of the block, even after an error or an interrupt.

    Args:
        step: step from which the run continues; lines of later steps are dropped, since these steps are repeated.
        config: the run's configuration as TOML, for TensorBoard.
        hparams: further hyper-parameters, for TensorBoard.
        sinks: functions that receive each line, besides those of `register_log_sink`.

    Raises:
        UsageError: TensorBoard or matplotlib is requested, but not installed.
        DatasetError: a line of the log is damaged, or the folder is not writable.
    """

    def __init__(
        self,
        folder: Path,
        *,
        step: int,
        tensorboard: bool,
        curves: bool = False,
        config: str = "",
        hparams: Mapping[str, Any] | None = None,
        sinks: Sequence[LogSink] = (),
    ) -> None:
        path = folder / LOG
        self._path = str(path)
        self._folder = Folder(str(folder))
        self._curves, self._sinks = curves, (*_sinks, *sinks)
        self._drawn, self._cost = time.monotonic(), _FIRST_SECONDS
        # The import itself takes a second, and waits until the first drawing.
        if curves and find_spec("matplotlib") is None:
            raise UsageError(
                "matplotlib is not installed: pip install 'imagepivot[train]', or leave the picture out with --no-curves"
            )
        with storage_errors(self._path):
            data = path.read_bytes() if step and path.exists() else b""
        lines = [line for line, entry in parse_entries(data, self._path) if entry["step"] <= step]
        self._events = EventFile(folder, step, config, hparams or {}) if tensorboard else None
        self._folder.put(LOG, b"".join(lines))  # Atomic: a process that is killed here leaves the old lines.
        with storage_errors(self._path):
            self._file = path.open("ab", buffering=0)  # Unbuffered, so that closing it cannot fail.

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()
        try:
            # The error that ends the training must not be hidden by a later one.
            with suppress(*(ImagepivotError,) if error is not None else ()):
                best = self._draw().best
                if self._events is not None and best is not None:
                    self._events.write(numbers_in({"best": best}), int(best["step"]))
        finally:
            if self._events is not None:
                self._events.close()

    def write(self, event: str, step: int, values: Mapping[str, Any]) -> None:
        """Write and pass on a line; its numbers become curves in TensorBoard.

        Values are plain, for JSON, and may be nested.

        Raises:
            ValueError: a number is not finite.
            DatasetError: the file cannot be written, e.g. because the disk is full.
        """
        line = to_json({"event": event, "step": step, **values}, allow_nan=False) + "\n"
        with storage_errors(self._path):
            write_all(self._file, line.encode())
        if self._events is not None:
            self._events.write(numbers_in({event: values}), step)
        for sink in self._sinks:
            sink(LogLine(self._folder.location, event, step, values))

    def refresh(self) -> None:
        """Rewrite table and picture, but spend at most a hundredth of the time on it."""
        if time.monotonic() - self._drawn >= self._cost / _SHARE:
            self._draw()

    def _draw(self) -> History:
        started = time.monotonic()
        history = read_history(self._folder)
        self._folder.put(METRICS, history.to_csv().encode())
        if self._curves:
            try:
                from schemas.drawing.charts import save
                from train.runs.curves import plot_curves

                save(plot_curves(history), self._folder, CURVES)
            except DatasetError:  # E.g. a full disk, on which the training cannot continue either.
                raise
            except Exception as error:  # noqa: BLE001 -- whatever matplotlib or a font of this machine raises
                self._curves = False
                remark(f"training continues without {CURVES}, --resume draws it: {type(error).__name__}: {first_line(error)}")
        self._drawn = time.monotonic()
        self._cost = self._drawn - started
        return history


class Stopwatch:
    """Stopwatch of a training; a lap ends with each evaluation.

    A GPU computes asynchronously, and the part that synchronizes is charged for the wait: ``data``, which copies features to it, or
    ``training``. A lap is exact as a whole, since an evaluation begins after the last step has ended.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Begin a lap."""
        self._started = time.perf_counter()
        self._spent = {"data": 0.0, "evaluation": 0.0, "checkpoints": 0.0, "curves": 0.0}
        self._steps = self._pairs = 0

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Charge the time of a block to a part of the lap, e.g. ``data``."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._spent[part] += time.perf_counter() - started

    def count(self, pairs: int) -> None:
        """Count a step with the pairs of its batches."""
        self._steps += 1
        self._pairs += pairs

    def lap(self) -> dict[str, Any]:
        """Return the measurements of the lap as plain values, and begin the next.

        Returns:
            ``steps`` and ``pairs`` done in ``seconds``; ``steps_per_second`` and ``pairs_per_second`` without
            the time of evaluations, checkpoints and curves; ``shares`` of time, which add up to 1.
        """
        seconds = time.perf_counter() - self._started
        spent = {"training": seconds - sum(self._spent.values()), **self._spent}
        stepping = spent["training"] + spent["data"]
        lap = {
            "steps": self._steps,
            "pairs": self._pairs,
            "seconds": round(seconds, 3),
            "steps_per_second": float(f"{self._steps / stepping:.4g}"),
            "pairs_per_second": float(f"{self._pairs / stepping:.4g}"),
            "shares": {part: round(time / seconds, 4) for part, time in spent.items()},
        }
        self.begin()
        return lap
