"""How far a run is: the counts of one moment, as a line for people and as an event for programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from schemas.events import emit

__all__ = ["Snapshot", "bound_by", "duration", "pace"]


def pace(rate: float) -> str:
    """Return a rate in words that are never zero: ``12.5/s``, or ``2.4 s each`` if it is less than one; empty for none."""
    if rate <= 0:
        return ""
    if rate >= 1:
        return f"{rate:,.1f}/s"
    return f"{1 / rate:.1f} s each" if rate > 1 / 60 else f"{duration(1 / rate)} each"


def duration(seconds: float) -> str:
    """Return a time as ``45 s``, ``12 min 30 s`` or ``3 h 20 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600:,} h {whole % 3600 // 60} min"


def bound_by(waiting: float, working: float) -> str:
    """Return ``decoding`` if the model spends more than a tenth of its time waiting for images, else ``model``."""
    return "decoding" if waiting > 0.1 * (waiting + working) else "model"


@dataclass(frozen=True)
class Snapshot:
    """Progress of a run at one moment.

    Attributes:
        task: name of the work, e.g. that of the extractor.
        unit: name of the count that is shown, e.g. ``images``.
        counts: counts of all workers, by name.
        seconds: seconds since the run began.
        total: number of units in the whole run, if known.
        earlier: number of the units that were done before the run began, or that no worker counted.
        more: other values of the event.
        is_known: whether the counts say how far the run is; a runner on other machines may not tell before the end.
    """

    task: str
    unit: str
    counts: Mapping[str, int]
    seconds: float
    total: int | None = None
    earlier: int = 0
    more: Mapping[str, Any] = field(default_factory=dict)
    is_known: bool = True

    @property
    def done(self) -> int:
        """Number of units that are done."""
        return self.counts.get(self.unit, 0)

    @property
    def failed(self) -> int:
        """Number of units that failed."""
        return self.counts.get("failed", 0)

    @property
    def rate(self) -> float:
        """Units per second since the run began."""
        return max(0, self.done - self.earlier) / self.seconds if self.seconds else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Seconds left at this rate; None while the total is unknown or nothing is done."""
        return max(0, self.total - self.done) / self.rate if self.total and self.rate else None

    @property
    def bottleneck(self) -> str | None:
        """What limits the speed of the run, see `bound_by`; None if no worker reports its times."""
        waiting, working = self.counts.get("wait_msec", 0), self.counts.get("forward_msec", 0)
        if not working:
            return None
        return bound_by(waiting, working)

    def to_fields(self) -> dict[str, Any]:
        """Return the fields of the event ``progress``; the rate has three significant digits."""
        return {
            "what": self.task,
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

    def emit(self) -> bool:
        """Write the event, see `schemas.events.emit`."""
        return emit("progress", **self.to_fields())

    @property
    def details(self) -> str:
        """Rate, failures and bottleneck, in words."""
        if not self.is_known:
            return "running"
        failed = f"{self.failed:,} failed" if self.failed else ""
        bound = f"bound by {self.bottleneck}" if self.bottleneck else ""
        return ", ".join(part for part in (pace(self.rate), failed, bound) if part)

    @property
    def left(self) -> str:
        """Time left, in words; empty if it is unknown."""
        return f"{duration(self.seconds_left)} left" if self.seconds_left is not None else ""

    def to_line(self) -> str:
        """Return the snapshot as a line for people."""
        if not self.is_known:
            return f"{self.task}: running for {duration(self.seconds)}, the runner does not say how far it is"
        count = f"{self.done:,}{f' of {self.total:,}' if self.total else ''} {self.unit}"
        return f"{self.task}: {', '.join(part for part in (count, self.left, self.details) if part)}"
