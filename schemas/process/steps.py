"""Runner of steps: imagepivot commands in processes of their own.

`build` runs the steps of a plan, `reproduce` the rows of a table. A step has its own process group: Ctrl-C
reaches only the launcher, which stops its steps. A step also ends if its launcher is killed.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

# `-c` puts the current folder first on the path, where its modules could hide others: the folder of our
# packages replaces it for the import of `imagepivot`.
_START = """
import sys
sys.path[0] = {folder!r}
import os, threading, time
def end_with_launcher():
    while os.getppid() == {launcher}:
        time.sleep(0.1)
    os._exit(1)
threading.Thread(target=end_with_launcher, daemon=True).start()
import imagepivot
del sys.path[0]
sys.argv[0] = "imagepivot"
imagepivot.command()
"""

_running: set[subprocess.Popen[str]] = set()


def run_command(
    words: Sequence[str], variables: Mapping[str, str] | None = None, read: Callable[[str], object] | None = None
) -> int:
    """Run a command in a new process; return its exit code, or 128 plus the signal.

    ``variables`` extend the environment. ``read`` receives the lines of standard error, not standard output; None inherits both.
    """
    start = _START.format(folder=str(Path(__file__).resolve().parents[2]), launcher=os.getpid())
    process = subprocess.Popen(
        [sys.executable, "-c", start, *words],
        env=environment_of(words[0], variables or {}),
        process_group=0,
        text=True,
        errors="replace",
        stdout=None if read is None else subprocess.DEVNULL,
        stderr=None if read is None else subprocess.PIPE,
    )
    _running.add(process)
    try:
        for line in process.stderr or ():
            if read is not None:
                read(line)
        code = process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise
    finally:
        _running.discard(process)
    return 128 - code if code < 0 else code


def environment_of(command: str, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a command without variables for its options."""
    prefix = f"IMAGEPIVOT_{command.upper().replace('-', '_')}_"
    return {name: value for name, value in os.environ.items() if not name.startswith(prefix)} | dict(variables)


def run_side_by_side(work: Callable[[T, str], R], tasks: Sequence[T], devices: Sequence[str]) -> Iterator[tuple[T, R]]:
    """Run one task per device in parallel; yield finished tasks and their results.

    If the caller stops early, running commands are terminated and waited for.
    """
    free = SimpleQueue[str]()
    for device in devices:
        free.put(device)

    def work_on_free_device(task: T) -> R:
        device = free.get()
        try:
            return work(task, device)
        finally:
            free.put(device)

    pool = ThreadPoolExecutor(len(devices))
    futures = {pool.submit(work_on_free_device, task): task for task in tasks}
    try:
        for future in as_completed(futures):
            yield futures[future], future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in tuple(_running):
            process.terminate()
        pool.shutdown()
