"""The page of releasing and the workflows agree with the project's metadata and `.ci/run`."""

import re
import shutil
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from tests import release

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


def test_recipe_names_version_and_licence():
    assert recipe()["context"]["version"] == PROJECT["version"]
    assert recipe()["about"]["license"] == PROJECT["license"]
    assert [recipe()["about"]["license_file"]] == PROJECT["license-files"]


# --- the check before a release --------------------------------------------------------------------------------------


def test_release_is_refused_with_placeholders_and_unreleased_changes():
    placeholders = [problem for problem in release.problems() if "a placeholder" in problem]
    assert len(placeholders) == len(PROJECT["urls"]) == 4
    assert any("the first heading is 'Unreleased'" in problem for problem in release.problems())


def replace(path: Path, pattern: str, text: str) -> None:
    path.write_text(re.sub(pattern, text, path.read_text(encoding="utf-8"), count=0, flags=re.MULTILINE), encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "pattern", "text", "problem"),
    [
        ("CITATION.cff", r"^version: .*", "version: 9.9", "CITATION.cff: the version is 9.9"),
        ("CHANGELOG.md", r"^## 0\.2\.0 .*", "## 0.2.0", "CHANGELOG.md: the first heading is"),
        ("pyproject.toml", r"imagepivot\.example", "site.invalid", "pyproject.toml: the address Documentation is"),
    ],
)
def test_release_with_one_mistake_is_refused(tmp_path, name, pattern, text, problem):
    for file in ("pyproject.toml", "CITATION.cff", "CHANGELOG.md"):
        shutil.copy(ROOT / file, tmp_path)
    replace(tmp_path / "pyproject.toml", r"[a-z]+\.invalid", "imagepivot.example")
    date = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["date-released"]
    replace(tmp_path / "CHANGELOG.md", "^## Unreleased$", f"## {PROJECT['version']} ({date})")
    assert list(release.problems(tmp_path)) == []
    replace(tmp_path / name, pattern, text)
    assert next(iter(release.problems(tmp_path))).startswith(problem)


# --- workflows -------------------------------------------------------------------------------------------------------

WORKFLOWS = {path.name: yaml.safe_load(path.read_text(encoding="utf-8")) for path in (ROOT / ".github/workflows").glob("*.yml")}


def lines_of(workflow: str) -> list[str]:
    """Return the shell lines of a workflow."""
    return [step["run"] for job in WORKFLOWS[workflow]["jobs"].values() for step in job["steps"] if "run" in step]


def test_workflow_runs_the_stages_of_ci_and_the_lowest_versions():
    stages = set(re.findall(r"^(?:stage )?make ([a-z-]+)$", (ROOT / ".ci/run").read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert len(stages) == 4
    targets = {line.split()[-1] for line in lines_of("ci.yml") if line.startswith("make ")}
    assert targets == stages | {"lowest-test"}


def test_workflow_tests_every_supported_python():
    named = {entry.rpartition(" ")[2] for entry in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", entry)}
    assert set(WORKFLOWS["ci.yml"]["jobs"]["test"]["strategy"]["matrix"]["python"]) == named


def test_targets_of_the_workflows_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    used = {line.split()[-1] for name in WORKFLOWS for line in lines_of(name) if line.startswith("make ")}
    assert len(used) >= 7
    assert used <= targets


def test_only_publishing_may_write():
    """A token of the index is stored nowhere: the job that uploads gets one by its identity."""
    for workflow in WORKFLOWS.values():
        assert workflow["permissions"] == {"contents": "read"}
        writing = {name for name, job in workflow["jobs"].items() if "write" in job.get("permissions", {}).values()}
        assert writing <= {"publish"}
    publish = WORKFLOWS["release.yml"]["jobs"]["publish"]
    assert (publish["environment"], publish["permissions"]) == ("release", {"id-token": "write"})
    assert "secrets." not in "".join(path.read_text() for path in (ROOT / ".github/workflows").iterdir())
