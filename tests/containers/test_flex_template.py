"""The Flex Template from its metadata to a finished dataset: gcloud, the launcher image, and the stand-in for Dataflow."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator

import pytest

from schemas.dataset import open_dataset
from schemas.storage import Folder
from schemas.validation import validate
from tests.containers.images import ROOT
from tests.integration.clusters import served
from tests.integration.processes import wait_for
from tests.stores import emulator, free_port, use

pytestmark = [
    pytest.mark.containers,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(shutil.which("gcloud") is None, reason="gcloud is not installed"),
]

PAGE = (ROOT / "docs" / "containers.md").read_text()
TEMPLATE = "gs://bucket/templates/imagepivot.json"


def line_of(command: str) -> list[str]:
    """Return the words of the one line of the page that begins with a command."""
    (line,) = [line for line in PAGE.replace("\\\n", " ").splitlines() if line.startswith(command)]
    return shlex.split(line)


@pytest.fixture(scope="module")
def gcloud(images, image, tmp_path_factory) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """Run gcloud as the page has it, whose services are the stand-ins; the template lies in the store."""
    root = tmp_path_factory.mktemp("flex")
    with emulator("gs") as store, pytest.MonkeyPatch.context() as patch, images.container(image("launcher")) as container:
        use(store.environment, patch)
        port = free_port()
        entrypoint = tuple(images.config(image("launcher"))["Entrypoint"])
        launcher = images.command(container, entrypoint, environment=store.environment)
        arguments = ("-m", "tests.containers.flex_service", str(port), str(root / "workers"), *launcher)
        environment = {"BUILDAH_ISOLATION": images.environment["BUILDAH_ISOLATION"], "PYTHONPATH": str(ROOT)}
        with served(*arguments, port=port, folder=root / "service", **environment):
            settings = {
                "CLOUDSDK_AUTH_DISABLE_CREDENTIALS": "true",
                "CLOUDSDK_API_ENDPOINT_OVERRIDES_DATAFLOW": f"http://localhost:{port}/",
                "CLOUDSDK_CONFIG": str(root / "gcloud"),
                "CLOUDSDK_CORE_PROJECT": "my-project",
                "CLOUDSDK_CORE_DISABLE_PROMPTS": "true",
            }

            def run(*words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
                done = subprocess.run(
                    words, cwd=ROOT, env={**os.environ, **settings}, capture_output=True, text=True, check=False
                )
                assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
                return done

            spec = run(*line_of("gcloud dataflow flex-template build"), "--print-only").stdout
            Folder("gs://bucket/templates").write("imagepivot.json", spec.encode())
            yield run


def test_the_template_is_the_metadata_and_the_image(gcloud):
    spec = json.loads(Folder("gs://bucket/templates").read("imagepivot.json"))
    assert spec["metadata"] == json.loads((ROOT / "docker" / "metadata.json").read_text())
    assert spec["sdkInfo"] == {"language": "PYTHON"}


def test_a_launch_makes_the_dataset(gcloud):
    rows = [f"i{number}\t{language}\tThe Dog of Anna runs {number}" for number in range(20) for language in ("en", "de")]
    Folder("gs://bucket").write("captions.tsv", "\n".join(["image_id\tlanguage\ttext", *rows, ""]).encode())
    words = line_of("gcloud dataflow flex-template run")
    words = [re.sub(r"sdk_container_image=[^,]+", "disk_size_gb=50", word) for word in words]  # There it is no image.
    answer = gcloud(*words, "--format=value(job.id)").stdout.strip()
    watch = [answer if word == "JOB_ID" else word for word in line_of("gcloud dataflow jobs describe")]
    state = wait_for(lambda: (said := gcloud(*watch).stdout.strip()) != "JOB_STATE_RUNNING" and said, seconds=600)
    assert state == "JOB_STATE_DONE"
    assert validate("gs://bucket/captions") == []
    assert open_dataset("gs://bucket/captions").manifest.rows == 40


def test_a_wrong_parameter_is_refused_before_anything_starts(gcloud):
    words = [word.replace("command=captions", "command=train") for word in line_of("gcloud dataflow flex-template run")]
    assert "Invalid value for parameter command: train" in gcloud(*words, code=1).stderr
