"""The page of releasing agrees with the project's metadata."""

import re
import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
METADATA = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = METADATA["project"]
PAGE = (ROOT / "docs/releasing.md").read_text(encoding="utf-8")


def recipe() -> dict:
    """Return the recipe for conda-forge."""
    [text] = re.findall(r"^```yaml\n(schema_version.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
    return yaml.safe_load(text)


def requirements(lines: list[str]) -> dict[str, Requirement]:
    """Return requirements by name; conda writes a blank where PEP 508 needs none."""
    return {requirement.name: requirement for requirement in map(Requirement, lines)}


def test_recipe_has_the_requirements_of_the_bare_distribution():
    run = requirements([f"python{PROJECT['requires-python']}", *PROJECT["dependencies"]])
    assert requirements(recipe()["requirements"]["run"]) == run


def test_recipe_builds_as_pyproject_does():
    host = requirements(recipe()["requirements"]["host"])
    build = requirements(METADATA["build-system"]["requires"])
    assert {name: host[name] for name in build} == build
    assert set(host) - set(build) == {"python", "pip"}
    entries = [f"{name} = {function}" for name, function in PROJECT["scripts"].items()]
    assert recipe()["build"]["python"]["entry_points"] == entries


def test_recipe_names_version_and_licence():
    assert recipe()["context"]["version"] == PROJECT["version"]
    assert recipe()["about"]["license"] == PROJECT["license"]
    assert [recipe()["about"]["license_file"]] == PROJECT["license-files"]
