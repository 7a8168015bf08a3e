"""A cache of row groups of Parquet files, for the next row that is needed."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

__all__ = ["CACHE_BYTES", "RowGroupCache"]

CACHE_BYTES = 256 << 20
"""Bytes of row groups that a process keeps; a larger row group is kept alone."""


class RowGroupCache:
    """The most recently used row groups, up to a number of bytes. Threads that need the same one read it once.

    Args:
        limit: bytes to keep.
    """

    def __init__(self, limit: int = CACHE_BYTES) -> None:
        self._limit = limit
        self._bytes = 0
        self._lock = threading.Lock()
        self._held: OrderedDict[Any, Future[Any]] = OrderedDict()

    def get(self, key: Any, load: Callable[[], Any]) -> Any:
        """Return the value of a key, loading it if necessary; an error of ``load`` is raised and not kept."""
        with self._lock:
            future = self._held.get(key)
            is_loader = future is None
            if future is None:
                future = self._held[key] = Future()
            self._held.move_to_end(key)
        if is_loader:
            self._load(key, future, load)
        return future.result()

    def clear(self) -> None:
        """Drop all row groups."""
        with self._lock:
            self._held.clear()
            self._bytes = 0

    def _load(self, key: Any, future: Future[Any], load: Callable[[], Any]) -> None:
        try:
            value = load()
        except BaseException as error:  # noqa: BLE001 -- raised in every thread that waits for it
            with self._lock:
                if self._held.get(key) is future:
                    del self._held[key]
            future.set_exception(error)
            return
        with self._lock:
            future.set_result(value)
            if self._held.get(key) is not future:
                return
            self._bytes += value.nbytes
            for old in [other for other, entry in self._held.items() if entry.done() and other != key]:
                if self._bytes <= self._limit:
                    break
                self._bytes -= self._held.pop(old).result().nbytes
