"""The commands on another runner: Beam's job service and a pool of workers, each a process with a folder of its own.

The workers' folder holds a package ``schemas`` and a module ``train`` that are not ours, and has a temporary folder of its own.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from PIL import Image

from schemas.dataset import open_dataset
from tests.integration.processes import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

MODEL = "timm:test_resnet.r160_in1k"


@dataclass(frozen=True)
class Cluster:
    """A runner whose workers are in a folder of their own.

    Attributes:
        folder: the workers' folder.
        flags: Beam's flags that choose it.
    """

    folder: Path
    flags: tuple[str, ...]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def served(module: str, *arguments: str, port: int, folder: Path, python: str = sys.executable) -> Iterator[None]:
    """Run one of Beam's services, in a folder with foreign modules and a temporary folder of its own."""
    (folder / "schemas").mkdir(parents=True)
    for name in ("schemas/__init__.py", "train.py"):
        (folder / name).write_text("raise RuntimeError('this is not ours')\n")
    (folder / "tmp").mkdir()
    environment = {**os.environ, "TMPDIR": str(folder / "tmp"), "PATH": f"{Path(python).parent}:{os.environ['PATH']}"}
    with (folder / "log").open("w") as log:
        command = [python, "-m", f"apache_beam.runners.{module}", *arguments]
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
    try:
        wait_for(lambda: accepts(port) or process.poll() is not None)
        assert process.poll() is None, (folder / "log").read_text()
        yield
    finally:
        process.terminate()
        process.wait(timeout=60)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    root, jobs, workers = tmp_path_factory.mktemp("cluster"), free_port(), free_port()
    service = served("portability.local_job_service_main", f"--port={jobs}", port=jobs, folder=root / "service")
    pool = served("worker.worker_pool_main", f"--service_port={workers}", port=workers, folder=root / "workers")
    with service, pool:
        yield Cluster(
            root / "workers",
            (
                "--runner=PortableRunner",
                f"--job_endpoint=localhost:{jobs}",
                "--environment_type=EXTERNAL",
                f"--environment_config=localhost:{workers}",
            ),
        )


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """A folder with captions, photos, and weights of a small model."""
    import timm
    import torch

    folder = tmp_path_factory.mktemp("inputs")
    rows = [f"i{number}\t{language}\tThe Dog of Anna runs {number}" for number in range(20) for language in ("en", "de")]
    (folder / "captions.tsv").write_text("\n".join(["image_id\tlanguage\ttext", *rows]) + "\n")
    (folder / "photos").mkdir()
    for number in range(5):
        Image.new("RGB", (60 + number, 50), (200, 30 * number, 20)).save(folder / "photos" / f"i{number}.png")
    (folder / "photos" / "broken.jpg").write_bytes(b"no image")
    torch.save(timm.create_model("test_resnet.r160_in1k", num_classes=0).state_dict(), folder / "w.pth")
    return folder


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def commands(*options: str) -> list[tuple[str, ...]]:
    """Every command that runs pipelines, with relative arguments."""
    captions = ("captions", "captions.tsv", "--format", "table", "--shards", "2", *options)
    return [
        (*captions[:2], "plain", *captions[2:]),
        (*captions[:2], "true", *captions[2:], "--recipe", "moses-truecase"),
        (*captions[:2], "given", *captions[2:], "--recipe", "moses-truecase", "--truecaser", "true"),
        ("vocabulary", "true", "vocabulary", "--min-count", "1", *options),
        ("encode", "true", "vocabulary", "encoded", *options),
        ("features", "photos", "features", "--extractor", MODEL, "--weights", "w.pth", "--shards", "2", *options),
    ]


def test_relative_arguments_give_the_bytes_of_a_local_run(cluster, inputs, imagepivot, tmp_path):
    here, there = shutil.copytree(inputs, tmp_path / "here"), shutil.copytree(inputs, tmp_path / "there")
    before = sorted(cluster.folder.rglob("*.parquet"))
    for local, remote in zip(commands("--workers", "1"), commands("--shared-disk"), strict=True):
        code = 3 if "features" in local else 0
        imagepivot(*local, cwd=here, code=code)
        done = imagepivot(*remote, "--", *cluster.flags, cwd=there, code=code)
        assert "Traceback" not in done.stderr
    assert files(there) == files(here)
    assert open_dataset(there / "features").manifest.rows == 5
    assert sorted(cluster.folder.rglob("*.parquet")) == before == []


def test_local_paths_are_refused_before_anything_starts(inputs, imagepivot, tmp_path):
    """No job service is needed to say so."""
    folder = shutil.copytree(inputs, tmp_path / "inputs")
    before = files(folder)
    for name, arguments in {"SOURCE 'captions.tsv'": commands()[0], "IMAGES 'photos'": commands()[-1]}.items():
        for runner in ("PortableRunner", "FlinkRunner", "DataflowRunner"):
            done = imagepivot(*arguments, "--", f"--runner={runner}", "--job_endpoint=localhost:1", cwd=folder, code=2)
            assert f"the workers of {runner} run on others" in done.stderr
            assert name.partition(" ")[0] in done.stderr
    assert files(folder) == before
