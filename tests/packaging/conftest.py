"""The distributions, built once."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.packaging.environments import ROOT


@pytest.fixture(scope="session")
def dist(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "build", "--outdir", folder, ROOT], check=True, capture_output=True)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", wheel, sdist], check=True)
    return SimpleNamespace(wheel=wheel, sdist=sdist)
