"""The same command gives the same bytes on every runner, whose services and workers are processes of their own."""

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from schemas.storage.folder import Folder
from schemas.writing.file_names import LOCK_NAME
from schemas.writing.validation import validate
from tests.builders import stored, tree
from tests.integration import clusters
from tests.integration.workload import CODES, OUTPUTS, UNIQUE, commands, make_inputs, one_line, run_locally
from tests.stores import untagged

for package in ("distributed", "gcp_storage_emulator", "google.cloud.dataflow", "timm"):
    pytest.importorskip(package, reason="the extra dev installs it")

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

STORE = "gs://bucket/"
DIES_ONCE = """
import os
import signal

import imagepivot
from pipelines.features import shard_worker

write_feature_shard = shard_worker.write_feature_shard


def die_after_the_first(*arguments, **options):
    tally = write_feature_shard(*arguments, **options)
    try:
        os.close(os.open({mark!r}, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return tally
    os.kill(os.getpid(), signal.SIGKILL)


shard_worker.write_feature_shard = die_after_the_first
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def local(inputs, imagepivot, tmp_path_factory) -> dict[str, bytes]:
    return run_locally(imagepivot, inputs, tmp_path_factory.mktemp("local") / "here")


# --- the cluster of each kind, and the bytes of what it makes ----------------------------------------------------------


@pytest.fixture(scope="module")
def job_service(tmp_path_factory) -> Iterator[clusters.Cluster]:
    with clusters.job_service(tmp_path_factory.mktemp("jobs")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def dask(tmp_path_factory) -> Iterator[clusters.Cluster]:
    with clusters.dask(tmp_path_factory.mktemp("dask")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def dataflow(inputs, tmp_path_factory) -> Iterator[clusters.Cluster]:
    """The stand-in for Dataflow, and the inputs in its store."""
    with clusters.dataflow(tmp_path_factory.mktemp("dataflow")) as cluster:
        for name, data in tree(inputs).items():
            Folder(STORE).put(name, data)
        yield cluster


@pytest.fixture(scope="module")
def local_features(dataflow, imagepivot, tmp_path_factory) -> dict[str, bytes]:
    """Features of the images in the store by a local run: a record holds the times of change of what was read."""
    folder = tmp_path_factory.mktemp("features") / "features"
    command = [str(folder) if word == STORE + "features" else word for word in commands("--workers", "1", at=STORE)[-1]]
    imagepivot(*command, code=CODES[-1])
    return untagged(stored(folder))


@contextmanager
def image(cluster: clusters.Cluster, **special: object) -> Iterator[None]:
    """Let the machines of the stand-in have a special image."""
    path = cluster.folder / "image.json"
    path.write_text(json.dumps(special))
    try:
        yield
    finally:
        path.unlink()


# --- the same bytes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dask"])  # make cluster-test does it on the job services of Flink, Spark and Prism.
def test_relative_arguments_on_a_shared_disk(kind, request, inputs, local, imagepivot, tmp_path):
    cluster = request.getfixturevalue(kind)
    folder = shutil.copytree(inputs, tmp_path / "there")
    for command, output, code in zip(commands("--shared-disk"), OUTPUTS, CODES, strict=True):
        if output in UNIQUE:
            done = imagepivot(*command, "--", *cluster.flags, cwd=folder, code=code)
            assert "Traceback" not in done.stderr
    others = {*OUTPUTS}.difference(UNIQUE)
    assert tree(folder) == {path: data for path, data in local.items() if path.partition("/")[0] not in others}
    assert not list(cluster.folder.rglob("*.parquet"))


def test_addresses_on_dataflow(dataflow, local, local_features, imagepivot):
    """One process per core of a machine for captions, which is the service's default, and one in all for features."""
    for command, output, code in zip(commands(at=STORE), OUTPUTS, CODES, strict=True):
        if output not in UNIQUE:
            continue
        flags = ("--experiments=no_use_multiple_sdk_containers",) if command[0] == "features" else ()
        done = imagepivot(*command, "--", *dataflow.flags, *flags, code=code)
        assert "Traceback" not in done.stderr
    for output in UNIQUE[:-1]:
        expected = {name.partition("/")[2]: data for name, data in local.items() if name.startswith(f"{output}/")}
        assert untagged(stored(STORE + output)) == untagged(
            {name: data for name, data in expected.items() if name != LOCK_NAME}
        )
    assert untagged(stored(f"{STORE}features")) == local_features
    assert {name: local_features[name] for name in local_features if name.endswith(".parquet")} == {
        name.partition("/")[2]: local[name] for name in local if name.startswith("features/") and name.endswith(".parquet")
    }
    for output in UNIQUE:
        assert validate(STORE + output) == []


