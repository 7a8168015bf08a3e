"""What the images install is pinned, and the pins are those that the project's own requirements give."""

import os
import shutil
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.containers.images import ROOT

FILES = ("torch.txt", "requirements.txt")
ENVIRONMENT = {"python_version": "3.11", "python_full_version": "3.11.14", "platform_system": "Linux"}


def pins(name: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in (ROOT / name).read_text().splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate(ENVIRONMENT):
                found[requirement.name.lower().replace("_", "-")] = str(requirement.specifier)
    return found


def test_lists_and_the_constraints_agree():
    torch, others, constraints = pins("docker/torch.txt"), pins("docker/requirements.txt"), pins("constraints.txt")
    assert all(specifier.startswith("==") for specifier in (*torch.values(), *others.values()))
    for left, right in ((torch, others), (torch, constraints), (others, constraints)):
        assert {name: left[name] for name in left.keys() & right} == {name: right[name] for name in left.keys() & right}


def test_requirement_lists_cover_the_extras_of_the_images():
    listed = {**pins("docker/torch.txt"), **pins("docker/requirements.txt")}
    for line in requires("imagepivot") or ():
        requirement = Requirement(line)
        extras = ("", "gcp", "all", "heif", "fasttext", "train", "figures", "hdf5", "timm", "pipelines", "extractors")
        marker = requirement.marker
        if requirement.name != "imagepivot" and (
            marker is None or any(marker.evaluate({**ENVIRONMENT, "extra": e}) for e in extras)
        ):
            assert requirement.specifier.contains(listed[requirement.name.lower()].removeprefix("==")), line


@pytest.mark.slow
@pytest.mark.containers
def test_lock_script_reproduces_the_lists(tmp_path):
    for name in FILES:
        shutil.copy(ROOT / "docker" / name, tmp_path)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    if shutil.which("uv", path=path) is None:
        pytest.skip("uv is not installed")
    subprocess.run([ROOT / "docker" / "lock.sh", tmp_path], env={**os.environ, "PATH": path}, check=True)
    for name in FILES:
        assert (tmp_path / name).read_text() == (ROOT / "docker" / name).read_text()


@pytest.mark.slow
@pytest.mark.containers
def test_hadolint_has_nothing_to_say():
    program = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is None:
        pytest.skip("hadolint is not installed")
    paths = sorted((ROOT / "docker").glob("*Dockerfile"))
    assert [path.name for path in paths] == ["Dockerfile", "sdk.Dockerfile"]
    done = subprocess.run([program, *paths], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.containers
def test_build_script_names_the_targets():
    done = subprocess.run([ROOT / "docker" / "build.sh", "gpu", "image"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        2,
        "docker/build.sh: the target is 'gpu', expected worker, worker-cpu, launcher or train\n",
    )
