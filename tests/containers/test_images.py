"""The images of docker/: what they hold, as whom they run, and the work that is done in them."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from schemas.dataset import open_dataset
from schemas.validation import validate
from tests.containers.images import ROOT
from tests.containers.page import line_of
from tests.integration.clusters import accepts, served
from tests.integration.processes import wait_for
from tests.integration.workload import MODEL, commands, files, make_inputs
from tests.stores import free_port

yaml = pytest.importorskip("yaml", reason="the extra dev installs it")

pytestmark = [pytest.mark.containers, pytest.mark.slow, pytest.mark.timeout(5400)]  # Builds included.

TARGETS = ("worker-cpu", "train", "launcher", "worker")
COMPILERS = "gcc g++ cc c++ cpp cc1 as ld make go rustc"
POOL = 50000  # The program of Beam's knows no other.
NO_INDEX = ("--env", "PIP_INDEX_URL=http://localhost:9/")  # Where nothing listens.


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Path:
    """A folder that containers of any user may write to, under the same path inside."""
    folder = tmp_path_factory.mktemp("shared")
    folder.chmod(0o777)
    return folder


# --- what they hold ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", TARGETS)
def test_the_command_and_no_compiler(target, images, image):
    said = images.run(image(target), "imagepivot", "--version").stdout
    assert said == "imagepivot 0.1.0\n"
    found = images.run(image(target), "sh", "-c", f"for name in {COMPILERS}; do command -v $name; done; true").stdout
    assert found == ""


@pytest.mark.parametrize(("target", "user"), [("worker-cpu", "10001"), ("train", "10001"), ("launcher", "0"), ("worker", "0")])
def test_the_user(target, user, images, image):
    assert images.run(image(target), "id", "-u").stdout == f"{user}\n"
    assert images.run(image(target), "id", "-u", user="10001").stdout == "10001\n"


@pytest.mark.parametrize("target", TARGETS)
def test_health(target, images, image):
    assert images.config(image(target))["Healthcheck"]["Test"] == ["CMD", "imagepivot", "doctor"]
    images.run(image(target), "imagepivot", "doctor")


def test_entrypoints(images, image):
    assert {target: images.config(image(target))["Entrypoint"] for target in TARGETS} == {
        "worker-cpu": ["/opt/apache/beam/boot"],
        "train": ["imagepivot"],
        "launcher": ["/opt/google/dataflow/python_template_launcher"],
        "worker": ["/opt/apache/beam/boot"],
    }


def test_training_needs_neither_beam_nor_extractors(images, image):
    names = ("apache_beam", "timm", "sacremoses")
    look = f"import importlib.util, torch; print([name for name in {names} if importlib.util.find_spec(name)])"
    assert images.run(image("train"), "python", "-c", look).stdout == "[]\n"


def test_the_gpu_worker_has_cuda(images, image):
    assert images.run(image("worker"), "python", "-c", "import torch; print(torch.version.cuda)").stdout != "None\n"


@pytest.mark.parametrize("target", ["worker-cpu", "launcher", "worker"])
def test_weights_are_baked_in_for_any_user(target, images, image):
    digest = hashlib.sha256((images.folder / "weights" / "w.pth").read_bytes()).hexdigest()
    words = ("sha256sum", "/opt/imagepivot/weights/w.pth")
    assert images.run(image(target), *words, user="10001").stdout.split() == [digest, words[1]]


def test_all_versions_are_those_of_the_lists(images, image):
    listed = {line for name in ("torch.txt", "requirements.txt") for line in (ROOT / "docker" / name).read_text().split()}
    frozen = images.run(image("worker-cpu"), "python", "-m", "pip", "list", "--format=freeze").stdout.split()
    pinned, there = (dict(line.split("==") for line in lines) for lines in (listed, frozen))
    pinned = {canonicalize_name(name): version for name, version in pinned.items()}
    others = {name for name, version in there.items() if pinned.get(canonicalize_name(name)) != version}
    assert others == {"imagepivot", "pip", "wheel"}


# --- what is done in them ----------------------------------------------------------------------------------------------


def multi30k(folder: Path) -> None:
    """Write a small Multi30K, as its authors lay it out."""
    task = folder / "multi30k" / "data" / "task2"
    for place in ("image_splits", "raw"):
        (task / place).mkdir(parents=True)
    for split in ("train", "val", "test_2016"):
        (task / f"image_splits/{split}_images.txt").write_text("".join(f"{split}-{number}.jpg\n" for number in range(4)))
        for language, number in itertools.product(("en", "de"), range(1, 6)):
            (task / f"raw/{split}.{number}.{language}.gz").write_bytes(gzip.compress(b"a dog runs through the snow\n" * 4))


def shards(folder: Path) -> dict[str, bytes]:
    return {name: data for name, data in files(folder).items() if name.endswith(".parquet")}


def opened(folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o777)


@pytest.fixture(scope="module")
def demo(images, image, shared) -> Path:
    """The demo, run in `worker-cpu` as its own user."""
    images.run(image("worker-cpu"), "imagepivot", "demo", f"{shared}/demo", volumes={shared: str(shared)})
    return shared / "demo"


def test_the_demo_runs(demo):
    for name in ("captions", "vocabulary", "encoded", "features"):
        assert validate(str(demo / name)) == []
    assert open_dataset(demo / "features").manifest.rows == 300


def test_training_runs_and_is_evaluated(demo, images, image):
    """The page's line, a small model and two steps."""
    image("train")
    small = {"IMAGEPIVOT_TRAIN_SET": "model.embedding=8 model.words=8 schedule.max_steps=2 schedule.evaluate_every=1"}
    words = line_of("docker run", having="/train:", PWD=str(demo))
    images.docker(*words, environment=small)
    assert (demo / "runs" / "c2c" / "best.pt").exists()
    start, data = words[: words.index("train")], words[words.index("--captions") : words.index("--vocabulary")]
    assert "R@1" in images.docker(*start, "evaluate", "/data/runs/c2c", *data, "--split", "test").stdout


