"""The job of features on a GPU: its values are those of the CPU but for rounding, and its bytes do not depend on the workers.

Each test also runs with the CPU in place of the GPU, where the same must come out bit for bit: so its code is tried everywhere.
"""

import numpy as np
import pytest
import torch

from extractors import ExtractorRequest
from pipelines.demo.scenes import draw, make_scenes
from pipelines.features.extraction import extract_features
from pipelines.inputs.images.opening import open_images
from pipelines.jobs import FeaturesJob
from pipelines.running.execution import Execution
from schemas.dataset import open_dataset

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_GPU])]
IMAGES = 12
REQUEST = ExtractorRequest("timm:resnet18", weights="random:0")


@pytest.fixture
def jobs(tmp_path):
    """Return a job by its device; each writes into a folder of its own."""
    folder = tmp_path / "images"
    folder.mkdir()
    for name, scene in make_scenes(IMAGES):
        draw(scene).save(folder / f"{name}.png")

    def job(name, device, **more):
        given = {"extractor": REQUEST, "shards": 2, "batch_size": 4, **more}
        return FeaturesJob(images=open_images(str(folder)), output=str(tmp_path / name), device=device, **given)

    return job


def extracted(job, **execution):
    """Run a job; return features, the shards with their digests, and the image ids."""
    manifest = extract_features(job, Execution(**execution))
    dataset = open_dataset(job.output)
    return dataset.numpy(), manifest.shards, dataset.image_ids()


@pytest.mark.cluster
@pytest.mark.parametrize("device", DEVICES)
def test_features_are_those_of_the_cpu(device, jobs):
    found, shards, ids = extracted(jobs("found", device), workers=1)
    expected, wanted, expected_ids = extracted(jobs("expected", "cpu"), workers=1)
    assert list(ids) == list(expected_ids)
    assert found.shape == (IMAGES, 512)
    assert np.abs(found - expected).max() <= (0 if device == "cpu" else 1e-4) * np.abs(expected).max()
    assert device != "cpu" or shards == wanted


@pytest.mark.cluster
@pytest.mark.parametrize("device", DEVICES)
def test_bytes_do_not_depend_on_the_workers(device, jobs):
    one, several = (extracted(jobs(f"{workers}", device), workers=workers)[1] for workers in (1, 2))
    assert one == several
