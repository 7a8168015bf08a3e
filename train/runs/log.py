"""The log that a run writes while it trains, ``log.jsonl``, and what is made of it: a table, a picture, events for TensorBoard.

Each line of ``log.jsonl`` is an object with a ``step``, whose ``event`` is

* ``step``, every few steps: the loss and the terms that it consists of, per query; task and languages of the batch; norm of the
  gradient before clipping; learning rate,
* ``evaluation``: recalls on the validation split,
* ``validation``: loss and terms there, per query,
* ``timing``, after each evaluation: speed, and where the time went, see `Stopwatch`, and the number of threads,
* before the first step ``training_data``: numbers of captions and words, ``missing_features``: images without features,
  ``feature_outliers``: images with features of zeros or of unusual norms, and ``started_from``: what was taken from another run.

Lines of ``timing`` are the only ones that depend on a clock: without them, a run that was killed and resumed leaves the same
lines as an uninterrupted one. ``metrics.csv`` and ``curves.png`` are made of the other lines alone, and can be made again at any
time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

from schemas.errors import ImagepivotError, UsageError
from schemas.escapes import to_json
from schemas.storage.folder import Folder
from schemas.storage.storage_errors import storage_errors
from train.runs.history import LOG, numbers_in, parse_entries, read_history
from train.runs.tensorboard_events import EventFile, write_all

CONFIG, METRICS, CURVES = "config.toml", "metrics.csv", "curves.png"

_SHARE = 0.01
"""Share of a training's time that goes into drawing it while it runs."""
_FIRST_SECONDS = 2.0
"""What drawing is taken to cost before it was measured; importing matplotlib is part of the first time."""


class RunLog:
    """Open log of a run; a context manager.

    At the end, also where an error or an interrupt ends the block, the table and the picture are written, and in between by
    `refresh`.

    Args:
        step: step from which the run continues; lines of later steps are dropped, since those steps will be done again.
        tensorboard: also write events for TensorBoard into ``tensorboard``.
        curves: also draw ``curves.png``.

    Raises:
        UsageError: TensorBoard or the picture was requested and what it needs is not installed.
        DatasetError: a line of the log is damaged, or the folder cannot be written to.
    """

    def __init__(
        self,
        folder: Path,
        *,
        step: int,
        tensorboard: bool,
        curves: bool = False,
        config: str = "",
        more: Mapping[str, Any] | None = None,
    ) -> None:
        path = folder / LOG
        self._path = str(path)
        self._folder = Folder(str(folder))
        self._curves = curves
        self._drawn, self._cost = time.monotonic(), _FIRST_SECONDS
        # Only looked for: it is imported when there is something to draw.
        if curves and find_spec("matplotlib") is None:
            raise UsageError(
                "matplotlib is not installed: pip install 'imagepivot[train]', or leave the picture out with --no-curves"
            )
        with storage_errors(self._path):
            data = path.read_bytes() if step and path.exists() else b""
        kept = [line for line, entry in parse_entries(data, self._path) if entry["step"] <= step]
        self._events = EventFile(folder, step) if tensorboard else None
        if self._events is not None:
            self._events.describe(config, more or {}, step)
        # Written whole or not at all: a process that is killed here leaves the lines of earlier ones.
        self._folder.write(LOG, b"".join(kept))
        with storage_errors(self._path):
            # Without a buffer, nothing is left to be written when it is closed.
            self._file = path.open("ab", buffering=0)

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()
        try:
            # An error that ends the training is the one to tell of, even if after it nothing else can be written either.
            with suppress(*(ImagepivotError,) if error is not None else ()):
                self._finish(succeeded=error is None)
        finally:
            if self._events is not None:
                self._events.close()

    def write(self, event: str, step: int, values: Mapping[str, Any]) -> None:
        """Write a line; numbers in ``values`` become curves in TensorBoard.

        The event is one of those in the docstring of this module; values are plain, for JSON, and may be nested.

        Raises:
            ValueError: a number is not finite, which JSON cannot hold.
            DatasetError: the disk is full, or something else keeps the file from being written.
        """
        line = to_json({"event": event, "step": step, **values}, allow_nan=False) + "\n"
        with storage_errors(self._path):
            write_all(self._file, line.encode())
        if self._events is not None:
            self._events.write({f"{event}/{name}": value for name, value in numbers_in(values).items()}, step)

    def refresh(self) -> None:
        """Write table and picture anew if that takes less than a hundredth of the time since they were last written."""
        if time.monotonic() - self._drawn >= self._cost / _SHARE:
            self._draw()

    def _draw(self) -> None:
        started = time.monotonic()
        history = read_history(self._folder)
        self._folder.write(METRICS, history.to_csv().encode())
        if self._curves:
            from train.runs.curves import draw_curves

            draw_curves(history, self._folder, CURVES)
        self._drawn = time.monotonic()
        self._cost = self._drawn - started

    def _finish(self, *, succeeded: bool) -> None:
        self._draw()
        if self._events is not None:
            best = read_history(self._folder).best
            if best is not None:
                numbers = {f"best/{name}": value for name, value in numbers_in(best).items()}
                self._events.write(numbers, int(best["step"]))
            self._events.finish(succeeded=succeeded)


class Stopwatch:
    """Measures a training, a lap at a time; a lap ends with each evaluation.

    On a GPU, which computes while the program goes on, what waits for it is charged for the wait: ``data``, where features are
    copied to it, or ``training``. A lap as a whole is exact, since an evaluation begins when the last step has ended.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Begin the first lap, or begin the lap again."""
        self._started = time.perf_counter()
        self._spent = {"data": 0.0, "evaluation": 0.0, "checkpoints": 0.0, "curves": 0.0}
        self._steps = self._pairs = 0

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Charge the time of a block to ``data``, ``evaluation``, ``checkpoints`` or ``curves``; the rest is training."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._spent[part] += time.perf_counter() - started

    def count(self, pairs: int) -> None:
        """Count a step, and the pairs in its batches."""
        self._steps += 1
        self._pairs += pairs

    def lap(self) -> dict[str, Any]:
        """Return what was measured since the last lap, as plain values, and begin the next.

        Returns:
            ``steps`` and ``pairs`` done in ``seconds``; ``steps_per_second`` and ``pairs_per_second`` while training, that is
            without evaluations, checkpoints and curves; and the ``shares`` of time, which add up to 1.
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
