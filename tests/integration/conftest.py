"""Fixtures that run the command: in this process, in a forked process, and as a user starts it."""

import contextlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

import pytest

from pipelines.commands import app, results
from tests.integration.processes import start
from tests.stores import SOURCES, FarStore, Store, emulator, far_away, is_installed, use

Command = Callable[..., subprocess.CompletedProcess[str]]

WIDTH = 200
# A run that takes more than ten seconds says how far it is; how long it takes depends on the machine.
PROGRESS = re.compile(
    r"^\S+: ([\d,]+( of [\d,]+)? (captions|images|vectors)(, .*)?|running for .*, the runner does not say how far it is)\n",
    flags=re.MULTILINE,
)


def checked(done: subprocess.CompletedProcess[str], code: int | Collection[int]) -> subprocess.CompletedProcess[str]:
    """Return the finished command without its lines of progress; fail unless it ended with the exit code, or one of several."""
    done.stderr = PROGRESS.sub("", done.stderr)
    assert done.returncode in ({code} if isinstance(code, int) else code), (
        f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    )
    return done


@pytest.fixture(scope="session")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Empty folder to run commands in."""
    return tmp_path_factory.mktemp("empty")


@pytest.fixture(scope="session")
def imagepivot(empty: Path) -> Command:
    """Call the command in this process, in an empty folder (or ``cwd``), and check its exit code (``code``).

    The one to use unless the process itself is tested: nothing has to be imported again.
    """

    def run(*arguments: object, code: int | Collection[int] = 0, cwd: Path = empty) -> subprocess.CompletedProcess[str]:
        words = ["imagepivot", *map(str, arguments)]
        out, errors = (io.TextIOWrapper(io.BytesIO(), "utf-8", errors=rule) for rule in ("strict", "backslashreplace"))
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            patch.setattr(sys, "argv", words)
            patch.setenv("COLUMNS", str(WIDTH))
            for console in (results.console, results.notes):
                patch.setattr(console, "_width", WIDTH)
            patch.chdir(cwd)
            with pytest.raises(SystemExit) as end:
                app.main()
        streams = []
        for stream in (out, errors):
            stream.flush()
            streams.append(stream.buffer.getvalue().decode())
        return checked(subprocess.CompletedProcess(words, end.value.code or 0, *streams), code)

    return run


@pytest.fixture(scope="session")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Command:
    """Run the command in a process of its own, which first calls ``before``, and check its exit code (``code``)."""

    def run(*arguments: object, code: int = 0, before: Callable[[], object] | None = None) -> subprocess.CompletedProcess[str]:
        with start(*arguments, folder=tmp_path_factory.mktemp("forked"), before=before) as process:
            return checked(process.wait(300), code)

    return run


@pytest.fixture(scope="session")
def installed(empty: Path) -> Command:
    """Run the console script that belongs to this Python, as a user does, and check its exit code (``code``)."""
    script = Path(sys.executable).with_name("imagepivot")
    if not script.is_file():
        pytest.skip(f"no {script}: install the project into the environment of this Python")

    def run(
        *arguments: object, code: int = 0, cwd: Path = empty, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [script, *map(str, arguments)],
            cwd=cwd,
            env={**os.environ, "COLUMNS": str(WIDTH), **(env or {})},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        return checked(done, code)

    return run


@pytest.fixture(scope="module", params=["s3", "gs", "versitygw"])
def near(request: pytest.FixtureRequest) -> Iterator[Store]:
    """An emulator of each kind of object store, and a store of another maker, with an empty bucket."""
    if not is_installed(request.param):
        pytest.skip(SOURCES[request.param])
    with emulator(request.param) as store:
        yield store


@pytest.fixture
def store(near: Store, monkeypatch: pytest.MonkeyPatch) -> Store:
    """The emulator that this process uses."""
    use(near.environment, monkeypatch)
    return near


@pytest.fixture(scope="module")
def stores(near: Store) -> Iterator[tuple[Store, FarStore]]:
    """An emulator, and the same behind a proxy that counts requests and can cut the network."""
    with far_away(near, 0.0) as far:
        yield near, far
