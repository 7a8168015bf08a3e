"""Signals at any moment, from the first import to the last line: one line, the right exit code, and the same command goes on.

``IMAGEPIVOT_FUZZ_MINUTES=10`` goes on for ten minutes with each command that continues, or until ``IMAGEPIVOT_TEST_MOMENTS``, and
``pytest -s`` prints how they ended; ``IMAGEPIVOT_FUZZ_SEED`` is the first moment, to see one again.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.builders import stored
from tests.integration.conftest import PROGRESS
from tests.train.conftest import write_toy
from tests.train.trainings import CONFIG, assert_same_checkpoints

MOMENTS = int(os.environ.get("IMAGEPIVOT_TEST_MOMENTS", "1"))
SEED = 7
KEPT = "stopped; finished shards are kept, the same command continues from here\n"
# The command as its script starts it; says when it can be stopped. Before that, Python itself is starting.
START = """
import contextlib, sys, imagepivot
from pipelines.commands import signals
original = signals.stoppable

@contextlib.contextmanager
def announced():
    with original():
        print("ready", flush=True)
        yield

signals.stoppable = announced
imagepivot.command()
"""

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def folder(tmp_path_factory, imagepivot) -> Path:
    """Folder with raw captions, an array, many images and datasets, large enough to be interrupted."""
    folder = tmp_path_factory.mktemp("signals")
    rows = [f"img{number}\ta dog runs over the grass, number {number}" for number in range(60_000)]
    (folder / "table.tsv").write_text("\n".join(["image_id\ttext", *rows]) + "\n")
    np.save(folder / "array.npy", np.random.default_rng(0).standard_normal((20_000, 256)).astype(np.float32))
    (folder / "array.txt").write_text("".join(f"{number}\n" for number in range(20_000)))
    for number in range(5_000):
        path = folder / "many" / str(number // 100) / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    imagepivot("import", "array.npy", "features", "--name", "x", cwd=folder)
    return folder


def begin(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start a command as the head of a process group, as a terminal does."""
    process = subprocess.Popen(
        [sys.executable, "-c", START, *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Wait for the end; exit code, standard output, and standard error without progress."""
    out, err = process.communicate(timeout=300)
    return process.returncode, out, PROGRESS.sub("", err)


def send(process: subprocess.Popen[str], number: signal.Signals) -> None:
    if process.poll() is None:
        os.killpg(process.pid, number)


COMMANDS = {
    "captions": ("captions", "table.tsv", "OUT", "--format", "table", "--shards", "4", "--workers", "1"),
    "captions with workers": ("captions", "table.tsv", "OUT", "--format", "table", "--shards", "4", "--workers", "2"),
    "listing": ("features", "many", "OUT", "--weights", "random:0", "--device", "cpu", "--dry-run"),
    "import": ("import", "array.npy", "OUT", "--name", "x"),
    "export": ("export", "features", "OUT", "--format", "npy"),
    "validate": ("validate", "features"),
}
KEEPING = ("captions", "captions with workers", "listing", "import")


@pytest.mark.parametrize("name", COMMANDS)
def test_ctrl_c_at_any_moment(folder, tmp_path, name):
    def begin_into(output: str) -> subprocess.Popen[str]:
        return begin(folder, *(str(tmp_path / output) if word == "OUT" else word for word in COMMANDS[name]))

    started = time.monotonic()
    assert finish(begin_into("whole"))[0] == 0
    seconds = time.monotonic() - started
    moments = random.Random(f"{SEED} {name}")
    for number in range(MOMENTS):
        process = begin_into(str(number))
        time.sleep(moments.uniform(0, seconds))
        for _ in range(1 + number % 2):
            send(process, signal.SIGINT)
            time.sleep(0.1)
        code, out, err = finish(process)
        if code in (0, -signal.SIGINT) and not err:
            continue  # It had printed its results: then Python is ending, and no more ours.
        assert code == 130
        assert err == (KEPT if name in KEEPING else "stopped\n")
        assert "Traceback" not in out
    # Whatever the last interrupt left behind, the same command goes on from there.
    assert finish(begin_into(str(MOMENTS - 1)))[0] == 0


@pytest.fixture(scope="module")
def continued(folder) -> dict[str, tuple[str, ...]]:
    """Return commands that work for some seconds, and continue what an earlier one left."""
    generator = np.random.default_rng(0)
    (folder / "images").mkdir()
    for number in range(40):
        pixels = generator.integers(256, size=(300, 400, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"images/{number}.png")
    (folder / "config.toml").write_text(CONFIG.replace("max_steps = 44", "max_steps = 300"))
    toy = write_toy(folder / "toy")
    data = ("--captions", toy.captions, "--features", toy.features, "--vocabulary", toy.vocabulary)
    return {
        "features": ("features", "images", "OUT", "--weights", "random:0", "--device", "cpu", "--shards", "6"),
        "captions": COMMANDS["captions with workers"],
        "train": ("train", "config.toml", *data, "OUT", "--device", "cpu", "--no-curves", "--no-tensorboard"),
    }


@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", ["features", "captions", "train"])
def test_signals_at_random_moments_damage_nothing(folder, tmp_path, imagepivot, continued, name):
    def words(output: str) -> list[str]:
        return [str(tmp_path / output) if word == "OUT" else word for word in continued[name]]

    started = time.monotonic()
    assert finish(begin(folder, *words("whole")))[0] == 0
    seconds = time.monotonic() - started
    until = time.monotonic() + 60 * float(os.environ.get("IMAGEPIVOT_FUZZ_MINUTES", "0"))
    endings, latest = Counter[str](), 0.0
    for number in count(int(os.environ.get("IMAGEPIVOT_FUZZ_SEED", "0"))):
        moments = random.Random(f"{number} {name}")
        sent = moments.choice((signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
        started, output = time.monotonic(), tmp_path / str(number)
        process = begin(folder, *words(str(number)))
        time.sleep(moments.uniform(0, seconds))
        process.send_signal(sent)
        asked = time.monotonic()
        code, out, err = finish(process)
        latest = max(latest, time.monotonic() - asked)
        where = f"moment {number}, {sent.name}: {code}\n{out}\n{err}"
        if code in (0, -sent):  # It had printed its results.
            seconds = min(seconds, time.monotonic() - started)  # The first run may have been slower.
        else:
            assert code == 128 + sent, where
            assert err.splitlines()[-1].startswith("stopped"), where
            assert err.count("stopped") == 1, where
            assert "Traceback" not in out + err, where
            endings[sent.name] += 1
        resumed = ("--resume",) if name == "train" and list(output.glob("*.pt")) else ()
        imagepivot(*words(str(number)), *resumed, cwd=folder)
        if name == "train":
            assert_same_checkpoints(output, tmp_path / "whole")
        else:
            assert _published(output) == _published(tmp_path / "whole"), where
        shutil.rmtree(output)
        if sum(endings.values()) >= max(MOMENTS, 3) and time.monotonic() > until:
            break
    print(f"{name}: {dict(endings)} until moment {number}; the longest end took {latest:.1f} s of a run of {seconds:.1f} s")


def _published(output: Path) -> dict[str, bytes]:
    return {path: data for path, data in stored(output).items() if not path.startswith(".")}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)])
def test_other_signals_end_a_run_in_the_same_way(folder, tmp_path, number, code):
    ended = (0, "", "")
    for attempt in range(5):  # On a busy machine the run may be over before it is noticed that it has begun.
        output = tmp_path / f"out-{attempt}"
        arguments = ("captions", "table.tsv", str(output), "--format", "table", "--shards", "4", "--workers", "2")
        process = begin(folder, *arguments)
        deadline = time.monotonic() + 120
        while not list(output.glob(".*lock*")) and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(0.5)  # Workers start.
        process.send_signal(number)
        ended = finish(process)
        if ended[0]:
            break
    assert ended == (code, "", KEPT)  # Workers hold the streams open: without them they are at their end.
    assert list(output.glob("*")) == [path for path in output.glob("*") if path.name.startswith("part-")]


def test_ignored_signal_stays_ignored(folder, tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = begin(folder, *(str(tmp_path / "out") if word == "OUT" else word for word in COMMANDS["import"]))
    finally:
        signal.signal(signal.SIGHUP, before)
    process.send_signal(signal.SIGHUP)
    assert finish(process)[0] == 0


@pytest.mark.parametrize("arguments", [("features", "--help"), ("inspect", "features", "--rows", "2000"), ("--version",)])
def test_closed_pipe_ends_the_command(folder, arguments):
    process = subprocess.Popen(
        [sys.executable, "-c", "import imagepivot; imagepivot.command()", *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    assert process.wait(60) == 141
