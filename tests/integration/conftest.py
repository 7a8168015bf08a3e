"""Fixtures: the installed command, started as a user starts it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

Command = Callable[..., subprocess.CompletedProcess[str]]

# Where a run takes more than ten seconds it says how far it is; how long it takes is the machine's matter.
PROGRESS = re.compile(r"^\S+: [\d,]+( of [\d,]+)? (captions|images), .*\n", flags=re.MULTILINE)


@pytest.fixture(scope="session")
def script() -> str:
    """Path of the console script that belongs to this Python."""
    path = Path(sys.executable).with_name("imagepivot")
    if not path.is_file():
        pytest.skip(f"no {path}: install the project into the environment of this Python")
    return str(path)


@pytest.fixture(scope="session")
def imagepivot(script: str, tmp_path_factory: pytest.TempPathFactory) -> Command:
    """Runs the command in an empty folder (or ``cwd``) and checks its exit code (``code``)."""
    elsewhere = tmp_path_factory.mktemp("cwd")

    def run(
        *arguments: object,
        code: int = 0,
        cwd: Path = elsewhere,
        env: Mapping[str, str] | None = None,
        timeout: float = 300,
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [script, *map(str, arguments)],
            cwd=cwd,
            env={**os.environ, "COLUMNS": "200", **(env or {})},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        done.stderr = PROGRESS.sub("", done.stderr)
        assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return run
