"""The wheel in empty environments outside the checkout, at the lowest and newest dependencies of its Python versions.

Needs a package index. A Python version that uv does not find here is skipped. With EXTRAS=1 the extras are installed, too (7 GB).
"""

import json
import os
import shutil
import subprocess
import tarfile
import zipfile

import pytest

from tests.packaging.environments import ROOT, Environment, find_python

pytestmark = [pytest.mark.packaging, pytest.mark.slow]

PACKAGES = {"schemas", "extractors", "pipelines", "train"}
ENVIRONMENTS = [(version, resolution) for version in ("3.11", "3.12", "3.13") for resolution in ("lowest", "highest")]
USER = """
from pathlib import Path

import imagepivot


def shape(folder: Path) -> list[int]:
    dataset = imagepivot.open_dataset(folder, kind="features")
    spec: imagepivot.FeatureSpec | None = dataset.spec
    return [] if spec is None else list(spec.shape)


run: imagepivot.Run = imagepivot.open_run("run")
hits: list[imagepivot.Hit] = imagepivot.search(run.folder.location, "a dog", features="features")
print(shape(Path("features")), imagepivot.shard_of("a", 4) + 1)
"""
WRONG = """
import imagepivot

dataset = imagepivot.open_dataset(1)
imagepivot.shard_of("a", "4")
imagepivot.open_datasets("a")
dataset.num_shards + "a"
run: imagepivot.Score = imagepivot.open_run("run")
"""
READ = """
import sys
import imagepivot
assert not {"torch", "apache_beam"} & sys.modules.keys()
features = imagepivot.open_dataset("features")
print(features.kind, features.numpy().shape, len(imagepivot.open_dataset("captions").rows("image-00")))
assert not {"torch", "apache_beam"} & sys.modules.keys()
"""
# Command lines that are complete, and the extra that each needs first.
NEEDS = {
    "captions captions.tsv out --format table": "text",
    "vocabulary truecased out --min-count 1": "text",
    "encode captions vocabulary out": "text",
    "text-features captions out --model bert-base-uncased": "bert",
    "features images out --weights random:0": "pipelines",
    "text-features captions out --model open_clip:ViT-B-32": "clip",
    "extractors": "extractors",
    "view features images --image a --output out": "all",
    "demo out": "all",
    "build multi30k --output out": "text",
    "import features.npy out --name a --ids ids.txt": "text",
    "train demo run --captions encoded --features features --vocabulary vocabulary": "train",
    "evaluate run --captions encoded --features features": "train",
    "compare run run": "train",
    "embed run out --captions encoded": "train",
    "search run word --language en --features features": "train",
    "sts run pairs.txt": "train",
    "reproduce kadar2018 out --captions encoded --features features --vocabulary vocabulary": "train",
    "figures run out --captions encoded --features features": "figures",
    "duplicates features": "duplicates",
    "report features": "all",
}
BARE = {"inspect", "validate", "doctor", "publish", "diff", "export", "word-vectors"}


@pytest.fixture(scope="session", params=ENVIRONMENTS, ids="-".join)
def environment(request, dist, tmp_path_factory):
    """Environment with the bare wheel, and a folder outside the checkout with datasets of format 2."""
    version, resolution = request.param
    folder = tmp_path_factory.mktemp(f"{version}-{resolution}")
    environment = Environment(folder, find_python(version))
    environment.pip("install", dist.wheel, "--resolution", resolution, "--only-binary", ":all:")
    zipfile.ZipFile(ROOT / "tests/schemas/formats/format-2.zip").extractall(folder)
    return environment


