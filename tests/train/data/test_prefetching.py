from __future__ import annotations

import threading
from itertools import count

import pytest

from train.data.prefetching import Prefetching


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("prefetching")]


def test_everything_comes_in_the_order_of_the_requests():
    numbers = count()
    with Prefetching(lambda: next(numbers), lambda number: (number**2, threading.current_thread().name)) as ahead:
        read = [ahead.next() for _ in range(50)]
    assert [(asked, value) for asked, (value, _) in read] == [(number, number**2) for number in range(50)]
    assert {name for _, (_, name) in read} == {"prefetching_0"}
    assert threads() == []


@pytest.mark.parametrize("ahead", [1, 3])
def test_no_more_is_read_than_asked_for(ahead):
    drawn, done = [], threading.Semaphore(0)

    def draw() -> int:
        drawn.append(threading.current_thread())
        return len(drawn)

    def read(number: int) -> int:
        done.release()
        return number

    with Prefetching(draw, read, ahead=ahead) as reader:
        for number in range(1, 6):
            assert reader.next() == (number, number)
            for _ in range(1 if number > 1 else ahead + 1):  # What is ahead is read although nobody asks for it.
                assert done.acquire(timeout=60)
            assert len(drawn) == number + ahead
    assert set(drawn) == {threading.current_thread()}
    assert not done.acquire(blocking=False)
    with pytest.raises(ValueError, match="ahead is 0, expected 1 or more"):
        Prefetching(draw, read, ahead=0)


def test_an_error_is_raised_in_its_turn():
    numbers, values = count(), []

    def read(number: int) -> int:
        if number == 3:
            raise OSError("the disk is gone")
        return number

    def work() -> None:
        with Prefetching(lambda: next(numbers), read) as ahead:
            while True:
                values.append(ahead.next()[0])

    with pytest.raises(OSError, match="the disk is gone"):
        work()
    assert values == [0, 1, 2]
    assert threads() == []


def test_leaving_drops_what_waits():
    numbers, read, started, go_on = count(), [], threading.Event(), threading.Event()

    def slowly(number: int) -> None:
        if number == 1:
            started.set()
            go_on.wait(60)
        read.append(number)

    def work() -> None:
        with Prefetching(lambda: next(numbers), slowly, ahead=5) as ahead:
            ahead.next()
            assert started.wait(60)
            threading.Timer(0.05, go_on.set).start()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    assert read == [0, 1]
    assert threads() == []
