"""The same bytes whatever the number of workers, the batches, and whether a run was killed in the middle."""

import contextlib
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
from PIL import Image

from pipelines.running.runner import Execution
from pipelines.text.encoding import EncodeJob, encode_captions
from pipelines.text.vocabulary import VocabularyJob, build_vocabulary
from schemas.validation import validate

pytestmark = pytest.mark.slow

SHARDS = 6
WORDS = ["A", "man", "Man", "dog", "(", "walks", "!", "'s", "Zwei", "Hunde", "é", "3"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """Folder with ``captions.tsv`` (some captions are empty) and ``images`` (some are broken)."""
    generator = random.Random(31)
    folder = tmp_path_factory.mktemp("determinism")
    lines = ["image_id\tlanguage\tportion\tsplit\ttext"]
    for number in range(20_000):
        text = " ".join(generator.choices(WORDS, k=generator.randrange(1, 12))) if number % 997 else " "
        language, split = generator.choice(["en", "de", "pt-BR"]), generator.choice(["train", "train", "val"])
        lines.append(f"img{generator.randrange(3000)}\t{language}\tcomparable\t{split}\t{text}")
    (folder / "captions.tsv").write_text("\n".join(lines) + "\n")
    (folder / "images").mkdir()
    for number in range(12):
        size = generator.randrange(40, 300), generator.randrange(40, 300)
        image = Image.frombytes("RGB", size, generator.randbytes(3 * size[0] * size[1]))
        image.save(folder / "images" / f"image{number}.{generator.choice(['jpg', 'png'])}")
    (folder / "images" / "empty.jpg").touch()
    (folder / "images" / "page.jpg").write_text("<html>")
    return folder


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def captions_of(inputs: Path, output: Path, workers: int) -> list[str]:
    arguments = ["captions", inputs / "captions.tsv", output, "--format", "table", "--recipe", "moses-truecase"]
    return [*map(str, arguments), "--shards", str(SHARDS), "--max-failures", "100", "--workers", str(workers)]


def features_of(inputs: Path, output: Path, workers: int, batch_size: int = 2) -> list[str]:
    arguments = ["features", inputs / "images", output, "--weights", "random:0", "--device", "cpu", "--max-failures", "2"]
    return [*map(str, arguments), "--shards", str(SHARDS), "--workers", str(workers), "--batch-size", str(batch_size)]


COMMANDS = {"captions": captions_of, "features": features_of}


@pytest.fixture(scope="module")
def finished(inputs, imagepivot, tmp_path_factory) -> dict[str, dict[str, bytes]]:
    """The files of each kind, made without interruption by one worker."""
    folder = tmp_path_factory.mktemp("finished")
    for kind, arguments in COMMANDS.items():
        imagepivot(*arguments(inputs, folder / kind, 1))
    captions, vocabulary = str(folder / "captions"), str(folder / "vocabulary1")
    for workers in (1, 2):
        execution = Execution(workers=workers)
        build_vocabulary(VocabularyJob(captions, str(folder / f"vocabulary{workers}")), execution)
        encode_captions(EncodeJob(captions, vocabulary, str(folder / f"encoded{workers}")), execution)
    for path in folder.iterdir():
        assert validate(path) == []
    return {path.name: snapshot(path) for path in folder.iterdir()}


def test_two_workers_make_the_same_captions(inputs, finished, imagepivot, tmp_path):
    imagepivot(*captions_of(inputs, tmp_path / "c", 2))
    assert snapshot(tmp_path / "c") == finished["captions"]
    assert len([name for name in finished["captions"] if name.startswith("failures/")]) > 0
    assert {"truecaser/en.model", "truecaser/de.model", "truecaser/pt-BR.model"} < set(finished["captions"])


def test_two_workers_make_the_same_vocabulary(finished):
    assert finished["vocabulary1"] == finished["vocabulary2"]
    assert set(finished["vocabulary1"]) == {"manifest.json", "part-00000-of-00001.parquet", "vocabulary.txt"}


def test_two_workers_make_the_same_ids(finished):
    assert finished["encoded1"] == finished["encoded2"]
    assert len(finished["encoded1"]) == SHARDS + 1


@pytest.mark.parametrize(("workers", "batch_size"), [(1, 16), (2, 1)])
def test_workers_and_batches_make_the_same_features(inputs, finished, imagepivot, tmp_path, workers, batch_size):
    imagepivot(*features_of(inputs, tmp_path / "f", workers, batch_size))
    assert snapshot(tmp_path / "f") == finished["features"]


# --- killed and started again ----------------------------------------------------------------------------------------


def wait_for(condition, seconds: float = 60.0):
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.01)
    return result


