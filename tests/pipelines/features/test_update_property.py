"""Random sequences of changes, damage, kills and runs: an update always ends with the bytes of a fresh run.

The property is checked on the functions that every runner calls, without Beam: thousands of runs would take hours with it. A kill
is one: the run happens in a forked process that ends at a random write, without any cleaning up. ``IMAGEPIVOT_FUZZ_MINUTES``
makes the test go on with fresh seeds for as long.
"""

from __future__ import annotations

import os
import random
import re
from functools import partial
from pathlib import Path

import pytest

from schemas.errors import DatasetError
from schemas.writing.dataset_writer import complete_dataset
from schemas.writing.reuse_policy import ReusePolicy
from schemas.writing.validation import validate
from tests.builders import tree
from tests.fake_extractors import picture
from tests.pipelines.features.without_beam import check_seeds, fork, plan

SHARDS = 3
SEQUENCES = 25
STEPS = 8
NAMES = [f"image{number}" for number in range(12)]


def run(images: Path, folder: Path, **options) -> None:
    """Do what ``imagepivot features`` does."""
    output, write_missing = plan(images, folder, SHARDS, policy=ReusePolicy(**options))
    complete_dataset(output, write_missing, ReusePolicy(**options))


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
