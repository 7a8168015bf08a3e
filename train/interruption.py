"""Signals that ask a training to stop: held back until a step is done and saved."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class Interruption:
    """What asks to stop.

    Attributes:
        received: number of the signal that this process received; 0 while there is none.
        agreed: number of the signal that all processes stop for.
    """

    received: int = 0
    agreed: int = 0


@contextmanager
def held_back() -> Iterator[Interruption]:
    """Hold Ctrl-C, SIGTERM and SIGHUP back inside the block, which is to end soon after one was received.

    After the block the signal is raised that was agreed on, and does what it would have done: Ctrl-C raises `KeyboardInterrupt`. A
    second one is not held back. Signals are left alone where they are ignored, as under nohup, outside the main thread, which alone
    can receive them, and in a worker that does not catch them: its parent ends it with SIGTERM.

    Raises:
        KeyboardInterrupt: a signal was agreed on, and nothing else came of it.
    """
    interruption = Interruption()
    alone = {signal.SIG_IGN, None} if multiprocessing.parent_process() is None else {signal.SIG_IGN, None, signal.SIG_DFL}
    numbers = _SIGNALS if threading.current_thread() is threading.main_thread() else ()
    before = {number: handler for number in numbers if (handler := signal.getsignal(number)) not in alone}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(number: int, frame: FrameType | None) -> None:
        if interruption.received:
            restore()
            signal.raise_signal(number)
        interruption.received = number

    for number in before:
        signal.signal(number, note)
    try:
        yield interruption
    finally:
        restore()
    raised = interruption.agreed or interruption.received
    if raised in before:
        signal.raise_signal(raised)
    if interruption.agreed:
        raise KeyboardInterrupt  # A handler may only take note: nobody should take what was stopped for done.
