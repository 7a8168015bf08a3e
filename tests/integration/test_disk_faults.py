"""No permission and no space: one clear error, no torn file, and the next run goes on."""

import ctypes
import functools
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipelines.demo.scenes import draw, make_scenes
from tests.builders import tree
from tests.integration.processes import start

pytestmark = pytest.mark.cluster

pytest.importorskip("timm", reason="a small model of timm's makes many runs possible")

SMALL = ("--extractor", "timm:test_resnet.r160_in1k", "--weights", "random:0", "--device", "cpu", "--batch-size", "4")


def says(done: subprocess.CompletedProcess[str], *parts: str) -> None:
    """Assert that there is one message, and that it contains these parts."""
    assert done.stderr.splitlines()[-1].startswith("Error: ")
    assert done.stderr.count("Error") == 1, done.stderr
    assert "Traceback" not in done.stderr
    for part in parts:
        assert part in done.stderr


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scenes") / "images"
    folder.mkdir()
    for name, scene in make_scenes(80):
        draw(scene).resize((160, 120)).save(folder / f"{name}.jpg", quality=90)
    return folder


@pytest.fixture(scope="module")
def arguments(scenes: Path) -> Callable[..., tuple[str | Path, ...]]:
    return lambda output, *more: ("features", scenes, output, "--shards", "20", *SMALL, *more)


@pytest.fixture(scope="module")
def undisturbed(arguments, imagepivot, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    output = tmp_path_factory.mktemp("undisturbed") / "features"
    imagepivot(*arguments(output))
    return tree(output)


# --- no permission ---------------------------------------------------------------------------------------------------


def as_others() -> None:
    """Take the right to read and write everywhere from this process, which root has otherwise."""
    libc, header = ctypes.CDLL(None, use_errno=True), (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3
    sets = (ctypes.c_uint32 * 6)()
    if libc.capget(header, sets):
        raise OSError(ctypes.get_errno(), "capget")
    for number in (0, 1):  # Effective and permitted: CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH.
        sets[number] &= ~(1 << 1 | 1 << 2)
    if libc.capset(header, sets):
        raise OSError(ctypes.get_errno(), "capset")


def exit_where_writable(folder: Path) -> None:
    as_others()
    sys.exit(os.access(folder, os.W_OK))


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[Path]:
    """A folder that nobody may write to."""
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o555)
    with start(folder=tmp_path / "probe", before=functools.partial(exit_where_writable, folder)) as probe:
        if probe.wait().returncode:
            pytest.skip("this account may write everywhere")
    yield folder
    folder.chmod(0o755)


def test_folder_without_permission(arguments, undisturbed, forked, locked: Path) -> None:
    output = locked / "features"
    says(forked(*arguments(output), before=as_others, code=1), "permission denied", str(output))
    assert list(locked.iterdir()) == []
    locked.chmod(0o755)
    forked(*arguments(output), before=as_others)
    assert tree(output) == undisturbed


def test_dataset_without_permission(arguments, undisturbed, imagepivot, forked, locked: Path) -> None:
    locked.chmod(0o755)
    imagepivot(*arguments(locked))
    (locked / "_manifest.json").unlink()
    (locked / "part-00007-of-00020.parquet").unlink()
    locked.chmod(0o555)
    before = tree(locked)
    says(forked(*arguments(locked), before=as_others, code=1), "permission denied", "check who owns the folder")
    assert tree(locked) == before
    locked.chmod(0o755)
    forked(*arguments(locked), before=as_others)
    assert tree(locked) == undisturbed


# --- no space --------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path, undisturbed: dict[str, bytes]) -> Iterator[Path]:
    """A disk that holds about half of the features."""
    disk = tmp_path / "disk"
    disk.mkdir()
    size = sum(map(len, undisturbed.values())) // 2
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"this account cannot mount a small disk: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_full_disk(arguments, undisturbed, imagepivot, small_disk: Path, workers: str) -> None:
    output = small_disk / "features"
    says(
        imagepivot(*arguments(output, "--workers", workers), code=1),
        "the disk is full: free some space and run the same command again (train with --resume); finished work is kept",
    )
    left = tree(output)
    assert 0 < len(left) < len(undisturbed)
    assert all(undisturbed[name] == data for name, data in left.items()), "every finished file is whole"
    assert "_manifest.json" not in left
    stamps = {path.name: path.stat().st_mtime_ns for path in output.glob("part-*")}
    subprocess.run(["mount", "-o", "remount,size=64m", small_disk], check=True)
    imagepivot(*arguments(output))
    assert tree(output) == undisturbed
    assert {name: (output / name).stat().st_mtime_ns for name in stamps} == stamps


def limit_files(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def test_file_size_limit_is_reported_and_the_run_resumes(arguments, undisturbed, imagepivot, forked, tmp_path: Path) -> None:
    largest = max(len(data) for name, data in undisturbed.items() if name.startswith("part-"))
    output = tmp_path / "features"
    done = forked(*arguments(output), before=functools.partial(limit_files, largest - 1), code=1)
    says(done, "part-", "see ulimit -f; more shards make smaller files")
    assert all(undisturbed[name] == data for name, data in tree(output).items())
    assert not (output / "_manifest.json").exists()
    imagepivot(*arguments(output))
    assert tree(output) == undisturbed
