"""The manifests of docker/kubernetes at work: their containers, as the users that they name, without Kubernetes."""

import io
import json
import shutil
from typing import Any

import pytest
from PIL import Image

from schemas.dataset import open_dataset
from schemas.storage.folder import Folder
from schemas.writing.validation import validate
from tests.containers.images import ROOT
from tests.containers.work import multi30k, opened, pool, shards
from tests.integration.workload import MODEL, make_inputs
from tests.stores import emulator, use

yaml = pytest.importorskip("yaml", reason="the extra dev installs it")

pytestmark = [pytest.mark.containers, pytest.mark.slow, pytest.mark.timeout(5400)]  # Builds included.

SETTINGS = {"IMAGEPIVOT_FEATURES_EXTRACTOR": MODEL}


def manifest(name: str) -> dict[str, Any]:
    """Return the specification of the first object in a file."""
    first, *_ = yaml.safe_load_all((ROOT / "docker" / "kubernetes" / f"{name}.yaml").read_text())
    return first["spec"]


def words_of(container: dict[str, Any]) -> list[str]:
    """Return what a container starts, with the weights of the images that are built here."""
    return ["/opt/imagepivot/entrypoint.sh", *(word.replace("resnet50-0676ba61.pth", "w.pth") for word in container["args"])]


def target(container: dict[str, Any]) -> str:
    """Return which of our images a container runs."""
    return container["image"].rpartition("/")[2].partition(":")[0]


def test_array_job(images, image, shared):
    folder = shared / "array"
    folder.mkdir()
    make_inputs(folder)
    opened(folder)
    spec = manifest("features")["template"]["spec"]
    (container,) = spec["containers"]
    for task in range(2):
        images.run(
            image(target(container)),
            *[word.replace("/64", "/2") for word in words_of(container)],
            user=str(spec["securityContext"]["runAsUser"]),
            volumes={folder: container["volumeMounts"][0]["mountPath"]},
            environment={**SETTINGS, "JOB_COMPLETION_INDEX": str(task)},
        )
    assert validate(str(folder / "features")) == []
    assert open_dataset(folder / "features").manifest.rows == 5


def test_nightly_job(images, image, shared, monkeypatch):
    """Two nights on an emulated bucket, with the weights that are baked in; a photo comes between them."""
    spec = manifest("nightly")["jobTemplate"]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    temporary = shared / "temporary"
    temporary.mkdir()
    opened(temporary)
    with emulator("gs") as store:
        use(store.environment, monkeypatch)
        for photos in (5, 6):
            for number in range(photos):
                photo = io.BytesIO()
                Image.new("RGB", (60 + number, 50), (200, 30 * number, 20)).save(photo, "PNG")
                Folder("gs://bucket/photos").put(f"i{number}.png", photo.getvalue())
            done = images.run(
                image(target(container)),
                *words_of(container),
                user=str(spec["securityContext"]["runAsUser"]),
                volumes={temporary: container["volumeMounts"][0]["mountPath"]},
                environment={**SETTINGS, **store.environment},
            )
            *_, end = map(json.loads, done.stderr.splitlines())
            assert (end["event"], end["exit_code"], end["counts"]["rows"]) == ("end", 0, photos)
            assert validate("gs://bucket/features") == []


def test_flinks_workers_and_the_command(images, image, shared, imagepivot):
    """The pool beside the task managers does the command's work; Beam's own job service is in place of Flink's."""
    folder = shared / "flink"
    multi30k(folder)
    shutil.copytree(folder, here := shared / "without-flink")
    opened(folder)
    containers = manifest("flink")["taskManager"]["podTemplate"]["spec"]["containers"]
    (workers,) = (each for each in containers if each["name"] == "workers")
    spec = manifest("flink-job")["template"]["spec"]
    (command,) = spec["containers"]
    user, mounted = str(workers["securityContext"]["runAsUser"]), workers["volumeMounts"][0]["mountPath"]
    assert (user, mounted) == (str(spec["securityContext"]["runAsUser"]), command["volumeMounts"][0]["mountPath"])
    run = ("docker", "run", "--rm", "--network", "host", "--user", user, "--volume", f"{folder}:{mounted}")
    with pool(images, [*run, image(target(workers)), *workers["args"]], shared) as job_endpoint:
        # That service tells where what a job brings along goes.
        words = [word for word in words_of(command) if not word.startswith("--artifact_endpoint=")]
        words = [word.replace("beam-jobs:8099", job_endpoint) for word in words]
        images.run(image(target(command)), *words, user=user, volumes={folder: mounted})
    imagepivot("captions", f"{here}/multi30k", f"{here}/captions", "--format", "multi30k", "--workers", "1")
    assert len(shards(here)) > 0
    assert shards(folder) == shards(here)
