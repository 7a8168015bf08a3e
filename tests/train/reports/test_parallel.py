"""Processes that work at the same time: nothing of theirs is left or printed when one of them fails."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from schemas.errors import ImagepivotError
from tests.integration.processes import wait_for
from train.reports.parallel import run_parallel

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

CHORES = """
import os, pathlib, signal, time

def note(task, device):
    folder, name, seconds = task
    pathlib.Path(folder, name).write_text(f"{device} {os.getpid()}")
    time.sleep(seconds)

def fail(task, device):
    note(task, device)
    if task[1] == "bad":
        raise ValueError("this one is bad")
    time.sleep(600)

def vanish(task, device):
    note(task, device)
    if task[1] == "bad":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
"""


@pytest.fixture
def chores(tmp_path, monkeypatch):
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "some_chores.py").write_text(CHORES)
    monkeypatch.syspath_prepend(tmp_path / "library")
    return importlib.import_module("some_chores")


def gone(folder: Path) -> bool:
    """Whether the processes that left a note have ended."""
    pids = [int(path.read_text().split()[1]) for path in folder.glob("*") if path.is_file()]
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_tasks_share_the_devices(chores, tmp_path, capfd):
    tasks = [(str(tmp_path), f"task-{number}", 0.0) for number in range(5)]
    assert sorted(run_parallel(chores.note, tasks, ["a", "b"])) == tasks
    notes = [(tmp_path / name).read_text().split() for _, name, _ in tasks]
    assert len({tuple(note) for note in notes}) == 2  # Each process keeps its device.
    assert {device for device, _ in notes} == {"a", "b"}
    assert capfd.readouterr() == ("", "")


def test_a_failure_ends_the_other_processes_without_a_word(chores, tmp_path, capfd):
    tasks = [(str(tmp_path), "good", 0.0), (str(tmp_path), "bad", 3.0), (str(tmp_path), "never", 0.0)]
    with pytest.raises(ValueError, match="this one is bad"):
        list(run_parallel(chores.fail, tasks, ["a", "b"]))
    assert gone(tmp_path)
    assert not (tmp_path / "never").exists()
    assert multiprocessing.active_children() == []
    assert capfd.readouterr() == ("", "")


def test_a_killed_process_is_an_error_that_says_what_to_do(chores, tmp_path, capfd):
    tasks = [(str(tmp_path), "good", 0.0), (str(tmp_path), "bad", 3.0)]
    with pytest.raises(ImagepivotError, match=r"a training process was killed, .* give fewer --workers"):
        list(run_parallel(chores.vanish, tasks, ["a", "b"]))
    assert gone(tmp_path)
    assert capfd.readouterr() == ("", "")


def test_an_interrupt_reaches_this_process_only(chores, tmp_path, capfd):
    tasks = [(str(tmp_path), "good", 0.0), (str(tmp_path), "also", 0.0)]

    def interrupt() -> None:
        wait_for(lambda: (tmp_path / "good").exists() and (tmp_path / "also").exists())
        time.sleep(0.1)
        for path in tmp_path.glob("*"):  # As a terminal does: the whole group.
            if path.is_file():
                os.kill(int(path.read_text().split()[1]), signal.SIGINT)
        # Not just this process: another thread may get it then, and the wait would go on (`stoppable` sees to that in the command).
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        list(run_parallel(chores.fail, tasks, ["a", "b"]))
    assert gone(tmp_path)
    assert capfd.readouterr() == ("", "")


KILLED = """
import os, signal, sys, threading, time
sys.path.insert(0, sys.argv[1])
import imagepivot
import some_chores
from train.reports.parallel import run_parallel

if __name__ == "__main__":
    def kill():
        while not all(os.path.exists(os.path.join(sys.argv[2], name)) for name in ("good", "also")):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill).start()
    list(run_parallel(some_chores.fail, [(sys.argv[2], "good", 600.0), (sys.argv[2], "also", 600.0)], ["a", "b"]))
"""


def test_processes_end_with_a_parent_that_is_killed(chores, tmp_path):
    (tmp_path / "library" / "script.py").write_text(KILLED)
    (tmp_path / "notes").mkdir()
    command = [sys.executable, tmp_path / "library" / "script.py", tmp_path / "library", tmp_path / "notes"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    wait_for(lambda: gone(tmp_path / "notes"))
