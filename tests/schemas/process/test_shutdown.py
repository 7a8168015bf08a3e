"""Words for what a command leaves behind, and signals that wait for a safe point."""

from __future__ import annotations

import multiprocessing
import signal
import threading

import pytest

from schemas.process import shutdown
from schemas.process.shutdown import defer_signals, shutdown_notice


@pytest.fixture(autouse=True)
def nothing_left():
    shutdown._notice = None  # A test that interrupts a training in this process leaves it behind.
    yield
    shutdown._notice = None


@pytest.fixture
def handlers():
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def test_shutdown_notice_persists_after_interrupt_not_after_error():
    with pytest.raises(ValueError, match="broken"), shutdown_notice("it goes on"):
        raise ValueError("broken")
    assert shutdown.current_notice() is None
    with pytest.raises(KeyboardInterrupt), shutdown_notice("it goes on"):
        raise KeyboardInterrupt
    assert shutdown.current_notice() == "it goes on"


# --- deferring -------------------------------------------------------------------------------------------------------


def interrupt(*numbers: int, agreed: int = 0) -> list[int]:
    """Raise signals in a block that defers them and ends with an interrupt; return the signal received after each."""
    received = []

    def block() -> None:
        with defer_signals() as deferred:
            deferred.agreed = agreed
            for number in numbers:
                signal.raise_signal(number)
                received.append(deferred.received)

    with pytest.raises(KeyboardInterrupt):
        block()
    return received


@pytest.mark.parametrize(
    ("raised", "agreed", "received"),
    [
        ([signal.SIGINT], 0, [signal.SIGINT]),
        ([signal.SIGTERM, signal.SIGINT], 0, [signal.SIGTERM]),  # The second is not deferred.
        ([signal.SIGTERM], signal.SIGINT, [signal.SIGTERM]),
    ],
)
def test_signal_is_raised_after_the_block(handlers, raised, agreed, received):
    assert interrupt(*raised, agreed=agreed) == received
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_defer_signals_restores_handlers(handlers):
    received = []
    signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with defer_signals() as deferred:
        signal.raise_signal(signal.SIGHUP)
        assert deferred.received == 0
        signal.raise_signal(signal.SIGTERM)
        assert received == []
    assert received == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda number, frame: None])
def test_defer_signals_raises_interrupt_if_the_handler_returns(handlers, handler):
    signal.signal(signal.SIGTERM, handler)
    assert interrupt(agreed=signal.SIGTERM) == []


def test_without_a_signal_nothing_happens(handlers):
    before = signal.getsignal(signal.SIGTERM)
    with defer_signals():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(ValueError, match="from the block"), defer_signals():
        raise ValueError("from the block")
    assert signal.getsignal(signal.SIGTERM) is before


def test_threads_and_workers_leave_signals_alone(handlers, monkeypatch):
    seen = []

    def look() -> None:
        with defer_signals():
            seen.extend(signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT))

    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [signal.SIG_DFL, signal.default_int_handler]
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: "a pool")
    look()
    assert seen[2] == signal.SIG_DFL
    assert seen[3] != signal.default_int_handler
