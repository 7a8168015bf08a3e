"""Tasks of an array job through the pipeline, with a fake extractor: changed images, failures, the dry run, wrong usage."""

import os
import random
import re
from pathlib import Path

import pytest
from PIL import Image

from pipelines.features.dry_run import plan_dry_run
from pipelines.features.extraction import extract_features
from pipelines.features.planning import list_images
from pipelines.inputs.images.opening import open_images
from pipelines.jobs import FeaturesJob
from pipelines.running.execution import Execution
from schemas.errors import DatasetError, UsageError
from schemas.keys import shard_of
from schemas.process.shutdown import DetachedError
from schemas.writing.reuse_policy import ArrayTask
from tests.builders import tree
from tests.fake_extractors import use_colours
from tests.reuse import with_policy

ONE = Execution(workers=1)
SHARDS, TASKS = 5, 2
STAMP = 1_700_000_000 * 10**9


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    use_colours(monkeypatch)


@pytest.fixture
def images(tmp_path) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    generator = random.Random(5)
    for number in range(20):
        draw(folder / f"image{number}.png", tuple(generator.randrange(256) for _ in range(3)))
    (folder / "broken.png").write_bytes(b"")
    os.utime(folder / "broken.png", ns=(STAMP, STAMP))
    return folder


def draw(path: Path, colour: tuple[int, int, int], stamp: int = STAMP) -> None:
    Image.new("RGB", (2, 2), colour).save(path)
    os.utime(path, ns=(stamp, stamp))


def job_of(images: Path, output: Path, index: int | None = None, **more) -> FeaturesJob:
    task = None if index is None else ArrayTask(index, TASKS)
    return FeaturesJob(
        images=open_images(images), output=str(output), device="cpu", **with_policy({"shards": SHARDS, "task": task, **more})
    )


def run(images: Path, output: Path, *indices: int, **more) -> str:
    """Runs tasks one after the other; returns what the last one says of shards that are missing."""
    told = ""
    for index in indices:
        try:
            extract_features(job_of(images, output, index, **more), ONE)
            told = ""
        except DetachedError as error:
            told = str(error)
    return told


def fresh(images: Path, folder: Path) -> dict[str, bytes]:
    extract_features(job_of(images, folder), ONE)
    return tree(folder)


def image_of(images: Path, task: int) -> Path:
    """An image whose shard belongs to a task."""
    return next(path for path in sorted(images.glob("image*")) if shard_of(path.stem, SHARDS) % TASKS == task)


# --- images that change ----------------------------------------------------------------------------------------------


def change(images: Path, task: int, how: str) -> None:
    if how == "gone":
        image_of(images, task).unlink()
    elif how == "another":
        size = image_of(images, task).stat().st_size
        draw(image_of(images, task), (9, 8, 7), STAMP + 10**9)
        assert image_of(images, task).stat().st_size == size  # Only the time tells.
    else:
        name = next(name for name in map("new{}".format, range(99)) if shard_of(name, SHARDS) % TASKS == task)
        draw(images / f"{name}.png", (1, 2, 3))


@pytest.mark.slow
@pytest.mark.parametrize("tasks", [(1,), (0, 1)])
def test_update_of_a_finished_dataset_names_the_tasks_to_run_again(images, tmp_path, tasks):
    fresh(images, tmp_path / "t")
    for task in tasks:
        change(images, task, "another")
    told = run(images, tmp_path / "t", 0, update=True)
    assert re.fullmatch(r"4 of 5 shards are done; out of date [13]: run task 1 of 2 again", told)
    assert (tmp_path / "t" / "_manifest.json").exists() == (0 not in tasks)
    assert run(images, tmp_path / "t", 1, update=True) == ""
    assert tree(tmp_path / "t") == fresh(images, tmp_path / "plain")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["gone", "new"])
def test_tasks_with_different_listings_fail_at_the_commit(images, tmp_path, how):
    run(images, tmp_path / "t", 0)
    change(images, 0, how)
    with pytest.raises(
        DatasetError, match=r"in 1 of 5 shards .*; this task has written shards 1,3, which stay\. Give --update"
    ):
        run(images, tmp_path / "t", 1)
    assert not (tmp_path / "t" / "_manifest.json").exists()
    run(images, tmp_path / "t", 1, 0, update=True)
    assert tree(tmp_path / "t") == fresh(images, tmp_path / "plain")


@pytest.mark.slow
def test_each_machine_may_have_its_own_copy_of_the_images(images, tmp_path):
    run(images, tmp_path / "t", 0)
    for path in images.iterdir():
        os.utime(path, ns=(STAMP + 10**9, STAMP + 10**9))
    run(images, tmp_path / "t", 1)
    dataset, plain = (
        {name: data for name, data in files.items() if not name.startswith(".records/")}
        for files in (tree(tmp_path / "t"), fresh(images, tmp_path / "plain"))
    )
    assert dataset == plain


# --- the dry run -----------------------------------------------------------------------------------------------------


def planned(images: Path, output: Path, index: int, **more):
    job = job_of(images, output, index, **more)
    return plan_dry_run(job, list_images(job))


def test_dry_run_lists_the_shards_of_the_task(images, tmp_path):
    plan = planned(images, tmp_path / "t", 0)
    assert [shard.shard for shard in plan.todo] == [0, 2, 4]
    assert plan.finished == 0
    assert plan.images == sum(shard_of(path.stem, SHARDS) % TASKS == 0 for path in images.iterdir())
    assert not (tmp_path / "t").exists()
    run(images, tmp_path / "t", 0)
    before = tree(tmp_path / "t")
    plan = planned(images, tmp_path / "t", 0)
    assert (plan.todo, plan.finished) == ((), 3)
    assert [shard.shard for shard in planned(images, tmp_path / "t", 1).todo] == [1, 3]
    assert tree(tmp_path / "t") == before


# --- wrong usage -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"overwrite": True}, "--overwrite with --task would delete the shards of other tasks"),
        ({"shards": 1}, r"--task is '0/2', expected at most one task per shard, and the dataset has 1:"),
    ],
)
def test_invalid_task_is_refused(tmp_path, more, message):
    with pytest.raises(UsageError, match=message):
        job_of(tmp_path, tmp_path / "t", 0, **more)


def test_task_on_a_remote_runner_is_refused(images, tmp_path):
    with pytest.raises(UsageError, match=r"--task is '0/2', and --runner follows --: .* Leave out one of the two"):
        extract_features(job_of(images, tmp_path / "t", 0), Execution(beam_flags=("--runner=DataflowRunner",)))
    assert not (tmp_path / "t").exists()
