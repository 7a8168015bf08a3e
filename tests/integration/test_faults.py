"""A run that is killed again and again, or finds no permission or no space: no torn file, and the next run goes on."""

import ctypes
import functools
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipelines.demo.scenes import draw, make_scenes
from schemas.writing.records import record_name
from schemas.writing.validation import validate
from tests.builders import tree
from tests.integration.processes import group_of, start, wait_for

pytestmark = pytest.mark.cluster

pytest.importorskip("timm", reason="a small model of timm's makes many runs possible")

KILLS = 6
WORDS = ["A", "man", "Man", "dog", "(", "walks", "!", "'s", "Zwei", "Hunde", "é", "3"]
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


# --- killed ----------------------------------------------------------------------------------------------------------


def shards_in(folder: Path) -> dict[str, int]:
    """Return the time of writing of each finished shard, by name: its record comes after it, and a kill may come between."""
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("part-*") if (folder / record_name(path.name)).exists()}


def test_repeatedly_killed_run_ends_with_the_same_bytes(arguments, undisturbed, imagepivot, tmp_path: Path) -> None:
    """The whole process group gets SIGKILL at random moments of its work."""
    generator = random.Random(2018)
    kills, dataset, output = 0, 0, tmp_path / "killed-0"
    while kills < KILLS:
        before = shards_in(output)
        with start(*arguments(output), folder=tmp_path / "process") as run:
            # Either during start-up, or up to 0.2 seconds after the next finished shard.
            deadline = time.monotonic() + (generator.uniform(0, 1) if generator.random() < 0.3 else 120)
            while time.monotonic() < deadline and run.runs:
                if len(shards_in(output)) > len(before):
                    deadline = min(deadline, time.monotonic() + generator.uniform(0, 0.2))
                time.sleep(0.005)
            if run.runs:
                run.send(signal.SIGKILL)
                kills += 1
            run.wait()
        after = shards_in(output)
        assert {name: stamp for name, stamp in after.items() if name in before} == before, "a finished shard was made again"
        if (output / "_manifest.json").exists():
            assert tree(output) == undisturbed
            dataset += 1
            output = tmp_path / f"killed-{dataset}"
    imagepivot(*arguments(output))
    assert tree(output) == undisturbed
    assert validate(output) == []


@pytest.fixture(scope="module")
def captions(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[object, ...]]:
    """Arguments that prepare captions, some of which are empty."""
    generator = random.Random(31)
    table = tmp_path_factory.mktemp("table") / "captions.tsv"
    lines = ["image_id\tlanguage\tportion\tsplit\ttext"]
    for number in range(12_000):
        text = " ".join(generator.choices(WORDS, k=generator.randrange(1, 12))) if number % 997 else " "
        language, split = generator.choice(["en", "de", "pt-BR"]), generator.choice(["train", "train", "val"])
        lines.append(f"img{generator.randrange(3000)}\t{language}\tcomparable\t{split}\t{text}")
    table.write_text("\n".join(lines) + "\n")
    options = ("--format", "table", "--recipe", "moses-truecase", "--shards", "6", "--max-failures", "100")
    return lambda output, *more: ("captions", table, output, *options, *more)


def kill_after_a_shard(output: Path, words: tuple[object, ...], folder: Path, victim: str) -> dict[str, int]:
    """Kill a run, its launcher or a worker of it after a shard; return the finished shards."""
    with start(*words, folder=folder) as run:
        wait_for(lambda: shards_in(output) or not run.runs)
        assert run.runs, f"the run ended too early: {run.wait().stderr}"
        assert not (output / "_manifest.json").exists(), "the manifest comes last"
        if victim == "group":
            run.send(signal.SIGKILL)
        elif victim == "launcher":
            os.kill(run.pid, signal.SIGKILL)
        else:
            processes = [pid for pid, command in group_of(run.pid).items() if "pipelines.running.process_pool" in command]
            assert len(processes) == 2
            os.kill(processes[0], signal.SIGKILL)
            done = run.wait()
            assert done.returncode == 1
            assert "Traceback" not in done.stderr
            assert not list(output.glob(".captions-*")), "a launcher that lives on tidies up"
        wait_for(lambda: not group_of(run.pid), seconds=15)
    assert not (output / "_manifest.json").exists()
    return shards_in(output)


@pytest.mark.parametrize(
    ("kind", "workers", "victim"),
    [
        ("captions", "1", "group"),
        ("captions", "2", "launcher"),
        ("captions", "2", "worker"),
        ("arguments", "2", "worker"),
    ],
)
def test_killed_run_resumes_to_the_same_bytes(request, imagepivot, tmp_path, kind, workers, victim):
    words, output = request.getfixturevalue(kind), tmp_path / "o"
    imagepivot(*words(tmp_path / "whole", "--workers", "1"))
    expected = tree(tmp_path / "whole")
    kept = kill_after_a_shard(output, words(output, "--workers", workers), tmp_path / "process", victim)
    assert 0 < len(kept) < len(shards_in(tmp_path / "whole")), "killed in the middle"
    imagepivot(*words(output, "--workers", "1"))
    assert tree(output) == expected
    assert {name: stamp for name, stamp in shards_in(output).items() if name in kept} == kept
    assert validate(output) == []


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