def test_distributions_hold_the_packages_alone(dist):
    names = zipfile.ZipFile(dist.wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert tops - {top for top in tops if top.endswith(".dist-info")} == {*PACKAGES, "imagepivot.py", "imagepivot-stubs"}
    assert {f"{package}/py.typed" for package in PACKAGES} < set(names)
    tutorial = [name.removeprefix("pipelines/demo/tutorial/") for name in names if name.startswith("pipelines/demo/tutorial/")]
    assert {"captions.csv", "photos.toml", "photos/coffee.jpg"} < set(tutorial)
    assert len(tutorial) == 14
    with zipfile.ZipFile(dist.wheel) as wheel:
        assert wheel.read("imagepivot-stubs/__init__.pyi") == (ROOT / "imagepivot.py").read_bytes()
    with tarfile.open(dist.sdist) as archive:
        members = {name.partition("/")[2].partition("/")[0] for name in archive.getnames()}
    usual = {"", "PKG-INFO", "README.md", "LICENSE", "pyproject.toml", "setup.cfg", "MANIFEST.in"}
    usual |= {"CHANGELOG.md", "constraints.txt", "imagepivot.egg-info"}
    assert members - usual == {*PACKAGES, "imagepivot.py", "imagepivot-stubs"}


def test_bare_wheel_reads_inspects_and_validates(environment):
    assert environment(environment.python, "-c", READ) == "features (12, 8) 4\n"
    for name in sorted(path.name for path in environment.folder.iterdir() if path.name != "venv"):
        assert "is valid" in environment.command("validate", name)
        report = json.loads(environment.command("inspect", name, "--json"))
        assert report["rows"] > 0


def test_commands_without_their_extra_name_the_line_to_install_it(environment):
    for name in ("captions.tsv", "features.npy", "ids.txt", "pairs.txt", "vectors.vec"):
        (environment.folder / name).write_bytes(b"a 0.5 1.5\n")
    (environment.folder / "images").mkdir(exist_ok=True)
    (environment.folder / "run").mkdir(exist_ok=True)
    from pipelines.commands.app import _PANELS

    names = {command.name for panel in _PANELS.values() for command in panel}
    assert names == {line.partition(" ")[0] for line in NEEDS} | BARE
    environment.command("word-vectors", "vocabulary", "vectors.vec", "out", "--languages", "en")
    for line, extra in NEEDS.items():
        shutil.rmtree(environment.folder / "out", ignore_errors=True)
        output = environment.command(*line.split(), code=2 if line.startswith(("text-features", "extractors")) else 1)
        assert f"which is not installed: pip install 'imagepivot[{extra}]'" in output, line


def test_extra_text_makes_a_vocabulary_without_torch(dist, tmp_path):
    environment = Environment(tmp_path)
    environment.pip("install", f"{dist.wheel}[text]")
    (tmp_path / "captions.csv").write_text("image_id,text,language,split\n1,A dog runs .,en,train\n", encoding="utf-8")
    environment.command("captions", "captions.csv", "captions", "--format", "table")
    environment.command("vocabulary", "captions", "vocabulary", "--min-count", "1", "--workers", "2")
    environment.command("encode", "captions", "vocabulary", "encoded")
    report = json.loads(environment.command("inspect", "encoded", "--json"))
    assert report["statistics"]["unknown_tokens"] == 0
    assert environment(environment.python, "-c", "import importlib.util as u; print(u.find_spec('torch'))") == "None\n"
    mebibytes = sum(path.stat().st_size for path in (tmp_path / "venv").rglob("*") if not path.is_symlink()) / 2**20
    assert mebibytes < 600


def test_type_checkers_accept_a_right_script_and_reject_a_wrong_one(dist, tmp_path):
    environment = Environment(tmp_path)
    environment.pip("install", dist.wheel, "mypy", "basedpyright")
    python = environment.python
    (tmp_path / "user.py").write_text(USER, encoding="utf-8")
    (tmp_path / "wrong.py").write_text(WRONG, encoding="utf-8")
    checkers = {
        "mypy": (python, "-m", "mypy", "--strict", "--cache-dir", tmp_path / "cache"),
        "pyright": (python.with_name("basedpyright"), "--level", "error", "--pythonpath", python),
    }
    for words in checkers.values():
        subprocess.run([*words, "user.py"], cwd=tmp_path, check=True)
        done = subprocess.run([*words, "wrong.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        errors = [line for line in done.stdout.splitlines() if "error" in line and "wrong.py:" in line]
        assert [line.partition("wrong.py:")[2].partition(":")[0] for line in errors] == ["4", "5", "6", "7", "8"]


@pytest.mark.skipif("EXTRAS" not in os.environ, reason="installs 7 GB: set EXTRAS=1")
def test_walkthrough_of_the_readme_runs_with_all_extras(dist, tmp_path):
    environment = Environment(tmp_path)
    environment.pip("install", f"{dist.wheel}[all]")
    output = environment.command("demo", "build/demo")
    assert "one query in each language" in output
    environment(
        environment.python, "-c", "import imagepivot; print(imagepivot.open_dataset('build/demo/features').numpy().shape)"
    )
