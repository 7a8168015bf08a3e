"""Steps in real processes: nothing of theirs is left when one fails, or when their launcher stops or is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from schemas.process import steps
from schemas.process.steps import environment_of, run_command, run_side_by_side
from tests.integration.processes import wait_for

# In place of a command, words are a Python program.
PROGRAM = steps._START.replace("imagepivot.command()", "exec(sys.argv[1])")
# The note is a name, not text, as a killed process can leave an empty file.
NOTE = "import os, pathlib, time; pathlib.Path({path!r} + f'.{{os.getpid()}}').touch(); time.sleep(600)"


def note(folder: Path, name: str) -> list[str]:
    return [NOTE.format(path=str(folder / name))]


def are_gone(folder: Path) -> bool:
    return not any(Path("/proc", path.suffix[1:]).exists() for path in folder.iterdir())


@pytest.fixture
def programs(tmp_path, monkeypatch) -> Path:
    """Run programs in place of commands; a folder for their notes."""
    monkeypatch.setattr(steps, "_START", PROGRAM)
    (tmp_path / "notes").mkdir()
    return tmp_path / "notes"


@pytest.mark.slow
def test_command_returns_its_exit_code_and_its_lines(tmp_path, monkeypatch, capfd):
    (tmp_path / "json.py").write_text("raise SystemExit('a module of the current folder was imported')")
    monkeypatch.chdir(tmp_path)
    lines = []
    assert run_command(["inspect", "nothing"], read=lines.append) == 1
    assert "'nothing'" in "".join(lines)
    assert "Traceback" not in "".join(lines)
    assert capfd.readouterr() == ("", "")
    assert run_command(["inspect", "--help"]) == 0
    assert "Usage" in capfd.readouterr().out


def test_environment_of_drops_option_variables(monkeypatch):
    monkeypatch.setenv("IMAGEPIVOT_WORD_VECTORS_SHARDS", "3")
    monkeypatch.setenv("IMAGEPIVOT_CAPTIONS_SHARDS", "4")
    environment = environment_of("word-vectors", {"OMP_NUM_THREADS": "1"})
    monkeypatch.delenv("IMAGEPIVOT_WORD_VECTORS_SHARDS")
    assert environment == {**os.environ, "OMP_NUM_THREADS": "1"}
    assert environment["IMAGEPIVOT_CAPTIONS_SHARDS"] == "4"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "code"),
    [("os._exit(5)", 5), ("import signal; os.kill(os.getpid(), signal.SIGSEGV)", 139), ("raise ValueError('bad')", 1)],
)
def test_other_ends_of_a_process(programs, program, code):
    lines = []
    assert run_command([f"import os; {program}"], {"PYTHONFAULTHANDLER": ""}, lines.append) == code
    assert ("ValueError: bad\n" in lines) is (code == 1)


def test_tasks_share_the_devices():
    busy, most = set(), []

    def work(task: int, device: str) -> int:
        assert device not in busy
        busy.add(device)
        most.append(len(busy))
        time.sleep(0.01)
        busy.remove(device)
        return task * 2

    assert sorted(run_side_by_side(work, range(8), ["a", "b"])) == [(task, task * 2) for task in range(8)]
    assert max(most) == 2


def test_fault_of_the_work_reaches_the_caller():
    with pytest.raises(ZeroDivisionError):
        list(run_side_by_side(lambda task, device: task / 0, [1, 2, 3], ["a"]))


@pytest.mark.cluster
def test_run_side_by_side_caller_stops_ends_processes(programs):
    ended = run_side_by_side(lambda task, device: run_command(task), [["pass"], note(programs, "long")], ["a", "b"])
    assert next(ended) == (["pass"], 0)
    wait_for(lambda: list(programs.glob("long.*")))
    ended.close()
    assert are_gone(programs)


@pytest.mark.cluster
def test_interrupt_stops_all_steps(programs, capfd):
    tasks = [note(programs, name) for name in ("one", "two", "three")]

    def interrupt() -> None:
        wait_for(lambda: len(list(programs.iterdir())) == 2)
        time.sleep(0.1)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        list(run_side_by_side(lambda task, device: run_command(task), tasks, ["a", "b"]))
    assert are_gone(programs)
    assert len(list(programs.iterdir())) == 2
    assert capfd.readouterr() == ("", "")


@pytest.mark.cluster
def test_steps_end_with_a_killed_launcher(programs):
    launcher = (
        "import sys; from schemas.process import steps; steps._START = sys.argv[1]; "
        "list(steps.run_side_by_side(lambda task, device: steps.run_command([task]), sys.argv[2:], ['a', 'b']))"
    )
    words = [PROGRAM, *note(programs, "one"), *note(programs, "two")]
    process = subprocess.Popen([sys.executable, "-c", launcher, *words], cwd=Path(__file__).parents[3])
    wait_for(lambda: len(list(programs.iterdir())) == 2)
    process.kill()
    process.wait()
    wait_for(lambda: are_gone(programs))
