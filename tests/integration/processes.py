"""The command in a process of its own, which can be killed, stopped and limited, without the seconds its imports take.

A server imports the modules of the command once, and every process is a fork of it. Whether the installed script starts is
the subject of other tests.
"""

import contextlib
import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TypeVar

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    [
        *(__name__, "torchvision", "timm", "sacremoses", "simplejpeg", "pyarrow.dataset", "rich.table", "typer._adapters"),
        *("tensorboard.summary.writer.event_file_writer", "pipelines.commands.app", "pipelines.datasets.inspection"),
        *("pipelines.exchange.importing", "pipelines.exchange.exporting", "pipelines.features.extraction"),
        *("pipelines.features.transforms", "pipelines.inputs.captions.opening", "pipelines.text.transforms"),
        *("pipelines.text.vocabulary", "schemas.writing.validation", "train.loop.training", "train.runs.curves"),
        *("train.evaluation.search", "train.reports.reproduce_report", "train.sts.report"),
    ]
)
_Result = TypeVar("_Result")


def wait_for(condition: Callable[[], _Result], seconds: float = 120.0) -> _Result:
    """Poll a condition and return its first true value; fail when that takes longer than ``seconds``."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, f"the condition did not hold within {seconds} seconds"
        time.sleep(0.005)
    return result


def group_of(leader: int) -> dict[int, str]:
    """Return the command lines of the live processes (no zombies) of a group, by process id."""
    members = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, process_group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(process_group) == leader and state != "Z":
                members[int(stat.parent.name)] = (stat.parent / "cmdline").read_text()
    return members


@dataclass(frozen=True)
class Started:
    """A command that runs as the head of a process group of its own.

    Attributes:
        process: the command.
        arguments: arguments of the command.
        folder: its working folder; the files ``stdout`` and ``stderr`` hold its output so far.
    """

    process: BaseProcess
    arguments: tuple[str, ...]
    folder: Path

    @property
    def pid(self) -> int:
        """Id of the process and of its group."""
        assert self.process.pid is not None
        return self.process.pid

    @property
    def runs(self) -> bool:
        """Whether it is still running."""
        return self.process.is_alive()

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the whole group."""
        os.killpg(self.pid, number)

    def wait(self, seconds: float = 120.0) -> subprocess.CompletedProcess[str]:
        """Wait for the end and return exit code and output."""
        self.process.join(seconds)
        assert self.process.exitcode is not None, f"{self.arguments} takes longer than {seconds} seconds"
        streams = [(self.folder / name).read_text() for name in ("stdout", "stderr")]
        return subprocess.CompletedProcess(self.arguments, self.process.exitcode, *streams)


@contextlib.contextmanager
def start(*arguments: object, folder: Path, before: Callable[[], object] | None = None) -> Iterator[Started]:
    """Start the command in this process's environment; kill what is left of its group when the block ends.

    Args:
        arguments: of the command.
        folder: working folder, made if missing; takes the output.
        before: called in the new process before the command.

    Yields:
        The process, once it leads its group.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "stdout").unlink(missing_ok=True)
    words = tuple(map(str, arguments))
    process = _FORKS.Process(target=_run, args=(words, folder, dict(os.environ), before))
    process.start()
    try:
        # The file is made after the group, so that the group can be signalled from here on.
        wait_for(lambda: (folder / "stdout").exists() or not process.is_alive())
        yield Started(process, words, folder)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()


def _run(arguments: tuple[str, ...], folder: Path, environment: Mapping[str, str], before: Callable[[], object] | None) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    for number, name in ((2, "stderr"), (1, "stdout")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.chdir(folder)
    import imagepivot
    from pipelines.commands import results

    results.console.width = results.notes.width = 200
    sys.argv = ["imagepivot", *arguments]
    if before is not None:
        before()
    imagepivot.main()


def _change_folder(folder: Path, then: Callable[[], object] | None) -> None:
    os.chdir(folder)
    if then is not None:
        then()


class ForkedSteps:
    """In place of `schemas.process.steps.run_command`.

    Args:
        before: called in each process, before its command.
    """

    def __init__(self, before: Callable[[], object] | None = None) -> None:
        self.before = before
        self.started: list[list[str]] = []

    def __call__(
        self, words: Sequence[str], variables: Mapping[str, str] | None = None, read: Callable[[str], object] | None = None
    ) -> int:
        self.started.append(list(words))
        before = functools.partial(_change_folder, Path.cwd(), self.before)  # Words may hold relative paths.
        with tempfile.TemporaryDirectory() as folder, start(*words, folder=Path(folder), before=before) as process:
            done = process.wait(600)  # The whole of Multi30K takes minutes on a busy machine.
        if read is None:
            print(done.stdout)
            print(done.stderr, file=sys.stderr)
        else:
            for line in done.stderr.splitlines():
                read(line)
        return done.returncode if done.returncode >= 0 else 128 - done.returncode
