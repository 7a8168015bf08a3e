"""Plans of runs: the dry run, what is refused before writing, and remarks about too few shards."""

from __future__ import annotations

import os
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from extractors import ExtractorRequest
from pipelines.features.dry_run import plan_dry_run, plan_table
from pipelines.features.extraction import extract_features
from pipelines.features.planning import list_images, shards_remark
from pipelines.inputs.images.listing import Listing
from pipelines.inputs.images.opening import open_images
from pipelines.jobs import FeaturesJob
from pipelines.running.execution import Accelerator, Execution
from schemas.errors import DatasetError, InputError, UsageError
from schemas.keys import shard_of
from tests.fake_extractors import picture, use_colours
from tests.reuse import with_policy

# --- the dry run -----------------------------------------------------------------------------------------------------


@pytest.fixture
def images(tmp_path, monkeypatch):
    use_colours(monkeypatch)
    folder = tmp_path / "images"
    folder.mkdir()
    generator = random.Random(3)
    for number in range(30):
        (folder / f"image{number:02d}.png").write_bytes(picture(*(generator.randrange(256) for _ in range(3))))
    return folder


def job_of(images, output, **more) -> FeaturesJob:
    return FeaturesJob(
        images=open_images(images), output=str(output), device="cpu", shards=4, batch_size=4, **with_policy(more)
    )


def plan_of(job: FeaturesJob):
    return plan_dry_run(job, list_images(job))


def test_plan_of_everything(images, tmp_path):
    plan = plan_of(job_of(images, tmp_path / "f"))
    expected = {number: sum(shard_of(f"image{n:02d}", 4) == number for n in range(30)) for number in range(4)}
    assert {shard.shard: shard.images for shard in plan.todo} == expected
    assert (plan.images, plan.finished, plan.bytes) == (30, 0, 30 * 3 * 4)
    assert not (tmp_path / "f").exists(), "a plan writes nothing"
    assert plan_table(plan).rows[-1] == ("all", 30, 0, 0, "0.0")


def test_dry_run_counts_new_and_failed_images(images, tmp_path):
    (images / "bad.png").write_bytes(b"")
    extract_features(job_of(images, tmp_path / "f"), Execution(workers=1))
    assert plan_of(job_of(images, tmp_path / "f")).images == 0
    plan = plan_of(job_of(images, tmp_path / "f", retry_failed=True))
    assert [(shard.shard, shard.images) for shard in plan.todo] == [(shard_of("bad", 4), 1)]
    (images / "new.png").write_bytes((images / "image00.png").read_bytes())
    plan = plan_of(job_of(images, tmp_path / "f", update=True))
    assert [(shard.shard, shard.images) for shard in plan.todo] == [(shard_of("new", 4), 1)]
    assert plan.todo[0].kept == sum(shard_of(f"image{n:02d}", 4) == shard_of("new", 4) for n in range(30))  # Rows, no failures.


def test_dry_run_counts_removed_and_changed_images(images, tmp_path):
    extract_features(job_of(images, tmp_path / "f"), Execution(workers=1))
    (images / "image00.png").unlink()
    os.utime(images / "image01.png", (1, 1))
    plan = plan_of(job_of(images, tmp_path / "f", update=True))
    counts = {shard.shard: (shard.images, shard.dropped) for shard in plan.todo}
    expected = Counter({shard_of("image00", 4): 1}) + Counter({shard_of("image01", 4): 1})
    assert {number: dropped for number, (_, dropped) in counts.items()} == dict(expected)
    assert sum(made for made, _ in counts.values()) == plan.images == 1
    assert plan_of(job_of(images, tmp_path / "f", update=True, only_add=True)).todo == ()
    assert plan_of(job_of(images, tmp_path / "f", overwrite=True)).images == 29


def change_images(images: Path, output: Path) -> None:
    extract_features(job_of(images, output), Execution(workers=1))
    (images / "image00.png").unlink()


def add_same_id(images: Path, output: Path) -> None:
    (images / "more").mkdir()
    (images / "more" / "image07.jpg").touch()


def add_other_file(images: Path, output: Path) -> None:
    output.mkdir()
    (output / "notes.txt").touch()


@pytest.mark.parametrize(
    ("prepare", "device", "error", "match"),
    [
        (add_same_id, "cpu", InputError, "id 'image07' belongs to two files, 'image07.png' and 'more/image07.jpg'"),
        (add_other_file, "cpu", DatasetError, "holds files that do not belong to a dataset, e.g. 'notes.txt'"),
        (change_images, "cpu", DatasetError, "was made from other images: in 1 of 4 shards"),
        (lambda images, output: None, "cuda", UsageError, "cuda"),
    ],
)
def test_run_and_plan_are_refused_before_writing(images, tmp_path, monkeypatch, prepare, device, error, match):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    prepare(images, tmp_path / "f")
    before = sorted(tmp_path.rglob("*"))
    job = replace(job_of(images, tmp_path / "f"), device=device)
    for act in (plan_of, lambda job: extract_features(job, Execution(workers=1))):
        with pytest.raises(error, match=match):
            act(job)
        assert sorted(tmp_path.rglob("*")) == before


# --- the number of shards --------------------------------------------------------------------------------------------


LOSS = "a stopped worker loses its shard, and others wait for the last one; give a new dataset --shards"


@pytest.mark.parametrize(
    ("images", "shards", "flags", "expected"),
    [
        (64_000, 64, ["--max_num_workers=16"], ""),
        (
            13_107_200,
            16,
            ["--max_num_workers=10"],
            "16 shards are fewer than 4 for each of 10 workers, and a shard takes about 19 minutes on an H200, at 716.0 images per "
            f"second: {LOSS} 64",
        ),
        (64_000, 32, ["--num_workers=16"], f"32 shards are fewer than 4 for each of 16 workers: {LOSS} 64"),
    ],
)
def test_shards_of_workers_with_a_gpu(images, shards, flags, expected):
    job = FeaturesJob("gs://b/photos", "gs://b/f", ExtractorRequest("resnet50-pool"), shards=shards, device="cpu")
    listing = Listing((images // shards,) * shards, ("",) * shards, ("",) * shards)
    execution = Execution(beam_flags=("--runner=DataflowRunner", *flags), accelerator=Accelerator("nvidia-l4"))
    assert shards_remark(job, listing, execution) == expected
