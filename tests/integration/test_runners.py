"""The same command gives the same bytes on every runner, whose services and workers are processes of their own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas.dataset import open_dataset
from schemas.storage import Folder
from schemas.summary import SUMMARY_NAME
from schemas.validation import validate
from tests.integration import clusters
from tests.integration.workload import OUTPUTS, commands, files, make_inputs

for package, name in (("gcp_storage_emulator", "gcp-storage-emulator"), ("distributed", "dask distributed"), ("timm", "timm")):
    pytest.importorskip(package, reason=f"pip install {name}")

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(300)]

STORE = "gs://bucket/"
FAILED = 3  # A photo is broken.


def code_of(command: tuple[str, ...]) -> int:
    return FAILED if command[0] == "features" else 0


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def local(inputs, imagepivot, tmp_path_factory) -> dict[str, bytes]:
    """The truth: all files after local runs of the commands, with what they read."""
    folder = shutil.copytree(inputs, tmp_path_factory.mktemp("local") / "here")
    for command in commands("--workers", "1"):
        imagepivot(*command, cwd=folder, code=code_of(command))
    assert open_dataset(folder / "features").manifest.rows == 5
    return files(folder)


@pytest.fixture(scope="module")
def dataflow(tmp_path_factory) -> Iterator[clusters.Cluster]:
    with clusters.dataflow(tmp_path_factory.mktemp("dataflow")) as cluster:
        yield cluster


@pytest.mark.parametrize("kind", ["job_service", "dask"])
def test_relative_arguments_on_a_shared_disk(kind, inputs, local, imagepivot, tmp_path):
    folder = shutil.copytree(inputs, tmp_path / "there")
    with getattr(clusters, kind)(tmp_path / "cluster") as cluster:
        for command in commands("--shared-disk"):
            done = imagepivot(*command, "--", *cluster.flags, cwd=folder, code=code_of(command))
            assert "Traceback" not in done.stderr
    assert files(folder) == local
    assert not list(cluster.folder.rglob("*.parquet"))


def test_addresses_on_dataflow(dataflow, inputs, local, imagepivot):
    for name, data in files(inputs).items():
        Folder(STORE).write(name, data)
    for command in commands(at=STORE):
        done = imagepivot(*command, "--", *dataflow.flags, code=code_of(command))
        assert "Traceback" not in done.stderr
    for output in OUTPUTS:
        folder = Folder(STORE + output)
        made = {f"{output}/{name}": folder.read(name) for name in folder.names()}
        assert made.pop(f"{output}/{SUMMARY_NAME}")
        assert made == {k: v for k, v in local.items() if k.startswith(f"{output}/") and not k.endswith(".lock")}
        assert validate(STORE + output) == []
