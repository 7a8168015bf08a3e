"""The Flex Template from its metadata to a finished dataset: gcloud, the launcher image, and the stand-in for Dataflow."""

import io
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from PIL import Image

from schemas.dataset import open_dataset
from schemas.storage.folder import Folder
from schemas.writing.validation import validate
from tests.containers.images import ROOT
from tests.containers.page import line_of
from tests.integration.clusters import served
from tests.integration.processes import wait_for
from tests.integration.workload import MODEL
from tests.stores import emulator, free_port, use

pytestmark = [
    pytest.mark.containers,
    pytest.mark.slow,
    pytest.mark.timeout(5400),  # Builds included.
    pytest.mark.skipif(shutil.which("gcloud") is None, reason="gcloud is not installed"),
]


@pytest.fixture(scope="module")
def gcloud(images, image, tmp_path_factory) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """Run gcloud as the page has it, whose services are the stand-ins; the template is built, and lies in the store."""
    root = tmp_path_factory.mktemp("flex")
    with emulator("gs") as store, pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        use(store.environment, patch)
        containers = {}
        # Workers on Dataflow are root: the page says to build the image so.
        for name, start in ((image("launcher"), images.config(image("launcher"))["Entrypoint"]), (image("worker-cpu"), ())):
            container = stack.enter_context(images.container(name))
            containers[name] = images.command(container, start, user="0", environment=store.environment)
        (root / "containers.json").write_text(json.dumps(containers))
        port = free_port()
        arguments = ("-m", "tests.containers.flex_service", str(port), str(root / "workers"), str(root / "containers.json"))
        stack.enter_context(served(*arguments, port=port, folder=root / "service", PYTHONPATH=str(ROOT)))
        settings = {
            "CLOUDSDK_AUTH_DISABLE_CREDENTIALS": "true",
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_DATAFLOW": f"http://localhost:{port}/",
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_STORAGE": f"http://localhost:{port}/storage/v1/",
            "CLOUDSDK_CONFIG": str(root / "gcloud"),
            "CLOUDSDK_CORE_PROJECT": "my-project",
            "CLOUDSDK_CORE_DISABLE_PROMPTS": "true",
        }

        def run(*words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
            done = subprocess.run(words, cwd=ROOT, env={**os.environ, **settings}, capture_output=True, text=True, check=False)
            logs = "".join(path.read_text() for path in root.glob("workers/*.log"))
            assert done.returncode == code, f"{done.stdout}\n{done.stderr}\n{logs[-4000:]}"
            return done

        run(*line_of("gcloud dataflow flex-template build"))
        yield run


def test_template_is_the_metadata_and_the_image(gcloud, image):
    spec = json.loads(Folder("gs://bucket/templates").read("imagepivot.json"))
    assert spec["image"] == image("launcher")
    assert spec["metadata"] == json.loads((ROOT / "docker" / "metadata.json").read_text())
    assert spec["sdkInfo"] == {"language": "PYTHON"}


def launch(gcloud: Callable[..., subprocess.CompletedProcess[str]], **changed: str) -> str:
    """Launch as the page does, with other parameters if there are any; return the state in which the job ends."""
    words = line_of("gcloud dataflow flex-template run")
    if changed:
        words[-1] = "--parameters=" + ",".join(f"{name}={value}" for name, value in changed.items())
    answer = gcloud(*words, "--format=value(job.id)").stdout.strip()
    watch = [answer if word == "JOB_ID" else word for word in line_of("gcloud dataflow jobs describe")]
    return wait_for(lambda: (said := gcloud(*watch).stdout.strip()) != "JOB_STATE_RUNNING" and said, seconds=600)


def test_launch_makes_the_dataset(gcloud):
    rows = [f"i{number}\t{language}\tThe Dog of Anna runs {number}" for number in range(20) for language in ("en", "de")]
    Folder("gs://bucket").put("captions.tsv", "\n".join(["image_id\tlanguage\ttext", *rows, ""]).encode())
    assert launch(gcloud) == "JOB_STATE_DONE"
    assert validate("gs://bucket/captions") == []
    assert open_dataset("gs://bucket/captions").manifest.rows == 40


def test_launch_uses_weights_of_the_image(gcloud, image):
    for number in range(5):
        photo = io.BytesIO()
        Image.new("RGB", (60 + number, 50), (200, 30 * number, 20)).save(photo, "PNG")
        Folder("gs://bucket/photos").put(f"i{number}.png", photo.getvalue())
    places = {"command": "features", "images": "gs://bucket/photos", "output": "gs://bucket/features"}
    weights = {"extractor": MODEL, "weights": "/opt/imagepivot/weights/w.pth", "shared_disk": "true", "shards": "2"}
    assert launch(gcloud, **places, **weights, sdk_container_image=image("worker-cpu")) == "JOB_STATE_DONE"
    assert validate("gs://bucket/features") == []
    assert open_dataset("gs://bucket/features").manifest.rows == 5


def test_wrong_parameter_is_refused_before_anything_starts(gcloud):
    words = [word.replace("command=captions", "command=train") for word in line_of("gcloud dataflow flex-template run")]
    assert "Invalid value for parameter command: train" in gcloud(*words, code=1).stderr
