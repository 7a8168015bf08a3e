"""Local workers call functions, hand on their errors, and end with their launcher or with the block."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from pipelines.running.process_pool import WORKER_INDEX, open_workers
from schemas.errors import DatasetError, ImagepivotError, InputError, UsageError, errno_of
from schemas.storage.storage_errors import storage_errors

LOST = "a worker process ended unexpectedly"
MESSAGE = "caption key 'a/en/x/0' occurs twice: 'it''s [odd]' and \"b\": remove one"


def square(value: int) -> tuple[int, int]:
    return os.getpid(), value * value


class Remembering:
    """Counts its calls; a worker gets one copy of it."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, value: int) -> tuple[int, int]:
        self.calls += 1
        return os.getpid(), self.calls


def fail(kind: type[Exception], value: int) -> None:
    raise kind(MESSAGE)


def fill_disk(value: int) -> None:
    with storage_errors("shard"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class TwoArgumentsError(Exception):
    """Cannot be made anew from its arguments, which pickle does."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


def fail_strangely(value: int) -> None:
    raise TwoArgumentsError("one", "two")


def kill_oneself(value: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def signal_oneself(value: int) -> int:
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(os.getpid(), signum)
    return value


def index(value: int) -> str:
    time.sleep(0.2)  # So that no worker does it all.
    return os.environ[WORKER_INDEX]


@pytest.fixture(scope="module")
def two():
    with open_workers(2) as run:
        yield run


def test_open_workers_one_is_this_process():
    with open_workers(1) as run:
        assert list(run(square, range(3))) == [(os.getpid(), 0), (os.getpid(), 1), (os.getpid(), 4)]


def test_map_yields_every_result_of_several_functions(two):
    results = list(two(square, range(100)))
    assert sorted(value for _, value in results) == [number * number for number in range(100)]
    assert os.getpid() not in {process for process, _ in results}
    assert list(two(square, [])) == []
    assert [value for _, value in two(square, [7])] == [49]


def test_map_unpickles_a_function_once_in_each_worker(two):
    last = dict(sorted(two(Remembering(), range(50))))
    assert sum(last.values()) == 50
    assert len(last) <= 2


def test_workers_are_numbered(two):
    assert set(two(index, range(6))) == {"0", "1"}


def test_workers_ignore_the_signals_of_a_batch_system(two):
    assert sorted(two(signal_oneself, range(4))) == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", [InputError, DatasetError, UsageError, ZeroDivisionError])
def test_error_of_a_worker_is_raised(kind):
    with pytest.raises(kind) as caught, open_workers(2) as run:
        list(run(partial(fail, kind), range(4)))
    assert type(caught.value) is kind
    assert str(caught.value) == MESSAGE
    assert "in fail" in caught.value.__notes__[0]  # Its traceback.


@pytest.mark.parametrize(
    ("function", "kind", "number", "message"),
    [
        pytest.param(fill_disk, DatasetError, errno.ENOSPC, "the disk is full", id="number-of-the-systems-error-is-kept"),
        pytest.param(fail_strangely, RuntimeError, None, "one and two", id="error-that-cannot-be-pickled-becomes-its-text"),
        pytest.param(lambda value: value, UsageError, None, "a module of its own, or give --workers 1", id="not-importable"),
        pytest.param(kill_oneself, ImagepivotError, None, LOST, id="killed-worker"),
    ],
)
def test_other_ends_of_a_worker_are_errors(function, kind, number, message):
    with pytest.raises(kind, match=message) as caught, open_workers(2) as run:
        list(run(function, range(4)))
    assert errno_of(caught.value) == number


def test_worker_that_ends_before_it_starts_ends_the_map(tmp_path, monkeypatch):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nkill -KILL $$\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(ImagepivotError, match=LOST), open_workers(2) as run:
        list(run(square, range(4)))


def write_index(folder: Path, value: int) -> None:
    (folder / os.environ[WORKER_INDEX]).write_text(str(os.getpid()))
    time.sleep(600)


def wait_for_workers(folder: Path) -> list[int]:
    while not all((folder / name).exists() and (folder / name).read_text() for name in ("0", "1")):
        time.sleep(0.01)
    return [int((folder / name).read_text()) for name in ("0", "1")]


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.timeout(100)
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_their_launcher(tmp_path, signum):
    launcher = os.fork()
    if not launcher:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with open_workers(2) as run:
                list(run(partial(write_index, tmp_path), range(2)))
        finally:
            os._exit(3)
    workers = wait_for_workers(tmp_path)
    os.kill(launcher, signum)
    os.waitpid(launcher, 0)
    while any(map(is_running, workers)):  # The test's time limit ends it.
        time.sleep(0.05)
    assert not any(map(is_running, workers))


def test_module_beside_the_users_script_is_imported(tmp_path):
    (tmp_path / "own.py").write_text("def mine(value): return 2 * value\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import own\nfrom pipelines.running.process_pool import open_workers\n"
        "with open_workers(2) as run: print(sorted(run(own.mine, [1, 2])))\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert done.stdout == "[2, 4]\n"
