import errno
import os
import selectors
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from schemas.errors import DatasetError
from train.data.memmap import mapped_array

SHAPE = (7, 3)


def count(array):
    array[:] = np.arange(array.size).reshape(array.shape)


def never(array):
    raise AssertionError("the file was there")


@pytest.fixture
def path(tmp_path):
    array = mapped_array(tmp_path / "cache", ["a"], SHAPE, np.float32, count)
    assert array.tolist() == np.arange(21).reshape(SHAPE).tolist()
    [path] = (tmp_path / "cache").iterdir()
    return path


@pytest.mark.parametrize(
    "change",
    [
        lambda data: b"",
        lambda data: data[:-1],
        lambda data: data + b"\x00",
        lambda data: data.replace(b"(7, 3)", b"(3, 7)"),
        lambda data: data.replace(b"<f4", b"<i4"),
    ],
)
def test_damaged_file_is_rewritten(path, tmp_path, change):
    before = path.read_bytes()
    path.write_bytes(change(before))
    array = mapped_array(tmp_path / "cache", ["a"], SHAPE, np.float32, count)
    assert array.tolist() == np.arange(21).reshape(SHAPE).tolist()
    assert path.read_bytes() == before


def test_flipped_bit_of_the_header_changes_no_value(path, tmp_path):
    before = path.read_bytes()
    for place in range(128):
        path.write_bytes(before[:place] + bytes([before[place] ^ 1 << place % 8]) + before[place + 1 :])
        array = mapped_array(tmp_path / "cache", ["a"], SHAPE, np.float32, count)
        assert array.tolist() == np.arange(21).reshape(SHAPE).tolist(), place


def test_identity_shape_and_type_name_the_file(path, tmp_path):
    (path.parent / "mine.txt").write_text("mine")
    array = mapped_array(tmp_path / "cache", ["a"], SHAPE, np.float32, never)
    assert isinstance(array, np.memmap)
    assert array.tolist() == np.arange(21).reshape(SHAPE).tolist()
    for identity, shape, dtype in ((["b"], SHAPE, np.float32), (["a"], (3, 7), np.float32), (["a"], SHAPE, np.float16)):
        mapped_array(tmp_path / "cache", identity, shape, dtype, count)
    assert len(list((tmp_path / "cache").glob("*.npy"))) == 4
    assert (path.parent / "mine.txt").read_text() == "mine"
    path.unlink()
    path.mkdir()
    with pytest.raises(DatasetError, match=r"\.npy': the path is a folder, expected a file"):
        mapped_array(tmp_path / "cache", ["a"], SHAPE, np.float32, count)


def test_full_disk_is_an_error_before_writing(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DatasetError, match="the disk is full: free some space"):
        mapped_array(tmp_path / "cache", ["a"], SHAPE, np.float32, never)
    assert list((tmp_path / "cache").iterdir()) == []


# Fills in two steps, says where it is, and waits in between until it is told to go on.
MAKER = """
import sys
import numpy as np
from train.data.memmap import mapped_array

def fill(array):
    array[:3] = 5
    array.flush()
    print("half", flush=True)
    sys.stdin.readline()
    array[:] = np.arange(array.size).reshape(array.shape)

print(mapped_array(sys.argv[1], ["a"], (7, 3), np.float32, fill).sum(), flush=True)
"""


def maker(folder: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", MAKER, str(folder)],
        cwd=Path(__file__).parents[3],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.cluster
def test_single_process_writes_the_file(tmp_path):
    processes = [maker(tmp_path / "cache") for _ in range(3)]
    streams = selectors.DefaultSelector()
    for process in processes:
        streams.register(process.stdout, selectors.EVENT_READ, process)
    [(key, _)] = streams.select(60)
    time.sleep(2)  # For the others to come as far as they can.
    assert [ready.data for ready, _ in streams.select(0)] == [key.data]
    assert not list((tmp_path / "cache").glob("[!.]*"))
    printed = [key.data.communicate("\n", timeout=60)[0]]
    printed += [process.communicate(timeout=60)[0] for process in processes if process is not key.data]
    assert printed == ["half\n210.0\n", "210.0\n", "210.0\n"]
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".npy"]


@pytest.mark.cluster
def test_partial_file_of_a_killed_process_is_rewritten(tmp_path):
    process = maker(tmp_path / "cache")
    assert process.stdout.readline() == "half\n"
    process.kill()
    process.communicate()
    assert list((tmp_path / "cache").iterdir())  # Otherwise this test shows nothing.
    array = mapped_array(tmp_path / "cache", ["a"], SHAPE, np.float32, count)
    assert array.tolist() == np.arange(21).reshape(SHAPE).tolist()
    assert len(list((tmp_path / "cache").iterdir())) == 1
