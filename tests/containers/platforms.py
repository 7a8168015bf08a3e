"""What platforms start in the images: words of the pages and manifests, given to the entry point on this machine.

`boot` and `imagepivot` are stand-ins that print their arguments as JSON; the program then parses the command line of `imagepivot`.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import typer

from pipelines.commands.app import app
from tests.containers.images import ROOT

ENTRYPOINT = ROOT / "docker" / "entrypoint.sh"
_STAND_IN = """#!{python}
import json, sys
print(json.dumps(["{name}", *sys.argv[1:]]))
"""


def stand_ins(folder: Path, names: Sequence[str] = ("boot", "imagepivot")) -> Path:
    """Write programs that print their names and arguments; return their folder."""
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_text(_STAND_IN.format(python=sys.executable, name=name))
        (folder / name).chmod(0o755)
    return folder


def start(words: Sequence[str], folder: Path, environment: Mapping[str, str] = {}) -> subprocess.CompletedProcess[str]:
    """Start the image's entry point with these words, as a container does."""
    path = f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin"
    settings = {"PATH": path, **environment}
    return subprocess.run([str(ENTRYPOINT), *words], env=settings, capture_output=True, text=True, check=False)


def started(words: Sequence[str], folder: Path, environment: Mapping[str, str] = {}) -> list[str]:
    """Return the program that the words start, with its arguments."""
    done = start(words, folder, environment)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def check_command(words: Sequence[str]) -> None:
    """Check that the program takes a command line: unknown options are errors."""
    program, name, *arguments = words
    assert program == "imagepivot"
    command = typer.main.get_command(app).commands[name]
    with command.make_context(name, list(arguments)) as context:
        assert context.params