@contextlib.contextmanager
def started(script: str, arguments: list[str]):
    """Starts the command as the head of a process group of its own; kills what is left of the group."""
    process = subprocess.Popen(
        [script, *arguments], start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def group(leader: int) -> set[int]:
    """The processes of a process group that run (are no zombies)."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, process_group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(process_group) == leader and state != "Z":
                found.add(int(stat.parent.name))
    return found


def shards_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("part-*.parquet"))


def wait_for_a_shard(folder: Path, process: subprocess.Popen) -> None:
    wait_for(lambda: shards_in(folder) or process.poll() is not None)
    assert process.poll() is None, f"the run ended too early: {process.communicate()[1]}"


def stamps(paths) -> dict[str, tuple[int, int]]:
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in paths}


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc to see processes")
@pytest.mark.parametrize(
    ("kind", "workers", "victim"),
    [("captions", 2, "group"), ("features", 1, "group"), ("features", 2, "launcher")],
)
def test_a_run_that_is_killed_goes_on_where_it_was(inputs, finished, imagepivot, script, tmp_path, kind, workers, victim):
    output = tmp_path / "o"
    arguments = COMMANDS[kind](inputs, output, workers)
    with started(script, arguments) as process:
        wait_for_a_shard(output, process)
        assert not (output / "manifest.json").exists(), "the manifest comes last"
        if victim == "group":
            os.killpg(process.pid, signal.SIGKILL)
        else:
            assert len(group(process.pid)) >= 1 + workers
            os.kill(process.pid, signal.SIGKILL)
        wait_for(lambda: not group(process.pid), seconds=15)
    assert not (output / "manifest.json").exists()
    kept = stamps(shards_in(output))
    assert 0 < len(kept) < SHARDS, "killed in the middle"
    imagepivot(*arguments)
    assert snapshot(output) == finished[kind]
    assert {name: stamp for name, stamp in stamps(shards_in(output)).items() if name in kept} == kept
    assert validate(output) == []


def test_a_second_run_is_refused_while_one_writes(inputs, finished, imagepivot, script, tmp_path):
    output = tmp_path / "o"
    arguments = captions_of(inputs, output, 2)
    with started(script, arguments) as process:
        wait_for_a_shard(output, process)
        before = stamps(shards_in(output))
        os.killpg(process.pid, signal.SIGSTOP)
        try:
            second = imagepivot(*arguments, code=1)
            assert f"Error: {str(output)!r} is in use: another run is writing it." in second.stderr
            third = imagepivot(*arguments, "--overwrite", code=1)
            assert "is in use" in third.stderr
            assert stamps(shards_in(output)).items() >= before.items()
        finally:
            os.killpg(process.pid, signal.SIGCONT)
        assert process.wait(120) == 0
    assert snapshot(output) == finished["captions"]


@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_keeps_what_is_finished_and_says_so(inputs, script, tmp_path, workers):
    output = tmp_path / "o"
    with started(script, features_of(inputs, output, workers)) as process:
        wait_for_a_shard(output, process)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 130
        assert "Traceback" not in errors
        assert "stopped; finished shards are kept, the same command goes on from here" in errors
    assert shards_in(output)
