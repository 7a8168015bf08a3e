"""The lock of a folder: runs keep each other out, tasks share it, and it ends with its process."""

import os
import signal
from pathlib import Path

import pytest

from schemas.errors import DatasetError
from schemas.storage.folder import Folder
from schemas.writing import locks
from schemas.writing.locks import lock_folder, publishing
from tests.schemas.conftest import blocked_process

HOLDER = """
import sys
from schemas.writing.locks import lock_folder
from schemas.storage.folder import Folder

with lock_folder(Folder(sys.argv[1])):
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True], ids=["a run", "a task"])
def test_second_run_is_refused_until_the_first_is_killed(folder, shared):
    says = r"'.*/data' is in use: another run is writing it"
    with blocked_process(HOLDER, folder.location) as process:
        for _ in range(2):
            with pytest.raises(DatasetError, match=says), lock_folder(folder, shared=shared):
                pytest.fail("two runs hold one folder")
        assert folder.names() == [".lock"]  # The refused run did not take the lock of the first away.
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        with lock_folder(folder, shared=shared):
            assert folder.names() == [".lock"]
    assert folder.names() == []


@pytest.mark.parametrize(("name", "left"), [("build/new/data", []), ("own/new/data", ["own"]), ("own", ["own"])])
def test_refused_run_keeps_existing_folders(tmp_path, name, left):
    if name.startswith("own"):
        (tmp_path / "own").mkdir()
    with pytest.raises(ZeroDivisionError, match="refused"), lock_folder(Folder(str(tmp_path / name))):
        raise ZeroDivisionError("refused")
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == left


def test_launcher_exit_keeps_the_lock_of_a_publishing_worker(folder):
    with lock_folder(folder):
        folder.put(".publishing", b"")  # Of a worker that was killed.
    assert not folder.local_path.exists()
    with publishing(folder):
        with lock_folder(folder):
            assert set(folder.names()) == {".lock", ".publishing"}
        assert folder.names() == [".publishing"]
    assert folder.names() == []


@pytest.mark.parametrize(
    ("module", "name", "delete"),
    [
        # Another run ends between our opening its lock and our locking it: nobody else sees the file that we hold.
        (locks.fcntl, "flock", lambda path: (path / ".lock").unlink()),
        (locks.os, "open", Path.rmdir),  # A refused run deletes the folder that it created.
    ],
)
def test_lock_deleted_while_waiting_is_recreated(folder, monkeypatch, module, name, delete):
    operation, calls = getattr(module, name), []

    def delete_once(*arguments):
        if not calls:
            delete(folder.local_path)
        calls.append(arguments)
        return operation(*arguments)

    monkeypatch.setattr(module, name, delete_once)
    with lock_folder(folder):
        assert len(calls) == 2
        with pytest.raises(DatasetError, match="is in use"), lock_folder(folder):
            pytest.fail("two runs hold one folder")


@pytest.mark.slow
def test_tasks_share_a_folder_and_keep_runs_out(folder):
    with blocked_process(HOLDER.replace("argv[1])", "argv[1]), shared=True"), folder.location) as process:
        with lock_folder(folder, shared=True):
            assert folder.names() == [".lock"]
        assert folder.names() == [".lock"]  # The other one still holds it.
        with pytest.raises(DatasetError, match=r"'.*/data' is in use: another run is writing it"), lock_folder(folder):
            pytest.fail("a run and a task hold one folder")
        process.communicate("go on")
        assert process.returncode == 0
    assert not folder.local_path.exists()  # The last one deletes it.


def test_task_exit_keeps_the_lock_of_a_new_run(folder, monkeypatch):
    # Between the task's last look at the lock and its end, another run deletes the file and makes a new one.
    flock = locks.fcntl.flock

    def replace_lock(handle, operation):
        flock(handle, operation)
        (folder.local_path / ".lock").unlink()
        folder.put(".lock", b"theirs")

    with lock_folder(folder, shared=True):
        monkeypatch.setattr(locks.fcntl, "flock", replace_lock)
    assert folder.read(".lock") == b"theirs"


def test_task_waits_while_another_one_deletes_the_lock(folder, monkeypatch):
    first = lock_folder(folder, shared=True)
    first.__enter__()
    is_last = locks._is_last

    def wait(handle, path):
        assert is_last(handle, path)  # From here to its end the first task holds the lock alone.
        monkeypatch.setattr(locks.time, "sleep", lambda seconds: path.unlink())
        return True

    monkeypatch.setattr(locks, "_is_last", lambda handle, path: wait(handle, path) and enter())
    second = lock_folder(folder, shared=True)

    def enter() -> bool:
        second.__enter__()
        return False

    first.__exit__(None, None, None)
    with pytest.raises(DatasetError, match="is in use"), lock_folder(folder):
        pytest.fail("a run and a task hold one folder")
    monkeypatch.setattr(locks, "_is_last", is_last)
    second.__exit__(None, None, None)
    assert folder.names() == []
