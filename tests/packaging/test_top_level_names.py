"""Other distributions with our packages' names, installed after ours; the index has a `schemas` of 2014 in Python 2."""

import zipfile
from pathlib import Path

import pytest

from tests.packaging.environments import ROOT, Environment

pytestmark = [pytest.mark.packaging, pytest.mark.slow]

SOURCES = {"schemas": "print 'marshalling'\n", "train": "ENVIRONMENTS = []\n"}


@pytest.fixture(params=SOURCES)
def foreign(request, tmp_path) -> Path:
    """A wheel with one package, which imports in Python 2 only or in both."""
    name = request.param
    folder = f"{name}-0.7.1.dist-info"
    files = {
        f"{name}/__init__.py": SOURCES[name],
        f"{name}/validation.py": "",
        f"{folder}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.7.1\n",
        f"{folder}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{folder}/RECORD"] = "".join(f"{path},,\n" for path in [*files, f"{folder}/RECORD"])
    wheel = tmp_path / f"{name}-0.7.1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, content in files.items():
            archive.writestr(path, content)
    return wheel


@pytest.fixture
def environment(tmp_path) -> Environment:
    return Environment(tmp_path)


def test_package_installed_later_is_named_with_its_cure(environment, dist, foreign):
    name = foreign.name.partition("-")[0]
    environment.pip("install", dist.wheel)
    environment.pip("install", foreign)
    place = next(environment.folder.glob(f"venv/lib/*/site-packages/{name}/__init__.py"))
    for words in (["doctor"], ["--help"], ["inspect", "x", "--json"]):
        output = environment.command(*words, code=1)
        assert output.startswith(f"Error: {place} is a file of {name} 0.7.1, expected imagepivot's")
        assert f"`pip uninstall {name}`" in output
    script = f"import imagepivot\ntry: import {name}\nexcept ImportError as error: print('Error:', error)"
    assert environment(environment.python, "-c", script) == output

    environment.pip("uninstall", name)
    assert environment.command("doctor", code=1).startswith(f"Error: {place} of imagepivot is missing")
    environment.pip("install", "--reinstall-package", "imagepivot", dist.wheel)
    assert environment.command("--version").startswith("imagepivot ")


def test_package_beside_an_editable_installation_is_hidden(environment, foreign):
    """No file of a checkout is replaced, and its packages precede those of the environment."""
    environment.pip("install", "--editable", ROOT)
    environment.pip("install", foreign)
    assert environment.command("--version").startswith("imagepivot ")
