"""What a run writes down while it trains: ``log.jsonl``, and events for TensorBoard.

A line of ``log.jsonl`` is an object with ``event`` ``step`` (every few steps: loss, norm of the gradient, learning rate) or
``evaluation`` (recalls on the validation split). It holds no times, so that a run that was killed and went on leaves the same
lines as one that was not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from schemas.errors import UsageError

__all__ = ["LOG", "RunLog"]

LOG = "log.jsonl"
_EVENTS = "tensorboard"


class RunLog:
    """Open log of a run; a context manager.

    Args:
        folder: of the run.
        step: that the run goes on from; what an earlier process wrote after it is dropped, since it will be done again.
        tensorboard: also write events for TensorBoard into ``tensorboard``.

    Raises:
        UsageError: TensorBoard is asked for and not installed.
    """

    def __init__(self, folder: Path, *, step: int, tensorboard: bool) -> None:
        path = folder / LOG
        # The last line of a killed process may be half a line.
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
        self._events = _event_writer(folder / _EVENTS, step) if tensorboard else None
        self._file = path.open("w", encoding="utf-8")
        self._file.writelines(kept)

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()
        if self._events is not None:
            self._events.close()

    def write(self, event: str, step: int, values: Mapping[str, Any]) -> None:
        """Writes down what is known at a step; numbers in ``values`` become curves of TensorBoard."""
        self._file.write(json.dumps({"event": event, "step": step, **values}, ensure_ascii=False) + "\n")
        self._file.flush()
        if self._events is not None:
            for name, value in _numbers(values, event):
                self._events.add_scalar(name, value, step)


def _event_writer(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UsageError(
            "TensorBoard is not installed: pip install 'imagepivot[train]', or leave its events out with --no-tensorboard"
        ) from error
    return SummaryWriter(str(folder), purge_step=step + 1)


def _numbers(value: Any, name: str) -> list[tuple[str, float]]:
    if isinstance(value, Mapping):
        return [found for key, item in value.items() for found in _numbers(item, f"{name}/{key}")]
    return [(name, float(value))] if isinstance(value, (int, float)) else []
