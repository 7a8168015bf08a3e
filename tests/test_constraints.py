"""`constraints.txt` pins the whole closure of the requirements, in one file for all Pythons."""

from importlib.metadata import distribution, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

CONSTRAINTS = Path(__file__).parent.parent / "constraints.txt"
PINS = [Requirement(line) for line in CONSTRAINTS.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]


def closure(name: str, extra: str) -> set[str]:
    """Return the canonical names of the distributions that an extra needs in this Python, directly or not."""
    names, queue = set(), [(name, extra)]
    seen = set(queue)
    while queue:
        current, wanted = queue.pop()
        names.add(canonicalize_name(current))
        for line in distribution(current).requires or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": wanted}):
                more = {(requirement.name, ""), *((requirement.name, one) for one in requirement.extras)} - seen
                seen |= more
                queue += more
    return names - {name}


def pinned() -> dict[str, list[str]]:
    """Return the versions that the file gives each distribution in this Python."""
    versions: dict[str, list[str]] = {}
    for pin in PINS:
        if pin.marker is None or pin.marker.evaluate():
            versions.setdefault(canonicalize_name(pin.name), []).append(str(pin.specifier))
    return versions


@pytest.mark.slow
def test_transitive_requirements_are_pinned_once():
    needed, pins = closure("imagepivot", "dev"), pinned()
    assert {"torch", "numpy", "grpcio", "markupsafe", "uv"} <= needed
    assert {name: pins.get(name, []) for name in needed if len(pins.get(name, [])) != 1} == {}


@pytest.mark.slow
def test_pinned_versions_are_installed():
    assert {name: version(name) for name in closure("imagepivot", "dev") if pinned()[name] != [f"=={version(name)}"]} == {}


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13", "3.14"])
def test_numpy_and_torch_are_pinned_for_every_python(python):
    environment = {"python_version": python, "python_full_version": f"{python}.0"}
    names = {pin.name for pin in PINS if pin.marker is None or pin.marker.evaluate(environment)}
    assert {"numpy", "pyarrow", "torch", "torchvision", "apache-beam", "typer"} <= names
    assert ("gensim" in names) == (python != "3.14")


def test_file_names_no_address():
    assert "://" not in CONSTRAINTS.read_text(encoding="utf-8")
