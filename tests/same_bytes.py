"""Compares what the commands write here and at another commit: datasets, an export, and a training of 30 steps.

    make same-bytes BASE=COMMIT

Features and weights depend on the processor, so both commits run on this machine, one after the other, with the same environment.
Datasets are compared file by file, except records and the versions of libraries; of checkpoints the tensors; of ``metrics.csv``
the numbers. Ends with 1 where anything differs, or where a process has imported the packages from elsewhere.
"""

import csv
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from tests.golden import digests

ROOT = Path(__file__).parents[1]

COMMANDS: tuple[tuple[str, ...], ...] = (
    ("demo scenes --only scenes --scenes 24", "scenes scenes --count 24"),
    ("captions scenes/captions.tsv captions --format table --shards 4 --workers 2",),
    ("captions scenes/captions.tsv truecased --format table --recipe moses-truecase --shards 4 --workers 1",),
    ("vocabulary captions vocabulary",),
    ("encode captions vocabulary encoded --workers 1",),
    ("features scenes/images features --weights random:0 --device cpu --shards 4 --workers 2",),
    (
        "features scenes/images/scene-0000[01].jpg regions --extractor faster-rcnn-36 --weights random:0 --device cpu "
        "--shards 2 --workers 1",
    ),
    ("export features exported --format npy",),
    ("import exported/features.npy imported --ids exported/ids.txt --name resnet50-pool --shards 4",),
    (
        "train demo run --captions encoded --features features --vocabulary vocabulary --device cpu --no-tensorboard "
        "--max-steps 30",
    ),
    ("embed run embeddings --features features --captions encoded --device cpu",),
)
"""Each command in one form or more: where a commit refuses the usage of one (exit code 2), the next is tried."""

RESULTS = {
    "datasets": (
        *("captions", "truecased", "vocabulary", "encoded", "features", "regions", "imported"),
        *("embeddings/images", "embeddings/captions"),
    ),
    "folders": ("scenes", "exported"),
    "checkpoints": ("run/best.pt", "run/last.pt"),
    "metrics": ("run/metrics.csv",),
}

# Runs at the start of every process: notes from where our packages come.
_WITNESS = """
import os, sys
from importlib.machinery import PathFinder

class Witness:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in ("imagepivot", "schemas", "extractors", "pipelines", "train"):
            spec = PathFinder.find_spec(name, path, target)
            with open({log!r}, "a", encoding="utf-8") as file:
                file.write(f"{{os.getpid()}}\\t{{spec and spec.origin}}\\n")
            return spec

sys.meta_path.insert(0, Witness)
"""


def main() -> None:
    """Run at both commits, and print a line for each result."""
    if len(sys.argv) != 2 or not sys.argv[1]:
        sys.exit("give the commit to compare with: make same-bytes BASE=COMMIT")
    with tempfile.TemporaryDirectory() as name, worktree(sys.argv[1], Path(name) / "tree") as base:
        folders = []
        for tree, side in ((base, "base"), (ROOT, "here")):
            folders.append(Path(name) / side)
            print(f"{side}: {tree}", flush=True)
            run_commands(tree, folders[-1])
        if compare(*folders):
            sys.exit(1)


@contextmanager
def worktree(commit: str, folder: Path) -> Iterator[Path]:
    """Check a commit out into a folder for the time of a block."""
    subprocess.run(["git", "-C", ROOT, "worktree", "add", "--quiet", "--detach", folder, commit], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", folder], check=True)


def run_commands(tree: Path, folder: Path) -> None:
    """Run all commands of a tree in a new folder, and check that every process has imported that tree."""
    (folder / ".start").mkdir(parents=True)
    log = folder / ".start" / "imports.tsv"
    (folder / ".start" / "sitecustomize.py").write_text(_WITNESS.format(log=str(log)), encoding="utf-8")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (folder / ".start", tree))),
        "PYTHONSAFEPATH": "1",
        "IMAGEPIVOT_CACHE": str(folder / ".cache"),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
    }
    for forms in COMMANDS:
        for form in forms:
            words = [sys.executable, "-m", "imagepivot", *shlex.split(form)]
            done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
            if done.returncode != 2:
                break
        if done.returncode:
            sys.exit(f"imagepivot {form}\nended with {done.returncode}:\n{done.stderr}")
        print(f"  {form}", flush=True)
    origins = [line.split("\t") for line in log.read_text(encoding="utf-8").splitlines()]
    strangers = sorted({origin for _, origin in origins if not origin.startswith(f"{tree}{os.sep}")})
    if strangers:
        sys.exit(f"expected nothing but modules of {tree}, found {strangers[0]}: unset what leads there")
    processes = len({pid for pid, _ in origins})
    if processes <= len(COMMANDS):
        sys.exit(f"expected worker processes besides {len(COMMANDS)} commands, found {processes} processes in all")


def compare(base: Path, here: Path) -> int:
    """Print ``equal`` or the first difference of each result; return the number of those that differ."""
    readers = {"datasets": digests, "folders": files, "checkpoints": tensors, "metrics": numbers}
    count = 0
    for kind, names in RESULTS.items():
        for name in names:
            difference = first_difference(readers[kind](base / name), readers[kind](here / name))
            count += bool(difference)
            print(f"{name}: {difference or 'equal'}", flush=True)
    return count


def files(folder: Path) -> dict[str, bytes]:
    """Return the bytes of all files of a folder by name, except those that begin with an underscore."""
    paths = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("_"))
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def tensors(path: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint by their keys, joined by slashes."""

    def leaves(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, dict | list | tuple):
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                yield from leaves(item, f"{name}/{key}")

    return dict(leaves(torch.load(path, map_location="cpu", weights_only=True), ""))


def numbers(path: Path) -> dict[str, list[float]]:
    """Return the numbers of each row of a table; the names of its columns may change."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))[1:]
    return {
        f"row {index} ({row[0]})": [number for cell in row for number in _number(cell)] for index, row in enumerate(rows, 1)
    }


def _number(cell: str) -> list[float]:
    try:
        return [float(cell)]
    except ValueError:
        return []


def first_difference(base: dict[str, Any], here: dict[str, Any]) -> str:
    """Return the first of the named values that differ, in words; empty where none does."""
    if not base and not here:
        return "nothing to compare"
    for name in sorted({*base, *here}):
        if name not in here or name not in base:
            return f"{name} is only {'at the base' if name in base else 'here'}"
        old, new = base[name], here[name]
        if isinstance(old, torch.Tensor):
            if old.shape != new.shape or old.dtype != new.dtype:
                return f"{name} is {old.dtype} {list(old.shape)} at the base, {new.dtype} {list(new.shape)} here"
            if not torch.equal(old, new):
                return f"{name} differs by up to {(old.double() - new.double()).abs().max().item():.2g}"
        elif isinstance(old, list):
            if old != new:
                pair = next(pair for pair in zip_longest(old, new) if pair[0] != pair[1])
                return f"{name} has {pair[0]} at the base, {pair[1]} here"
        elif old != new:
            return f"{name} differs"
    return ""


if __name__ == "__main__":
    main()
