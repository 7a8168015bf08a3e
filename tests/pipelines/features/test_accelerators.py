"""One process with several GPUs, without one: the extractors stand in for those on the devices."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import apache_beam as beam
import pyarrow.parquet as pq
import pytest
import torch
from apache_beam.testing.util import assert_that, equal_to
from PIL import Image

from pipelines.features.extraction import extract_features
from pipelines.features.planning import list_images, plan_features
from pipelines.features.shard_worker import ExtractorPool, check_worker, devices_of_worker
from pipelines.features.transforms import ExtractFeatures
from pipelines.inputs.images.opening import open_images
from pipelines.jobs import FeaturesJob
from pipelines.running.execution import Accelerator, Execution
from pipelines.running.runner import run_pipeline
from schemas.errors import UsageError
from tests.beam import IN_BEAM
from tests.fake_extractors import ColourExtractor, use_colours

REMOTE = Execution(beam_flags=("--runner=FlinkRunner",), shared_disk=True, accelerator=Accelerator("nvidia-l4"))


@pytest.fixture
def job(tmp_path, monkeypatch):
    use_colours(monkeypatch)
    (tmp_path / "images").mkdir()
    for number in range(24):
        Image.new("RGB", (2, 2), (number, 0, 0)).save(tmp_path / "images" / f"{number}.png")
    return FeaturesJob(images=open_images(str(tmp_path / "images")), output=str(tmp_path / "f"), shards=6, batch_size=1)


@pytest.mark.parametrize("device", ["cpu", "cuda:0", "cuda:1"])
def test_model_runs_on_the_gpus_of_the_workers(job, device):
    expected = f"^--device is '{device}', and --gpu 'nvidia-l4' runs the model on all GPUs of a worker: leave"
    with pytest.raises(UsageError, match=expected):
        extract_features(replace(job, device=device), REMOTE)
    for fits in ("auto", "cuda"):
        replace(job, device=fits).check_execution(REMOTE)


def test_only_process_of_a_worker_has_all_its_gpus(job, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert devices_of_worker(job, "sdk-0-7", 3) == ("cuda:0", "cuda:1", "cuda:2")
    assert devices_of_worker(job, "sdk-0-7", 1) == ("cuda:0",)


def test_worker_with_fewer_gpus_says_so(job, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    planned = ColourExtractor().fingerprint
    check_worker(job, planned, 1)
    with pytest.raises(UsageError, match=r"device 'cuda:1' is not on this host: .*device_count\(\) is 1"):
        check_worker(job, planned, 2)


def test_no_worker_falls_back_to_its_cpu(job, monkeypatch):
    """The device is that of a GPU in what the workers get, although none was named."""
    checks = []
    monkeypatch.setattr("pipelines.features.extraction.run_job", lambda job: checks.append(job.check_worker))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    extract_features(job, REMOTE)
    with pytest.raises(UsageError, match=r"device 'cuda:0' is not on this host: torch.cuda.is_available\(\) is False"):
        checks[0]()


def test_each_gpu_makes_one_shard_at_a_time(job):
    at_once, most = {"a": 0, "b": 0}, []
    both = threading.Barrier(2)
    # Shared by the threads, and even: a thread at the barrier always gets a partner, whichever threads take the turns.
    turns = iter(range(20))

    class OneAtATime(ColourExtractor):
        def __init__(self, name):
            super().__init__()
            self.name = name

    def work() -> None:
        for _ in turns:
            with pool.extractor() as loaded:
                at_once[loaded.extractor.name] += 1
                both.wait(30)  # Passes only where both are at work.
                most.append(max(at_once.values()))
                both.wait(30)
                at_once[loaded.extractor.name] -= 1

    pool = ExtractorPool([OneAtATime("a"), OneAtATime("b")])
    with ThreadPoolExecutor(4) as workers:
        list(workers.map(lambda _: work(), range(4)))
    assert most == [1] * 20


@pytest.mark.slow
def test_shards_of_a_process_with_two_gpus(job, monkeypatch):
    devices = []
    monkeypatch.setattr("extractors.ExtractorRequest.load", lambda request, device: devices.append(device) or ColourExtractor())
    output = plan_features(job, list_images(job))
    transform = ExtractFeatures(job, output, accelerator=Accelerator("nvidia-l4", 2))

    def build(pipeline: beam.Pipeline) -> None:
        assert_that(pipeline | transform, equal_to(range(6)))

    run_pipeline(build, IN_BEAM)
    assert devices == ["cuda:0", "cuda:1"]
    rows = [row for shard in range(6) for row in pq.read_table(output.folder.local_path / output.name(shard)).to_pylist()]
    assert {row["image_id"]: row["feature"][0] for row in rows} == {str(number): number for number in range(24)}
