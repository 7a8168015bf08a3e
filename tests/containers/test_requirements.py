"""What the images install is pinned, and the pins are those that the project's own requirements give."""

import os
import re
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
        if line and not line.startswith(("#", " ")):
            requirement = Requirement(line.removesuffix(" \\"))
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
        extras = ("", "gcp", "all", "heif", "fasttext", "train", "figures", "hdf5", "timm", "pipelines", "text", "extractors")
        marker = requirement.marker
        if requirement.name != "imagepivot" and (
            marker is None or any(marker.evaluate({**ENVIRONMENT, "extra": e}) for e in extras)
        ):
            assert requirement.specifier.contains(listed[requirement.name.lower()].removeprefix("==")), line


@pytest.mark.parametrize("name", FILES)
def test_every_version_has_hashes(name):
    entries = (ROOT / "docker" / name).read_text().replace(" \\\n", "").splitlines()
    assert len(entries) == len(pins(f"docker/{name}")) > 20
    assert [entry for entry in entries if not re.fullmatch(r"\S+==\S+(    --hash=sha256:[0-9a-f]{64})+", entry)] == []


def commands_of(path: Path) -> list[tuple[str, str]]:
    """Return stage and text of each instruction of a Dockerfile."""
    found, stage = [], ""
    text = re.sub(r"^#.*\n", "", path.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    for line in filter(None, text.splitlines()):
        if match := re.match(r"FROM (\S+)(?: AS (\S+))?", line):
            stage = match[2] or "result"
        found.append((stage, line))
    return found


def test_everything_from_an_index_is_checked_by_hash():
    calls = [
        (stage, call)
        for stage, line in commands_of(ROOT / "docker" / "Dockerfile")
        for call in re.findall(r"pip (?:install|wheel) [^;&]*", line)
    ]
    local = ("--no-index", "--no-build-isolation --root /project", "--no-build-isolation --wheel-dir /wheels .")
    unchecked = [(stage, call) for stage, call in calls if "--require-hashes" not in call and not any(w in call for w in local)]
    # PyTorch's own builds have no hashes here, and detectron2 is the user's choice.
    assert [(stage, call.split(" -")[0]) for stage, call in unchecked] == [
        ("torch", "pip install"),
        ("wheels", "pip wheel"),
        ("detectron2", "pip install"),
    ]
    assert '--extra-index-url "$TORCH_INDEX" -c /opt/imagepivot/torch-versions.txt' in unchecked[0][1]
    assert all("detectron2" in call.lower() for _, call in unchecked[1:])
    checked = [(stage, call.split(" -r ")[1].strip()) for stage, call in calls if "--require-hashes" in call]
    assert checked == [("torch", "/opt/imagepivot/torch.txt"), ("wheels", "/opt/imagepivot/requirements.txt")]
    copied = [line for _, line in commands_of(ROOT / "docker" / "Dockerfile") if line.startswith("COPY docker/")]
    assert copied[:2] == [f"COPY docker/{name} /opt/imagepivot/" for name in FILES]


def test_images_run_as_root_only_for_the_launcher():
    instructions = commands_of(ROOT / "docker" / "Dockerfile")
    assert [line for _, line in instructions if line.startswith("ARG RUN_AS")] == ["ARG RUN_AS=10001"] * 2
    users = {stage: line for stage, line in instructions if line.startswith("USER ")}  # The last of each stage.
    assert users == {"train": "USER 10001", "worker-cpu": "USER ${RUN_AS}", "launcher": "USER 0", "worker": "USER ${RUN_AS}"}


def test_pin_script_adds_digests_to_all_foreign_images(tmp_path):
    folder, docker, digest = tmp_path / "docker files", tmp_path / "docker", f"sha256:{'a' * 64}"
    shutil.copytree(ROOT / "docker", folder)
    docker.write_text(f"#!/bin/sh\necho '{digest}'\n")
    docker.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run([folder / "pin.sh", folder], env=environment, check=True)
    text = "".join(path.read_text() for path in folder.rglob("*") if path.name.endswith(("Dockerfile", ".yaml")))
    images = re.findall(r"(?:^ARG \w+=|image: )(\S+/\S+)$", text, re.MULTILINE)
    foreign = [image for image in images if not image.startswith("registry.example.com/")]
    assert {image.partition("@")[2] for image in foreign} == {digest}
    assert len(foreign) >= 4


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
