"""When the batches of a job were done: a meter that notes the time, in a job whose worker is this process."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from pipelines.running.meter import Meter


class Mark(NamedTuple):
    """The end of a batch: its images, and the time by the clock and the processor time of the process until then."""

    images: int
    clock: float
    processor: float


_marks: list[Mark] = []  # Beam hands copies of the meter to its functions, so the marks lie beside it.


@dataclass(frozen=True)
class Timeline(Meter):
    """A meter that notes when each batch was done."""

    def add(self, **counts: int) -> None:
        """Note a batch."""
        if counts.get("images"):
            _marks.append(Mark(counts["images"], time.perf_counter(), time.process_time()))

    @staticmethod
    @contextmanager
    def recorded() -> Iterator[list[Mark]]:
        """Forget earlier batches; yield the list of those that are done while the block runs."""
        _marks.clear()
        yield _marks


def steady(marks: Sequence[Mark]) -> tuple[int, float, float]:
    """Return images after the first batch, and the seconds and the processor time that they took."""
    first, last = marks[0], marks[-1]
    return sum(mark.images for mark in marks[1:]), last.clock - first.clock, last.processor - first.processor