# --- what goes wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["job_service", "dask", "dataflow"])
def test_users_mistake_on_a_worker_is_one_line(kind, request, imagepivot, tmp_path):
    cluster = request.getfixturevalue(kind)
    root = f"{STORE}mistake/" if kind == "dataflow" else f"{tmp_path}/"
    Folder(root).put(
        "captions.tsv", b"image_id\tindex\ttext\n" + b"a\t0\tx\ne\t0\tx\n" * 2
    )  # Found in both shards, when they are sorted.
    done = imagepivot(*commands("--shared-disk", at=root)[0], "--", *cluster.flags, code=1)
    line = one_line(done)
    assert line.startswith("Error: ")
    assert re.search(r"caption key '[ae]/en/comparable/0' \(image_id/language/portion/index\) occurs twice", line)
    assert [name for name in Folder(f"{root}plain").names() if name != LOCK_NAME] == []


def test_worker_killed_during_features_ends_the_job_and_the_rerun_resumes(inputs, local, imagepivot, tmp_path):
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "sitecustomize.py").write_text(DIES_ONCE.format(mark=str(tmp_path / "died")))
    folder = shutil.copytree(inputs, tmp_path / "there")
    command = (*commands("--shared-disk")[-1], "--")
    with clusters.job_service(tmp_path / "cluster", PYTHONPATH=str(tmp_path / "modules")) as cluster:
        done = imagepivot(*command, *cluster.flags, cwd=folder, code=1)
        line = one_line(done)
        assert "a worker process ended unexpectedly, because it was killed or ran out of memory" in line
        (kept,) = (folder / "features").glob("part-*")
        written = kept.stat().st_mtime_ns
        imagepivot(*command, *cluster.flags, cwd=folder, code=CODES[-1])
    assert kept.stat().st_mtime_ns == written
    assert {k: v for k, v in tree(folder).items() if k.startswith("features/")} == {
        k: v for k, v in local.items() if k.startswith("features/")
    }


def test_dataflow_retries_the_bundle_of_a_killed_worker(dataflow, local_features, imagepivot, tmp_path):
    (tmp_path / "dies_once.py").write_text(DIES_ONCE.format(mark=str(tmp_path / "died")))
    location = f"{STORE}repeated"
    command = [location if word == f"{STORE}features" else word for word in commands(at=STORE)[-1]]
    with image(dataflow, path=str(tmp_path)):
        imagepivot(*command, "--", *dataflow.flags, "--beam_plugins=dies_once", code=CODES[-1])
    assert (tmp_path / "died").exists()
    assert untagged(stored(location)) == local_features
    assert validate(location) == []


def test_job_without_started_workers_is_cancelled(dataflow, imagepivot, tmp_path):
    (tmp_path / "sleeps.py").write_text("import time\ntime.sleep(300)\n")
    command = commands("--start-timeout", "5", at=STORE)[0]
    with image(dataflow, path=str(tmp_path)):
        words = [f"{STORE}never" if word == f"{STORE}plain" else word for word in command]
        done = imagepivot(*words, "--", *dataflow.flags, "--beam_plugins=sleeps", code=1)
    assert "DataflowRunner was asked to cancel job" in done.stderr
    assert "To cancel the job: gcloud dataflow jobs cancel " in done.stderr
    assert Folder(f"{STORE}never").names() == []
