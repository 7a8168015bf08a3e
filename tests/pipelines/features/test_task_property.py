"""Random array jobs: tasks at the same time, copies of tasks, kills and plain runs at any moment end in the same bytes.

As in ``test_update_property``, without Beam; what happens at the same time is a forked process, and a kill ends it before a
random write without any cleaning up. ``IMAGEPIVOT_FUZZ_MINUTES`` makes the test go on with fresh seeds for as long.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from PIL import Image

from schemas.process.shutdown import DetachedError
from schemas.writing.dataset_writer import complete_dataset
from schemas.writing.reuse_policy import ArrayTask, ReusePolicy
from schemas.writing.validation import validate
from tests.builders import tree
from tests.pipelines.features.without_beam import check_seeds, fork, plan

SHARDS, TASKS = 7, 3
JOBS = 12


def run(images: Path, folder: Path, task: ArrayTask | None, *, update: bool = False, retry_failed: bool = False) -> None:
    """Do what ``imagepivot features`` does, with or without ``--task``."""
    policy = ReusePolicy(update=update, retry_failed=retry_failed)
    output, write_missing = plan(images, folder, SHARDS, policy=policy)
    with suppress(DetachedError):  # Shards of other tasks are missing.
        complete_dataset(output, write_missing, policy, task=task)


def draw(path: Path, generator: random.Random, second: int) -> None:
    """Make an image, or an empty file, of the same time on every machine."""
    Image.new("RGB", (2, 2), tuple(generator.randrange(256) for _ in range(3))).save(path)
    if generator.random() < 0.2:
        path.write_bytes(b"")
    os.utime(path, (second, second))


def check(seed: int, root: Path) -> None:
    generator = random.Random(seed)
    images, folder = root / "images", root / "features"
    images.mkdir(parents=True)
    count = generator.randrange(1, 15)
    for number in range(count):
        draw(images / f"image{number}.png", generator, 1_700_000_000)
    tasks = [ArrayTask(index, TASKS) for index in range(TASKS)]
    update = False
    for second in range(generator.randrange(1, 4)):
        if second and generator.random() < 0.5:
            update = True  # From now on; who does not update may be refused.
            draw(images / f"image{generator.randrange(count + 1)}.png", generator, 1_700_000_001 + second)
        chosen = [generator.choice(tasks) for _ in range(generator.randrange(1, 6))]
        actions: list[Callable[[], object]] = [
            partial(run, images, folder, task, update=update, retry_failed=generator.random() < 0.2) for task in chosen
        ]
        if generator.random() < 0.3:
            actions.append(partial(run, images, folder, None, update=update and generator.random() < 0.5))
        generator.shuffle(actions)
        children = [fork(action, generator.choice([*range(1, 15), 1000])) for action in actions]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        assert set(codes) <= {0, 1, 9}, (seed, codes)
    last = [fork(partial(run, images, folder, task, update=update), 1000) for task in [*tasks, *tasks]]
    assert {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in last} <= {0, 1}, seed
    assert (folder / "_manifest.json").exists(), seed
    (folder / ".lock").unlink(missing_ok=True)  # Of a run that was killed after everything else.
    run(images, root / "fresh", None)
    assert tree(folder) == tree(root / "fresh"), seed
    assert validate(folder) == [], seed


@pytest.mark.cluster
def test_array_job_ends_with_the_bytes_of_a_plain_run(tmp_path: Path) -> None:
    assert len(list(check_seeds(check, tmp_path, JOBS))) >= JOBS
