"""Empty virtual environments outside the checkout, filled by uv."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UV = Path(sys.executable).with_name("uv")


def find_python(version):
    """Return an interpreter that uv finds, or one of pyenv."""
    words = (UV, "python", "find", "--no-python-downloads", version)
    found = subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()
    paths = [Path(found)] if found else sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    if not paths:
        pytest.skip(f"needs Python {version}: none is installed")
    return paths[-1]


class Environment:
    """A virtual environment in a folder, in which its commands run."""

    def __init__(self, folder, interpreter=sys.executable):
        self.folder, self.python = folder, folder / "venv/bin/python"
        subprocess.run([UV, "venv", "--quiet", "--python", interpreter, folder / "venv"], check=True)

    def pip(self, *words):
        subprocess.run([UV, "pip", words[0], "--quiet", "--python", self.python, *words[1:]], check=True)

    def __call__(self, *words, code=0):
        environment = {"PATH": "/usr/bin:/bin", "HOME": str(self.folder), "COLUMNS": "120"}
        done = subprocess.run(words, cwd=self.folder, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == code, f"{words}: {done.stdout}{done.stderr}"
        assert "Traceback" not in done.stderr, done.stderr
        return done.stdout + done.stderr

    def command(self, *words, code=0):
        return self(self.python.with_name("imagepivot"), *words, code=code)
