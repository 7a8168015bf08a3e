"""Random sequences of changes, damage, kills and runs, and random array jobs: they always end with the bytes of a fresh run.

The properties are checked on the functions that every runner calls, without Beam: thousands of runs would take hours with it. A
kill is one: the run happens in a forked process that ends at a random write, without any cleaning up. What happens at the same
time in an array job is a forked process, too. ``IMAGEPIVOT_FUZZ_MINUTES`` makes the tests go on with fresh seeds for as long.
"""

from __future__ import annotations

import itertools
import os
import random
import re
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from PIL import Image

from pipelines.features.feature_shards import write_feature_shard
from pipelines.features.inference import LoadedExtractor
from pipelines.inputs.images.listing import Listing
from pipelines.inputs.images.opening import open_images
from schemas.errors import DatasetError
from schemas.keys import shard_of
from schemas.process.shutdown import DetachedError
from schemas.storage.folder import Folder
from schemas.writing.dataset_writer import complete_dataset
from schemas.writing.output import OutputDataset
from schemas.writing.reuse_policy import ArrayTask, ReusePolicy
from schemas.writing.validation import validate
from tests.builders import tree
from tests.fake_extractors import SPEC, ColourExtractor, picture

SHARDS = 3
SEQUENCES = 25
STEPS = 8
NAMES = [f"image{number}" for number in range(12)]
TASK_SHARDS, TASKS, JOBS = 7, 3, 12
MINUTES = float(os.environ.get("IMAGEPIVOT_FUZZ_MINUTES", "0"))


def run(images: Path, folder: Path, shards: int = SHARDS, task: ArrayTask | None = None, **options) -> None:
    """Do what ``imagepivot features`` does, with or without ``--task``."""
    policy = ReusePolicy(**options)
    source = open_images(images)
    listing = Listing.of(source.refs(), shards)
    parameters = {"feature": SPEC.to_json()}
    output = OutputDataset(
        Folder(str(folder)),
        "features",
        parameters,
        shards=shards,
        listings=listing.shards,
        version_digests=listing.version_digests,
    )

    def make_missing(finished: frozenset[int]) -> None:
        for number in sorted(set(range(shards)) - finished):
            refs = [ref for ref in source.refs() if shard_of(ref.image_id, shards) == number]
            write_feature_shard(output, number, refs, policy, source, LoadedExtractor(ColourExtractor(), 4))

    with suppress(DetachedError):  # Shards of other tasks are missing.
        complete_dataset(output, make_missing, policy, task=task)


def check_seeds(check: Callable[[int, Path], object], root: Path, count: int) -> Iterator[object]:
    """Yield what a check in a folder of its own returns for so many seeds, or for fresh ones as long as is asked for."""
    deadline = time.monotonic() + 60 * MINUTES
    first = int(time.time()) * 1000 if MINUTES else 0
    for seed in itertools.count(first):
        if seed >= first + count and time.monotonic() >= deadline:
            return
        yield check(seed, root / str(seed))
        shutil.rmtree(root / str(seed))


def end_before(writes: int) -> None:
    """Let this process end with code 9, without any cleaning up, instead of its next write or deletion after so many."""
    left = iter(range(writes))

    def end_or(operation):
        def act(folder, name, data=None, **conditions):
            # Bytes are written to a temporary file first, whose path is put.
            if not isinstance(data, bytes) and next(left, None) is None:
                os._exit(9)
            return operation(folder, name, *(() if data is None else (data,)), **conditions)

        return act

    Folder.put, Folder.delete = end_or(Folder.put), end_or(Folder.delete)


def fork(action: Callable[[], object], writes: int) -> int:
    """Start an action in a process that ends before one of its next writes; it ends with 1 where it is refused, as it may be."""
    child = os.fork()
    if child:
        return child
    code = 7
    try:
        end_before(writes)
        try:
            action()
            code = 0
        except DatasetError as error:
            # A killed task may leave a new file of failures beside an old shard.
            code = (
                1
                if re.search(
                    "is in use|[Nn]othing was written|has written shards|cannot be committed, .*: run task", str(error)
                )
                else 7
            )
            if code == 7:
                print(error, flush=True)
    except BaseException:  # noqa: BLE001 -- the process ends below, before Python would print it
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def run_killed(images: Path, folder: Path, writes: int, **options) -> None:
    """Run in another process, which ends without a word before one of its next writes."""
    os.waitpid(fork(partial(run, images, folder, **options), writes), 0)


