"""Reading ahead: a thread reads what comes next while the program computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Generic, TypeVar

Asked = TypeVar("Asked")
Read = TypeVar("Read")


class Prefetching(Generic[Asked, Read]):
    """What is read for one request after the other, some of them ahead.

    Requests are drawn where `next` is called, so that their source needs no lock, and one thread reads them in their order. An
    error of the thread is raised in its turn, after all that was read before it. Leaving the block waits for what is being read and
    drops the rest.

    Args:
        draw: returns the next request.
        read: returns what is read for a request; runs in the thread.
        ahead: number of requests that are read, or wait to be read, while the caller works on another.

    Raises:
        ValueError: ``ahead`` is less than 1.
    """

    def __init__(self, draw: Callable[[], Asked], read: Callable[[Asked], Read], *, ahead: int = 2) -> None:
        if ahead < 1:
            raise ValueError(f"ahead is {ahead}, expected 1 or more")
        self._draw, self._read, self._ahead = draw, read, ahead
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefetching")
        self._under_way: deque[tuple[Asked, Future[Read]]] = deque()

    def __enter__(self) -> Prefetching[Asked, Read]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._thread.shutdown(cancel_futures=True)

    def next(self) -> tuple[Asked, Read]:
        """Return the next request and what was read for it."""
        while len(self._under_way) <= self._ahead:
            asked = self._draw()
            self._under_way.append((asked, self._thread.submit(self._read, asked)))
        asked, future = self._under_way.popleft()
        return asked, future.result()
