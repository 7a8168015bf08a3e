"""Output streams of every kind: narrow encodings, closed descriptors, full disks; signals that another thread gets. Signals at any
moment have a page in tests/integration."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.builders import write_rows

ROOT = Path(__file__).parents[3]

ROW = {
    "image_id": "1",
    "language": "cs",
    "portion": "comparable",
    "index": 0,
    "split": "train",
    "text": "Žlutý pes běží",
    "tokens": ["žlutý", "pes", "běží"],
}
ASCII = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("process")
    write_rows(folder / "captions", "captions", [ROW])
    return folder


def call(folder: Path, *words: str, redirect: str = "", **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run the command in a shell, with redirections such as ``>&-``."""
    command = f'exec "{sys.executable}" -c "import imagepivot; imagepivot.command()" "$@" {redirect}'
    settings = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200", **environment}
    return subprocess.run(["sh", "-c", command, "sh", *words], cwd=folder, env=settings, capture_output=True, check=False)


def run_script(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run Python on a script, with our packages, in a folder."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", script]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("environment", "encoding"),
    [({**ASCII}, "ascii"), ({"PYTHONIOENCODING": "latin-1"}, "latin-1"), ({"PYTHONIOENCODING": "ascii"}, "ascii")],
)
def test_narrow_encoding_prints_escapes(folder, environment, encoding):
    done = call(folder, "inspect", "captions", **environment)
    assert (done.returncode, done.stderr) == (0, b"")
    text = done.stdout.decode(encoding)
    assert "\\u017dlut" in text  # Ž
    assert "+---" in text  # Tables are drawn with what there is.
    help_text = call(folder, "features", "--help", **environment)
    assert (help_text.returncode, help_text.stderr) == (0, b"")


@pytest.mark.cluster
@pytest.mark.parametrize("redirect", [">&-", "<&-", "2>&-", ">&- 2>&- <&-"])
def test_closed_streams(folder, redirect):
    done = call(folder, "validate", "captions", redirect=redirect)
    assert (done.returncode, done.stderr) == (0, b"")
    done = call(folder, "validate", "none", redirect=redirect)
    assert done.returncode == 1
    assert b"Traceback" not in done.stderr + done.stdout


@pytest.mark.cluster
def test_worker_processes_inherit_closed_streams(tmp_path):
    code = (
        "from pipelines.commands.signals import prepare_streams; prepare_streams(); import subprocess, sys; "
        "sys.exit(subprocess.run('exec 3>&2 4>&1 5<&0', shell=True).returncode)"
    )
    command = shlex.join([sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); import imagepivot; {code}"])
    assert subprocess.run(f"{command} >&- 2>&- <&-", shell=True, cwd=tmp_path, check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
@pytest.mark.parametrize("words", [("inspect", "captions"), ("validate", "captions"), ("features", "--help"), ("--version",)])
def test_features_unwritable_output_is_an_error(folder, words):
    done = call(folder, *words, redirect="> /dev/full")
    assert done.returncode == 1
    assert done.stderr == b"Error: cannot write the output: No space left on device\n"


def test_signal_interrupts_the_main_thread_among_others(tmp_path):
    """The system may give a process's signal to any thread; Linux and macOS choose the main thread, here one that waits forever."""
    script = (
        "import os, signal, subprocess, sys, threading\n"
        "from pipelines.commands.signals import stoppable\n"
        "def compute():\n"
        "    while True:\n"
        "        pass\n"
        "with stoppable():\n"
        "    for work in [compute, threading.Event().wait] * 4:\n"
        "        threading.Thread(target=work, daemon=True).start()\n"
        "    subprocess.Popen(['sh', '-c', f'sleep 0.5; kill -INT {os.getpid()}'])\n"
        "    threading.Event().wait()\n"
    )
    done = run_script(script, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "stopped\n")


INTERRUPTED = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(0.2)\n"


@pytest.mark.parametrize("place", ["import slow", "import swallows", "finalized()"])
def test_signal_in_an_import_or_finalizer_leaves_no_lock(tmp_path, place):
    """Libraries import others in the midst of a run, and may swallow the interrupt; Python only prints what a finalizer raises."""
    (tmp_path / "slow.py").write_text(INTERRUPTED)
    (tmp_path / "swallows.py").write_text("try:\n    import slow\nexcept BaseException:\n    pass\n")
    script = (
        "import os, signal, threading\n"
        "from pipelines.commands.signals import stoppable\n"
        "from schemas.writing.locks import lock_folder\n"
        "from schemas.storage.folder import Folder\n"
        "class finalized:\n"
        "    def __del__(self):\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "with stoppable(), lock_folder(Folder('out')):\n"
        f"    {place}\n"
        "    threading.Event().wait()\n"
    )
    done = run_script(script, tmp_path)
    assert (done.returncode, done.stdout) == (130, "")
    if place == "finalized()":
        assert done.stderr.startswith("Exception ignored in")
        assert done.stderr.endswith("KeyboardInterrupt: \nstopped\n")
    else:
        assert done.stderr == "stopped\n"
    assert not (tmp_path / "out").exists()


def test_signal_lets_slow_cleanup_end(tmp_path):
    """`build` waits for its step, which may finish a training step, before it ends."""
    script = (
        "import os, signal, time\n"
        "from pipelines.commands.signals import stoppable\n"
        "with stoppable():\n"
        "    try:\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        time.sleep(60)\n"
        "    finally:\n"
        "        time.sleep(1)\n"
        "        print('clean', flush=True)\n"
    )
    done = run_script(script, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (143, "clean\n", "stopped\n")


ENDS = """
import atexit, sys, threading
from pipelines.commands.signals import fast_exit

class TakenApart:
    def __del__(self):
        print("taken apart")

kept = TakenApart()
with fast_exit():
    atexit.register(print, "registered")
    threading.Thread(target=lambda: (threading.main_thread().join(), print("thread"))).start()
    {end}
"""


@pytest.mark.parametrize(
    ("end", "code", "out", "error"),
    [
        ("sys.exit(3)", 3, "thread\nregistered\n", ""),
        ("sys.exit(0)", 0, "thread\nregistered\n", ""),
        ("sys.exit('words')", 1, "thread\nregistered\ntaken apart\n", "words\n"),
        ("raise ValueError('ours')", 1, "thread\nregistered\ntaken apart\n", "ValueError: ours\n"),
    ],
)
def test_fast_exit_waits_for_threads_and_atexit(tmp_path, end, code, out, error):
    done = run_script(ENDS.format(end=end), tmp_path)
    assert (done.returncode, done.stdout) == (code, out)
    assert done.stderr.endswith(error)
    assert bool(done.stderr) == bool(error)
