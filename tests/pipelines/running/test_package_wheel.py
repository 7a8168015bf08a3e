from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
from apache_beam.options.pipeline_options import PipelineOptions, SetupOptions

from pipelines.running.package_wheel import add_wheel, build_wheel, source_files

ROOT = Path(__file__).parents[3]


def staged(*flags: str, folder: Path) -> tuple[list[str], list[str]]:
    options = PipelineOptions(list(flags))
    add_wheel(options, folder, ("text",))
    setup = options.view_as(SetupOptions)
    return [Path(package).name for package in setup.extra_packages or ()], setup.beam_plugins


OURS = f"imagepivot-{version('imagepivot')}-py3-none-any.whl"


@pytest.mark.parametrize(
    ("flags", "packages", "plugins"),
    [
        ((), [OURS], ["imagepivot"]),
        (("--extra_package=/x/mine-1.whl", "--beam_plugin=mine"), ["mine-1.whl", OURS], ["imagepivot", "mine"]),
        (("--extra_package=/x/imagepivot-9-py3-none-any.whl",), ["imagepivot-9-py3-none-any.whl"], ["imagepivot"]),
        (("--environment_type=EXTERNAL", "--environment_config=host:1"), [OURS], ["imagepivot"]),
        (("--sdk_container_image=gcr.io/p/i",), [], ["imagepivot"]),
        (("--environment_config=my/image",), [], ["imagepivot"]),
        (("--environment_type=DOCKER", "--environment_options=docker_container_image=my/image"), [], ["imagepivot"]),
    ],
)
def test_staged_files_of_a_run(tmp_path, flags, packages, plugins):
    assert staged(*flags, folder=tmp_path) == (packages, plugins)


def test_wheel_holds_our_packages_and_nothing_else(tmp_path):
    names = zipfile.ZipFile(build_wheel(tmp_path, ())).namelist()
    tracked = subprocess.run(["git", "ls-files", "--others", "--cached", "--exclude-standard"], cwd=ROOT, capture_output=True)
    if tracked.returncode:
        pytest.skip("not a checkout of git")
    packages = ("schemas/", "extractors/", "pipelines/", "train/")
    ours = [name for name in tracked.stdout.decode().split() if name.startswith(packages)]
    information = f"imagepivot-{version('imagepivot')}.dist-info"
    described = [f"{information}/{name}" for name in ("METADATA", "WHEEL", "entry_points.txt", "RECORD")]
    assert sorted(names) == sorted(["imagepivot.py", *ours, *described])
    assert dict(source_files())["imagepivot.py"] == (ROOT / "imagepivot.py").read_bytes()


def test_equal_code_gives_equal_bytes(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert build_wheel(tmp_path / "a", ("text",)).read_bytes() == build_wheel(tmp_path / "b", ("text",)).read_bytes()


def requirements(folder: Path, *extras: str) -> dict[str, str]:
    wheel = zipfile.ZipFile(build_wheel(folder, extras))
    metadata = wheel.read(f"imagepivot-{version('imagepivot')}.dist-info/METADATA").decode()
    return dict(re.findall("^Requires-Dist: (.*)==(.*)$", metadata, re.MULTILINE))


def test_workers_get_installed_versions_of_needed_packages_only(tmp_path):
    text = requirements(tmp_path, "text")
    assert text["sacremoses"] == version("sacremoses")
    assert {"numpy", "pyarrow", "ijson"} <= text.keys()
    assert not {"torch", "timm", "apache-beam", "imagepivot", "pytest"} & text.keys()
    pytest.importorskip("timm", reason="needs timm: pip install 'imagepivot[timm]'")
    features = requirements(tmp_path, "text", "extractors", "timm")
    assert {"torch", "torchvision", "pillow", "safetensors", "timm"} <= features.keys()
    assert features["torch"] == version("torch").partition("+")[0]


@pytest.mark.cluster
def test_worker_with_the_wheel_alone_imports_our_packages(tmp_path):
    """In a folder where other modules have our names, as Beam's own worker starts there: with that folder first on its path."""
    wheel = build_wheel(tmp_path, ("text",))
    pip = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target"]
    subprocess.run([sys.executable, *pip, tmp_path / "installed", wheel], check=True)
    for name in ("schemas", "pipelines"):
        (tmp_path / "here" / name).mkdir(parents=True)
        (tmp_path / "here" / name / "__init__.py").write_text("raise RuntimeError('not ours')\n")
    (tmp_path / "here" / "train.py").write_text("raise RuntimeError('not ours')\n")
    # The finder of an editable install would find the checkout.
    code = (
        "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'ditable' not in repr(f)]\n"
        "from apache_beam.runners.worker.sdk_worker_main import create_harness\n"
        "create_harness({'PIPELINE_OPTIONS': '{\"beam_plugins\": [\"imagepivot\"]}', 'CONTROL_API_SERVICE_DESCRIPTOR': ''}, True)\n"
        "import pipelines.text.captions as c, schemas, train, imagepivot\n"
        "print(c.__file__, schemas.__file__, train.__file__, imagepivot.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path / "here",
        env={**os.environ, "PYTHONPATH": str(tmp_path / "installed")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = [Path(path).relative_to(tmp_path / "installed").parts[0] for path in done.stdout.split()]
    assert found == ["pipelines", "schemas", "train", "imagepivot.py"]
