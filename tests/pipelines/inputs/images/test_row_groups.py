import errno
import shutil
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pyarrow as pa
import pytest

from pipelines.inputs.images.row_groups import RowGroups


def group(size: int) -> pa.ChunkedArray:
    return pa.chunked_array([[b"x" * size]])


def test_memory_keeps_the_last_used_up_to_its_limit(monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=0))
    groups, loads = RowGroups(memory=100_000), []

    def get(key, size=40_000):
        assert groups.get(key, lambda: loads.append(key) or group(size))[0].as_py() == b"x" * size

    for key in "abaac":  # b is the oldest when c comes
        get(key)
    assert loads == ["a", "b", "c"]
    get("a")
    get("b")
    assert loads == ["a", "b", "c", "b"]
    get("large", 500_000)
    get("large", 500_000)
    get("a")
    assert loads == ["a", "b", "c", "b", "large", "a"]


def test_get_in_threads_loads_once():
    groups, loads, barrier = RowGroups(), [], threading.Barrier(8)

    def load():
        loads.append(1)
        time.sleep(0.05)
        return group(1)

    def work(_):
        barrier.wait(20)
        return groups.get("key", load)

    with ThreadPoolExecutor(8) as pool:
        values = list(pool.map(work, range(8)))
    assert (len(loads), len(values), len(set(map(id, values)))) == (1, 8, 1)


def test_get_does_not_cache_errors():
    groups = RowGroups()

    def fail():
        raise OSError("in the middle")

    for _ in range(2):
        with pytest.raises(OSError, match="in the middle"):
            groups.get("key", fail)
    assert groups.get("key", lambda: group(3))[0].as_py() == b"xxx"


# --- values on disk --------------------------------------------------------------------------------------------------

GROUPS = {
    name: [f"{name}{row}".encode() * (100 + row) if row % 5 else (None if row % 2 else b"") for row in range(40)]
    for name in "abc"
}


class Reader:
    """Reads every row of every group several times, and counts how often a group is loaded."""

    def __init__(self, **options) -> None:
        self.groups, self.loads = RowGroups(**options), []

    def read(self, times: int = 3) -> dict[str, list[bytes | None]]:
        found = {}
        for _ in range(times):
            for name, values in GROUPS.items():
                found[name] = [
                    self.groups.get(name, lambda name=name: self.load(name))[row].as_py() for row in range(len(values))
                ]
        return found

    def load(self, name: str) -> pa.ChunkedArray:
        self.loads.append(name)
        values = GROUPS[name]
        return pa.chunked_array([values[:7], values[7:]], pa.large_binary() if name == "b" else pa.binary())


def test_get_loads_once_for_any_memory_limit():
    reader = Reader(memory=1)
    assert reader.read() == GROUPS
    assert reader.loads == ["a", "b", "c"]
    values = reader.groups.get("a", lambda: reader.load("a"))
    with pytest.raises(IndexError, match="out of bounds"):
        values[40]


def test_get_reloads_dropped_row_groups():
    reader = Reader()
    reader.read()
    held = reader.groups.get("a", lambda: reader.load("a"))
    reader.groups.clear()
    assert held[1].as_py() == GROUPS["a"][1]  # Another thread may be in the middle of reading.
    assert reader.read() == GROUPS
    assert reader.loads == ["a", "b", "c"] * 2


def test_file_takes_at_most_half_of_free_space(monkeypatch, tmp_path):
    size = sum(len(value or b"") for value in GROUPS["a"])
    asked = []

    def usage(folder):
        asked.append(folder)
        return SimpleNamespace(free=2 * (2 * size + 2000))

    monkeypatch.setattr(shutil, "disk_usage", usage)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    reader = Reader()
    assert reader.read() == GROUPS
    assert reader.loads == ["a", "b", "c"]  # The third is in memory.
    assert asked == [str(tmp_path)]
    assert list(tmp_path.iterdir()) == []


def test_memory_limit_without_disk_space(monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=0))
    reader = Reader(memory=1)
    assert reader.read() == GROUPS
    assert reader.loads == ["a", "b", "c"] * 3


def test_full_disk_falls_back_to_memory(monkeypatch):
    def full(file, schema):
        file.write(b"the beginning")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pa.ipc, "new_file", full)
    reader = Reader()
    assert reader.read() == GROUPS
    assert reader.loads == ["a", "b", "c"]  # In memory.


def test_no_folder_for_temporary_files(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    reader = Reader()
    assert reader.read() == GROUPS
    assert reader.loads == ["a", "b", "c"]
