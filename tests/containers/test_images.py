"""The images of docker/: what they hold, as whom they run, and the work that is done in them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from schemas.dataset import open_dataset
from schemas.output import LOCK_NAME
from schemas.validation import validate
from tests.containers.images import ROOT
from tests.integration.clusters import accepts, served
from tests.integration.processes import wait_for
from tests.integration.workload import commands, files, make_inputs
from tests.stores import free_port

pytestmark = [pytest.mark.containers, pytest.mark.slow, pytest.mark.timeout(1800)]

TARGETS = ("worker-cpu", "train", "launcher", "worker")
COMPILERS = "gcc g++ cc c++ cpp cc1 as ld make go rustc"
POOL = 50000  # The program of Beam's knows no other.


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Path:
    """A folder that containers of any user may write to, under the same path inside."""
    folder = tmp_path_factory.mktemp("shared")
    for path in (folder, *folder.parents[:2]):
        path.chmod(0o777)
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


def test_the_gpu_worker_has_cuda_and_the_weights(images, image):
    assert images.run(image("worker"), "python", "-c", "import torch; print(torch.version.cuda)").stdout != "None\n"
    assert images.run(image("worker"), "cat", "/opt/imagepivot/weights/model.pth", user="10001").stdout == "weights"
    assert images.run(image("worker-cpu"), "sh", "-c", "ls /opt/imagepivot").stdout.split() == ["torch.txt"]


def test_all_versions_are_those_of_the_lists(images, image):
    listed = {line for name in ("torch.txt", "requirements.txt") for line in (ROOT / "docker" / name).read_text().split()}
    frozen = images.run(image("worker-cpu"), "python", "-m", "pip", "list", "--format=freeze").stdout.split()
    others = {line for line in frozen if line.lower().replace("_", "-") not in {each.lower() for each in listed}}
    assert {line.partition("==")[0] for line in others} == {"imagepivot", "pip", "wheel"}


# --- what is done in them ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo(images, image, shared) -> Path:
    """The demo, run in `worker-cpu` as its own user."""
    images.run(image("worker-cpu"), "imagepivot", "demo", f"{shared}/demo", volumes={shared: str(shared)})
    return shared / "demo"


def test_the_demo_runs(demo):
    for name in ("captions", "vocabulary", "encoded", "features"):
        assert validate(str(demo / name)) == []
    assert open_dataset(demo / "features").manifest.rows == 300


def test_training_runs_and_is_evaluated(demo, images, image, shared):
    (shared / "toy.toml").write_text('extends = "kadar2018/bilingual-c2c"\n')
    data = ("--captions", f"{demo}/encoded", "--features", f"{demo}/features")
    short = ("--set", "schedule.epochs=1", "--vocabulary", f"{demo}/vocabulary")
    train = ("imagepivot", "train", f"{shared}/toy.toml", f"{shared}/run", *data, *short)
    images.run(image("train"), *train, volumes={shared: str(shared)})
    assert (shared / "run" / "best.pt").exists()
    scores = images.run(image("train"), "imagepivot", "evaluate", f"{shared}/run", *data, volumes={shared: str(shared)}).stdout
    assert "R@1" in scores


@pytest.mark.parametrize("target", ["worker-cpu", "worker"])
def test_a_worker_serves_a_job_from_outside(target, images, image, shared, imagepivot):
    """The pool runs without being root; the job brings its package, which boot installs beside the image's; equal bytes."""
    folder = shared / f"job-{target}"
    (folder / "there").mkdir(parents=True)
    make_inputs(folder / "there")
    shutil.copytree(folder / "there", folder / "here")
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o777)
    wanted = [commands("--shared-disk", at=f"{folder}/there/")[index] for index in (1, 3, 5)]
    jobs = free_port()
    service = ("-m", "apache_beam.runners.portability.local_job_service_main", f"--port={jobs}")
    flags = ("--runner=PortableRunner", f"--job_endpoint=localhost:{jobs}", "--environment_type=EXTERNAL")
    volumes = {shared: str(shared)}
    with images.running(image(target), "--worker_pool", log=folder / "pool", user="10001", volumes=volumes) as pool:
        wait_for(lambda: accepts(POOL) or pool.poll() is not None)
        with served(*service, port=jobs, folder=folder / "service"):
            for words in wanted:
                code = 3 if words[0] == "features" else 0  # A photo is broken.
                imagepivot(*words, "--", *flags, f"--environment_config=localhost:{POOL}", code=code)
    for words in [commands("--workers", "1", at=f"{folder}/here/")[index] for index in (1, 3, 5)]:
        imagepivot(*words, code=3 if words[0] == "features" else 0)
    there, here = (
        {name: data for name, data in files(folder / place).items() if LOCK_NAME not in name} for place in ("there", "here")
    )
    assert {name for name in there if "parquet" in name} == {name for name in here if "parquet" in name}
    assert {name: data for name, data in there.items() if name.endswith(".parquet")} == {
        name: data for name, data in here.items() if name.endswith(".parquet")
    }
