import threading
import time
from types import SimpleNamespace

import pytest

from pipelines.inputs.images.row_groups import RowGroupCache


def group(size):
    return SimpleNamespace(nbytes=size)


def test_the_cache_keeps_the_last_used_up_to_its_limit():
    cache, loads = RowGroupCache(limit=100), []

    def get(key, size=40):
        return cache.get(key, lambda: loads.append(key) or group(size))

    for key in "abaac":  # b is the oldest when c comes
        get(key)
    assert loads == ["a", "b", "c"]
    get("a")
    get("b")
    assert loads == ["a", "b", "c", "b"]
    get("large", 500)
    get("large")
    get("a")
    assert loads == ["a", "b", "c", "b", "large", "a"]


def test_threads_share_one_reading():
    cache, loads, barrier = RowGroupCache(), [], threading.Barrier(8)

    def load():
        loads.append(1)
        time.sleep(0.05)
        return group(1)

    values = []

    def work():
        barrier.wait()
        values.append(cache.get("key", load))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(loads) == 1
    assert len({id(value) for value in values}) == 1
    assert len(values) == 8


def test_an_error_is_not_kept():
    cache = RowGroupCache()

    def fail():
        raise OSError("in the middle")

    for _ in range(2):
        with pytest.raises(OSError, match="in the middle"):
            cache.get("key", fail)
    assert cache.get("key", lambda: group(3)).nbytes == 3
