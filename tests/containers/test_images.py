"""The images of docker/: what they hold, as whom they run, and the work that is done in them."""

import hashlib
import os
import shutil
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from schemas.dataset import open_dataset
from schemas.writing.validation import validate
from tests.containers.images import ROOT
from tests.containers.page import line_of
from tests.containers.work import POOL, multi30k, opened, pool, shards
from tests.integration.workload import commands, make_inputs

pytestmark = [pytest.mark.containers, pytest.mark.slow, pytest.mark.timeout(5400)]  # Builds included.

TARGETS = ("worker-cpu", "train", "launcher", "worker")
COMPILERS = "gcc g++ cc c++ cpp cc1 as ld make go rustc"
NO_INDEX = ("--env", "PIP_INDEX_URL=http://localhost:9/")  # Where nothing listens.


# --- what they hold ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", TARGETS)
def test_command_and_no_compiler(target, images, image):
    said = images.run(image(target), "imagepivot", "--version").stdout
    assert said == "imagepivot 0.2.0\n"
    found = images.run(image(target), "sh", "-c", f"for name in {COMPILERS}; do command -v $name; done; true").stdout
    assert found == ""


@pytest.mark.parametrize(
    ("target", "user"), [("worker-cpu", "10001"), ("train", "10001"), ("launcher", "0"), ("worker", "10001")]
)
def test_user(target, user, images, image):
    assert images.run(image(target), "id", "-u").stdout == f"{user}\n"
    assert images.run(image(target), "id", "-u", user="10001").stdout == "10001\n"


def test_user_for_dataflow(images, image):
    image("worker-cpu")
    script, target, _ = line_of("docker/build.sh worker-cpu ")
    given = ("--build-arg", "RUN_AS=0", "--build-context", f"weights={images.folder / 'weights'}")
    images.build(script, target, "localhost/for-dataflow", *given)
    assert images.run("localhost/for-dataflow", "id", "-u").stdout == "0\n"


@pytest.mark.parametrize("target", ["worker-cpu", "train", "worker"])
def test_commands_start_and_other_words_go_to_beam(target, images, image):
    image(target)
    run = ("docker", "run", "--rm", image(target))
    assert "imagepivot 0.2.0" in images.docker(*run, "bash", "-c", "exec imagepivot --version").stdout
    images.docker(*run, "imagepivot", "doctor")
    (start,) = images.config(image(target))["Entrypoint"]
    done = images.run(image(target), start, "--unknown", code={1, 2})
    assert ("no worker of Beam" if target == "train" else "flag provided but not defined") in done.stderr


def test_training_needs_neither_beam_nor_extractors(images, image):
    names = ("apache_beam", "timm", "sacremoses")
    look = f"import importlib.util, torch; print([name for name in {names} if importlib.util.find_spec(name)])"
    assert images.run(image("train"), "python", "-c", look).stdout == "[]\n"


def test_gpu_worker_has_cuda(images, image):
    assert images.run(image("worker"), "python", "-c", "import torch; print(torch.version.cuda)").stdout != "None\n"


@pytest.mark.parametrize("target", ["worker-cpu", "launcher", "worker"])
def test_weights_are_baked_in_for_any_user(target, images, image):
    digest = hashlib.sha256((images.folder / "weights" / "w.pth").read_bytes()).hexdigest()
    words = ("sha256sum", "/opt/imagepivot/weights/w.pth")
    assert images.run(image(target), *words, user="10001").stdout.split() == [digest, words[1]]


def test_all_versions_are_those_of_the_lists(images, image):
    listed = {line for name in ("torch.txt", "requirements.txt") for line in (ROOT / "docker" / name).read_text().split()}
    frozen = images.run(image("worker-cpu"), "python", "-m", "pip", "list", "--format=freeze").stdout.split()
    pinned, there = (dict(word.split("==") for word in words if "==" in word) for words in (listed, frozen))
    pinned = {canonicalize_name(name): version for name, version in pinned.items()}
    others = {name for name, version in there.items() if pinned.get(canonicalize_name(name)) != version}
    assert others == {"imagepivot", "pip", "wheel"}


# --- what is done in them ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo(images, image, shared) -> Path:
    """The demo, run in `worker-cpu` as its own user."""
    images.run(image("worker-cpu"), "imagepivot", "demo", f"{shared}/demo", volumes={shared: str(shared)})
    return shared / "demo"


def test_demo_runs(demo):
    for name in ("captions", "vocabulary", "encoded", "features"):
        assert validate(str(demo / name)) == []
    assert open_dataset(demo / "features").manifest.rows == 300


def test_training_runs_and_is_evaluated(demo, images, image):
    image("train")
    small = {"IMAGEPIVOT_TRAIN_SET": "model.embed_dim=8 model.word_dim=8 schedule.max_steps=2 schedule.eval_every_steps=1"}
    words = line_of("docker run", having="/train:", PWD=str(demo))
    images.docker(*words, environment=small)
    assert (demo / "runs" / "c2c" / "best.pt").exists()
    start, data = words[: words.index("imagepivot")], words[words.index("--captions") : words.index("--vocabulary")]
    assert "R@1" in images.docker(*start, "imagepivot", "evaluate", "/data/runs/c2c", *data, "--splits", "test").stdout


def test_command_in_a_container_and_from_a_pool_of_containers(images, image, shared, imagepivot):
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


@pytest.mark.parametrize("target", ["worker-cpu", "worker"])
def test_worker_serves_a_job_from_outside(target, images, image, shared, imagepivot):
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