def test_a_command_in_a_container_and_from_a_pool_of_containers(images, image, shared, imagepivot):
    """The page's lines, Beam's own job service in place of Flink's: both make the same bytes."""
    image("worker-cpu")
    alone, pooled = shared / "alone", shared / "pooled"
    for folder in (alone, pooled):
        multi30k(folder)
        opened(folder)
    images.docker(*line_of("docker run", having="/data/multi30k", PWD=str(alone)))
    here = {"PWD": str(pooled), "(id -u)": str(os.getuid())}
    with pool(images, line_of("docker run", having="--worker_pool", **here), pooled) as job_endpoint:
        (_, *words) = line_of("imagepivot captions", having="PortableRunner", PWD=str(pooled))
        imagepivot(*[word.replace("localhost:8099", job_endpoint) for word in words])
    assert len(shards(alone / "captions")) > 0
    assert shards(alone / "captions") == shards(pooled / "captions")
    assert open_dataset(alone / "captions").manifest.rows == 3 * 4 * 2 * 5


@contextmanager
def pool(images, words: list[str], folder: Path) -> Iterator[str]:
    """Run a pool of workers in a container, and Beam's job service; yield its address."""
    jobs = free_port()
    service = ("-m", "apache_beam.runners.portability.local_job_service_main", f"--port={jobs}")
    mask = os.umask(0)  # What the command makes can be written by any user.
    try:
        with images.docker_running(*words, log=folder / "pool") as process:
            wait_for(lambda: accepts(POOL) or process.poll() is not None)
            assert process.poll() is None, (folder / "pool").read_text()
            with served(*service, port=jobs, folder=folder / "service"):
                yield f"localhost:{jobs}"
    finally:
        os.umask(mask)


@pytest.mark.parametrize("target", ["worker-cpu", "worker"])
def test_a_worker_serves_a_job_from_outside(target, images, image, shared, imagepivot):
    """The pool is not root and reaches no index; the job brings its package, which boot installs for it alone; equal bytes."""
    folder = shared / f"job-{target}"
    (folder / "there").mkdir(parents=True)
    make_inputs(folder / "there")
    shutil.copytree(folder / "there", folder / "here")
    opened(folder)
    wanted = [commands("--shared-disk", at=f"{folder}/there/")[index] for index in (1, 3, 5)]
    run = ("docker", "run", "--rm", "--network", "host", "--user", "10001", "--volume", f"{shared}:{shared}", *NO_INDEX)
    with pool(images, [*run, image(target), "--worker_pool"], folder) as job_endpoint:
        flags = ("--runner=PortableRunner", f"--job_endpoint={job_endpoint}", "--environment_type=EXTERNAL")
        for words in wanted:
            code = 3 if words[0] == "features" else 0  # A photo is broken.
            imagepivot(*words, "--", *flags, f"--environment_config=localhost:{POOL}", code=code)
    for words in [commands("--workers", "1", at=f"{folder}/here/")[index] for index in (1, 3, 5)]:
        imagepivot(*words, code=3 if words[0] == "features" else 0)
    assert len(shards(folder / "here")) > 0
    assert shards(folder / "there") == shards(folder / "here")


def test_the_array_job_of_the_manifests(images, image, shared):
    """Two tasks with the weights that are baked in, and the commit, as the user that the manifests name."""
    folder = shared / "array"
    folder.mkdir()
    make_inputs(folder)
    opened(folder)
    settings = {"IMAGEPIVOT_FEATURES_EXTRACTOR": MODEL, "IMAGEPIVOT_FEATURES_WEIGHTS": "/opt/imagepivot/weights/w.pth"}
    for name, tasks in (("features", (0, 1)), ("commit", (0,))):
        spec = yaml.safe_load((ROOT / "docker" / "kubernetes" / f"{name}.yaml").read_text())["spec"]["template"]["spec"]
        (container,) = spec["containers"]
        target = container["image"].rpartition("/")[2].partition(":")[0]
        for task in tasks:
            images.run(
                image(target),
                *[word.replace("/64", "/2") for word in (*container["command"], *container.get("args", ()))],
                user=str(spec["securityContext"]["runAsUser"]),
                volumes={folder: container["volumeMounts"][0]["mountPath"]},
                environment={**settings, "JOB_COMPLETION_INDEX": str(task)},
                code=0 if name == "commit" else (0, 3),  # A photo is broken, which the commit allows.
            )
    assert validate(str(folder / "features")) == []
    assert open_dataset(folder / "features").manifest.rows == 5
