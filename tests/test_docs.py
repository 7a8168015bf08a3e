"""The README's Python snippets run as they stand, in a folder where the demo has run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
SNIPPETS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("readme")
    command = Path(sys.executable).with_name("imagepivot")
    subprocess.run([command, "demo", "build/demo", "--scenes", "24"], cwd=folder, check=True, capture_output=True)
    return folder


def test_there_are_snippets() -> None:
    assert len(SNIPPETS) == 9


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_snippet_runs(number: int, folder: Path) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf")}
    # The checkout is installed into the environment; a script in the user's folder finds it there.
    (folder / "snippet.py").write_text(SNIPPETS[number], encoding="utf-8")
    done = subprocess.run([sys.executable, "snippet.py"], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