class Sequence:
    """One random sequence; the clock of the files advances by a second with every step."""

    def __init__(self, seed: int, root: Path) -> None:
        self.random = random.Random(seed)
        self.images, self.folder = root / "images", root / "features"
        self.images.mkdir(parents=True)
        self.clock = 1_700_000_000
        self.sneaky = False
        self.add(), self.add(), self.add()

    def path(self) -> Path | None:
        paths = sorted(path for path in self.images.rglob("*") if not path.is_dir())
        return self.random.choice(paths) if paths else None

    def write(self, path: Path, *, size: int | None = None) -> None:
        data = picture(*(self.random.randrange(256) for _ in range(3)))
        kind = self.random.random()
        if kind < 0.1:
            data = b""
        elif kind < 0.2:
            data = data[: len(data) // 2]
        if size is not None:
            data = data[:size].ljust(size, b"\0")
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        if kind > 0.95 and size is None:
            path.symlink_to("nowhere")
            return
        path.write_bytes(data)
        self.stamp(path)

    def stamp(self, path: Path) -> None:
        os.utime(path, (self.clock, self.clock), follow_symlinks=False)

    # Changes of the images.

    def add(self) -> None:
        free = sorted(set(NAMES) - {path.stem for path in self.images.rglob("*")})
        if free:
            self.write(self.images / self.random.choice(["", "more"]) / f"{self.random.choice(free)}.png")

    def remove(self) -> None:
        path = self.path()
        if path and len([other for other in self.images.rglob("*") if not other.is_dir()]) > 1:  # None at all is an error.
            path.unlink()

    def replace(self) -> None:
        if path := self.path():
            self.write(path, size=path.lstat().st_size if self.random.random() < 0.5 and not path.is_symlink() else None)

    def replace_unnoticed(self) -> None:
        path = self.path()
        if path and not path.is_symlink():
            before = path.stat()
            self.write(path, size=before.st_size)
            os.utime(path, ns=(before.st_mtime_ns, before.st_mtime_ns))
            self.sneaky = True

    def touch(self) -> None:
        if path := self.path():
            self.stamp(path)

    def move(self) -> None:
        if path := self.path():
            target = self.images / self.random.choice(["", "more", "other"]) / path.name
            target.parent.mkdir(exist_ok=True)
            path.rename(target)

    # Damage of the dataset.

    def damage(self) -> None:
        files = sorted(path for path in self.folder.rglob("*") if path.is_file())
        if not files:
            return
        path = self.random.choice(files)
        data = bytearray(path.read_bytes())
        kind = self.random.choice(["flip", "cut", "empty", "delete"])
        if kind == "delete":
            path.unlink()
        elif kind == "flip" and data:
            data[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)
            path.write_bytes(data)
        else:
            path.write_bytes(data[: self.random.randrange(len(data)) if data and kind == "cut" else 0])

    # Runs.

    def options(self) -> dict[str, object]:
        others = ("verify", "retry_failed", "check_content", "keep_removed", "only_add")
        plain = [{}, {"verify": True}, {"retry_failed": True}, {"overwrite": True}, {"update": True}, {"update": True}]
        return self.random.choice([*plain, *({"update": True, other: True} for other in others)])

    def run(self) -> None:
        try:
            run(self.images, self.folder, **self.options())
        except DatasetError as error:
            if re.search("[Nn]othing was written|run the same command again", str(error)) is None:
                raise

    def kill(self) -> None:
        run_killed(self.images, self.folder, self.random.randrange(1, 12), **self.options())

    def step(self) -> str:
        self.clock += 1
        changes = ("add", "remove", "replace", "touch", "move", "replace_unnoticed")
        name = self.random.choice([*changes, *("damage", "run", "kill") * 2])
        getattr(self, name)()
        return name

    def finish(self) -> None:
        """Update, as a user does who follows the messages."""
        for _ in range(4):
            try:
                run(self.images, self.folder, update=True, check_content=self.sneaky, verify=True)
                return
            except DatasetError as error:
                if "_manifest.json is damaged" in str(error) or "is not the manifest of a dataset" in str(error):
                    (self.folder / "_manifest.json").unlink()
                elif "run the same command again" not in str(error):
                    raise
        raise AssertionError("four runs were not enough")


def check(seed: int, root: Path) -> None:
    sequence = Sequence(seed, root)
    steps = [sequence.step() for _ in range(sequence.random.randrange(1, STEPS + 1))]
    sequence.finish()
    run(sequence.images, root / "fresh")
    assert tree(sequence.folder) == tree(root / "fresh"), (seed, steps)
    assert validate(sequence.folder) == [], (seed, steps)


@pytest.mark.slow
def test_update_ends_with_the_bytes_of_a_fresh_run(tmp_path: Path) -> None:
    assert len(list(check_seeds(check, tmp_path, SEQUENCES))) >= SEQUENCES


# --- array jobs -----------------------------------------------------------------------------------------------------


def draw(path: Path, generator: random.Random, second: int) -> None:
    """Make an image, or an empty file, of the same time on every machine."""
    Image.new("RGB", (2, 2), tuple(generator.randrange(256) for _ in range(3))).save(path)
    if generator.random() < 0.2:
        path.write_bytes(b"")
    os.utime(path, (second, second))


def check_tasks(seed: int, root: Path) -> None:
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
            partial(run, images, folder, TASK_SHARDS, task, update=update, retry_failed=generator.random() < 0.2)
            for task in chosen
        ]
        if generator.random() < 0.3:
            actions.append(partial(run, images, folder, TASK_SHARDS, update=update and generator.random() < 0.5))
        generator.shuffle(actions)
        children = [fork(action, generator.choice([*range(1, 15), 1000])) for action in actions]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        assert set(codes) <= {0, 1, 9}, (seed, codes)
    last = [fork(partial(run, images, folder, TASK_SHARDS, task, update=update), 1000) for task in [*tasks, *tasks]]
    assert {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in last} <= {0, 1}, seed
    assert (folder / "_manifest.json").exists(), seed
    (folder / ".lock").unlink(missing_ok=True)  # Of a run that was killed after everything else.
    run(images, root / "fresh", TASK_SHARDS)
    assert tree(folder) == tree(root / "fresh"), seed
    assert validate(folder) == [], seed


@pytest.mark.cluster
def test_array_job_ends_with_the_bytes_of_a_plain_run(tmp_path: Path) -> None:
    assert len(list(check_seeds(check_tasks, tmp_path, JOBS))) >= JOBS
