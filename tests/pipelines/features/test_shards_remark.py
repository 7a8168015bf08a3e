"""What is said about too few shards for the workers, or for the time of one."""

import pytest

from extractors import ExtractorRequest
from pipelines.features import extraction
from pipelines.features.planning import shards_remark
from pipelines.inputs.images.listing import Listing
from pipelines.jobs import FeaturesJob
from pipelines.running.execution import Accelerator, Execution
from schemas.writing.reuse_policy import ArrayTask

LOSS = "a stopped worker loses its shard, and others wait for the last one; give a new dataset --shards"


def remark(images, shards, *, extractor="resnet50-pool", task=None, flags=None):
    job = FeaturesJob("gs://b/photos", "gs://b/f", ExtractorRequest(extractor), shards=shards, task=task, device="cpu")
    listing = Listing((images // shards,) * shards, ("",) * shards, ("",) * shards)
    execution = Execution()
    if flags is not None:
        execution = Execution(beam_flags=("--runner=DataflowRunner", *flags), accelerator=Accelerator("nvidia-l4"))
    return shards_remark(job, listing, execution)


@pytest.mark.parametrize(
    ("images", "shards", "flags", "expected"),
    [
        (64_000, 64, ["--max_num_workers=16"], ""),
        (64_000, 64, [], ""),
        (
            13_107_200,
            16,
            ["--max_num_workers=10"],
            "16 shards are fewer than 4 for each of 10 workers, and a shard takes about 19 minutes on an H200, at 716.0 images per "
            f"second: {LOSS} 64",
        ),
        (64_000, 32, ["--num_workers=16"], f"32 shards are fewer than 4 for each of 16 workers: {LOSS} 64"),
        (
            13_107_200,
            16,
            [],
            f"a shard takes about 19 minutes on an H200, at 716.0 images per second: {LOSS} 32",
        ),
        (10**9, 99_000, ["--num_workers=30000"], f"99,000 shards are fewer than 4 for each of 30,000 workers: {LOSS} 99999"),
        (10**12, 99_999, [], ""),
    ],
)
def test_shards_of_workers_with_a_gpu(images, shards, flags, expected):
    assert remark(images, shards, flags=flags) == expected


def test_shards_of_array_tasks_on_cores(monkeypatch):
    monkeypatch.setattr(extraction, "usable_cores", lambda: 2)
    expected = f"a shard takes about 1,307 minutes on these cores, at 0.8 images per second: {LOSS} 512"
    assert remark(4 * 62_736, 4, extractor="vgg19-10crop", task=ArrayTask(0, 1)) == expected
    expected = f"6 shards are fewer than 4 for each of 2 workers: {LOSS} 8"
    assert remark(6000, 6, extractor="timm:resnet18", task=ArrayTask(0, 2)) == expected


def test_rate_of_other_models_is_unknown():
    assert remark(10**9, 16, extractor="timm:resnet18", flags=[]) == ""
    assert remark(10**9, 16) == ""
