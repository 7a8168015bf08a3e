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

from tests.integration.processes import wait_for
from train.reports.parallel import run_parallel

pytestmark = pytest.mark.cluster

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

def refuse(task, device):
    from schemas.errors import UsageError
    note(task, device)
    raise UsageError("no")

def vanish(task, device):
    note(task, device)
    if task[1] == "bad":
        os.kill(os.getpid(), signal.SIGKILL)

def crash(task, device):
    note(task, device)
    os.kill(os.getpid(), signal.SIGSEGV)

def leave(task, device):
    os._exit(5)
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


def pid_of(folder: Path, name: str) -> str:
    return (folder / name).read_text().split()[1]


def test_tasks_share_the_devices(chores, tmp_path, capfd):
    tasks = [(str(tmp_path), f"task-{number}", 0.0) for number in range(5)]
    assert sorted(run_parallel(chores.note, tasks, ["a", "b"])) == [(task, None) for task in tasks]
    notes = [(tmp_path / name).read_text().split() for _, name, _ in tasks]
    assert len({tuple(note) for note in notes}) == 2  # Each process keeps its device.
    assert {device for device, _ in notes} == {"a", "b"}
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("devices", [["a"], ["a", "b"]])
@pytest.mark.parametrize(
    ("chore", "kind", "reason"),
    [
        ("fail", "fault", "ValueError: this one is bad"),
        (
            "vanish",
            "killed",
            "a training process was killed, probably because memory ran out: give fewer --workers, a smaller "
            "schedule.batch_size, or --memory-map FOLDER",
        ),
    ],
)
def test_a_failure_ends_no_other_task(chores, tmp_path, capfd, devices, chore, kind, reason):
    """The device gets another process, whatever state the failure left the old one in."""
    tasks = [(str(tmp_path), name, 0.0) for name in ("bad", "one", "two", "three")]
    ended = dict(run_parallel(getattr(chores, chore), tasks, devices))
    assert set(ended) == set(tasks)
    failure = ended.pop(tasks[0])
    assert (failure.kind, failure.reason) == (kind, reason)
    assert ("this one is bad" in failure.traceback) is (kind == "fault")
    assert set(ended.values()) == {None}
    assert pid_of(tmp_path, "bad") not in {pid_of(tmp_path, name) for name in ("one", "two", "three")}
    assert {(tmp_path / name).read_text().split()[0] for name in ("bad", "one", "two", "three")} == set(devices)
    assert gone(tmp_path)
    assert multiprocessing.active_children() == []
    assert capfd.readouterr() == ("", "")


def test_a_process_that_only_refuses_a_task_is_kept(chores, tmp_path):
    tasks = [(str(tmp_path), name, 0.0) for name in ("one", "two")]
    assert [failure.kind for _, failure in run_parallel(chores.refuse, tasks, ["a"])] == ["refused"] * 2
    assert pid_of(tmp_path, "one") == pid_of(tmp_path, "two")


@pytest.mark.parametrize(
    ("chore", "reason"),
    [("crash", "a training process was ended by SIGSEGV"), ("leave", "a training process ended with exit code 5")],
)
def test_other_ends_of_a_process(chores, tmp_path, chore, reason):
    ((_, failure),) = run_parallel(getattr(chores, chore), [(str(tmp_path), "one", 0.0)], ["a"])
    assert (failure.kind, failure.reason) == ("killed", reason)


def test_a_process_that_is_killed_while_it_waits_is_replaced(chores, tmp_path):
    tasks = [(str(tmp_path), name, 0.0) for name in ("one", "two")]
    ended = []
    for task, failure in run_parallel(chores.note, tasks, ["a"]):
        ended.append((task, failure))
        if len(ended) == 1:
            os.kill(int(pid_of(tmp_path, "one")), signal.SIGKILL)
            wait_for(lambda: multiprocessing.active_children() == [])
            time.sleep(0.2)  # Until the pool has heard of it as well.
    assert ended == [(task, None) for task in tasks]
    assert pid_of(tmp_path, "one") != pid_of(tmp_path, "two")


def test_all_processes_end_where_the_caller_stops(chores, tmp_path, capfd):
    tasks = [(str(tmp_path), "short", 0.0), (str(tmp_path), "long", 600.0)]
    ended = run_parallel(chores.note, tasks, ["a", "b"])
    assert next(ended) == (tasks[0], None)
    wait_for(lambda: (tmp_path / "long").exists())
    ended.close()
    assert gone(tmp_path)
    assert multiprocessing.active_children() == []
    assert capfd.readouterr() == ("", "")


def test_an_interrupt_reaches_this_process_only(chores, tmp_path, capfd):
    tasks = [(str(tmp_path), "good", 600.0), (str(tmp_path), "also", 600.0)]

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
        list(run_parallel(chores.note, tasks, ["a", "b"]))
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
    list(run_parallel(some_chores.note, [(sys.argv[2], "good", 600.0), (sys.argv[2], "also", 600.0)], ["a", "b"]))
"""


def test_processes_end_with_a_parent_that_is_killed(chores, tmp_path):
    (tmp_path / "library" / "script.py").write_text(KILLED)
    (tmp_path / "notes").mkdir()
    command = [sys.executable, tmp_path / "library" / "script.py", tmp_path / "library", tmp_path / "notes"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    wait_for(lambda: gone(tmp_path / "notes"))
