"""The same bytes whatever the number of workers, the batches, and whether a run was killed in the middle."""

import os
import random
import signal
from pathlib import Path

import pytest
from PIL import Image

from schemas.writing.validation import validate
from tests.builders import tree
from tests.integration.processes import Started, group_of, start, wait_for

pytestmark = pytest.mark.cluster

SHARDS = 6
WORDS = ["A", "man", "Man", "dog", "(", "walks", "!", "'s", "Zwei", "Hunde", "é", "3"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """Folder with ``captions.tsv`` (some captions are empty) and ``images`` (some are broken)."""
    generator = random.Random(31)
    folder = tmp_path_factory.mktemp("determinism")
    lines = ["image_id\tlanguage\tportion\tsplit\ttext"]
    for number in range(12_000):
        text = " ".join(generator.choices(WORDS, k=generator.randrange(1, 12))) if number % 997 else " "
        language, split = generator.choice(["en", "de", "pt-BR"]), generator.choice(["train", "train", "val"])
        lines.append(f"img{generator.randrange(3000)}\t{language}\tcomparable\t{split}\t{text}")
    (folder / "captions.tsv").write_text("\n".join(lines) + "\n")
    (folder / "images").mkdir()
    for number in range(20):
        size = generator.randrange(40, 300), generator.randrange(40, 300)
        image = Image.frombytes("RGB", size, generator.randbytes(3 * size[0] * size[1]))
        image.save(folder / "images" / f"image{number}.{generator.choice(['jpg', 'png'])}")
    (folder / "images" / "empty.jpg").touch()
    (folder / "images" / "page.jpg").write_text("<html>")
    return folder


def captions_of(inputs: Path, output: Path, workers: int) -> list[object]:
    arguments = ["captions", inputs / "captions.tsv", output, "--format", "table", "--recipe", "moses-truecase"]
    return [*arguments, "--shards", SHARDS, "--max-failures", "100", "--workers", workers]


def features_of(inputs: Path, output: Path, workers: int, batch_size: int = 2) -> list[object]:
    arguments = ["features", inputs / "images", output, "--weights", "random:0", "--device", "cpu", "--max-failures", "2"]
    return [*arguments, "--shards", SHARDS, "--workers", workers, "--batch-size", batch_size]


COMMANDS = {"captions": captions_of, "features": features_of}


@pytest.fixture(scope="module")
def finished(inputs, imagepivot, tmp_path_factory) -> Path:
    """Folder with one dataset of every kind, made by one worker without interruption."""
    folder = tmp_path_factory.mktemp("finished")
    for kind, arguments in COMMANDS.items():
        imagepivot(*arguments(inputs, folder / kind, 1))
    imagepivot("vocabulary", folder / "captions", folder / "vocabulary", "--workers", "1")
    imagepivot("encode", folder / "captions", folder / "vocabulary", folder / "encoded", "--workers", "1")
    for path in folder.iterdir():
        assert validate(path) == []
    return folder


def test_captions_of_two_workers_equal_those_of_one(inputs, finished, imagepivot, tmp_path):
    imagepivot(*captions_of(inputs, tmp_path / "c", 2))
    files = tree(tmp_path / "c")
    assert files == tree(finished / "captions")
    assert len([name for name in files if name.startswith("_failures/")]) > 0
    assert {"_truecaser/en.model", "_truecaser/de.model", "_truecaser/pt-BR.model"} < set(files)


@pytest.mark.parametrize(
    ("command", "sources", "kind"),
    [("vocabulary", ("captions",), "vocabulary"), ("encode", ("captions", "vocabulary"), "encoded")],
)
def test_outputs_of_two_workers_equal_those_of_one(finished, imagepivot, tmp_path, command, sources, kind):
    imagepivot(command, *(finished / name for name in sources), tmp_path / kind, "--workers", "2")
    assert tree(tmp_path / kind) == tree(finished / kind)


@pytest.mark.parametrize(("workers", "batch_size"), [(1, 16), (2, 1)])
def test_features_do_not_depend_on_workers_and_batch_size(inputs, finished, imagepivot, tmp_path, workers, batch_size):
    imagepivot(*features_of(inputs, tmp_path / "f", workers, batch_size))
    assert tree(tmp_path / "f") == tree(finished / "features")


# --- killed and started again ----------------------------------------------------------------------------------------


def shards_in(folder: Path) -> list[Path]:
    """Return the finished shards: those with a record, which is written right after the shard."""
    return [path for path in sorted(folder.glob("part-*.parquet")) if (folder / ".records" / f"{path.stem}.jsonl").exists()]


def wait_for_a_shard(folder: Path, run: Started) -> None:
    wait_for(lambda: shards_in(folder) or not run.runs)
    assert run.runs, f"the run ended too early: {run.wait().stderr}"


def stamps(paths) -> dict[str, tuple[int, int]]:
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in paths}


needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc to see processes")


@needs_proc
@pytest.mark.parametrize(
    ("kind", "workers", "victim"),
    [("captions", 1, "group"), ("features", 1, "group"), ("features", 2, "worker")],
)
def test_killed_run_resumes_to_the_same_bytes(inputs, finished, imagepivot, tmp_path, kind, workers, victim):
    output = tmp_path / "o"
    with start(*COMMANDS[kind](inputs, output, workers), folder=tmp_path / "process") as run:
        wait_for_a_shard(output, run)
        assert not (output / "_manifest.json").exists(), "the manifest comes last"
        if victim == "group":
            run.send(signal.SIGKILL)
        else:
            processes = [pid for pid, command in group_of(run.pid).items() if "pipelines.running.process_pool" in command]
            assert len(processes) == workers
            os.kill(processes[0], signal.SIGKILL)
            done = run.wait()
            assert done.returncode == 1
            assert "Traceback" not in done.stderr
        wait_for(lambda: not group_of(run.pid), seconds=15)
    assert not (output / "_manifest.json").exists()
    kept = stamps(shards_in(output))
    assert 0 < len(kept) < SHARDS, "killed in the middle"
    imagepivot(*COMMANDS[kind](inputs, output, 1))
    assert tree(output) == tree(finished / kind)
    assert {name: stamp for name, stamp in stamps(shards_in(output)).items() if name in kept} == kept
    assert validate(output) == []


@needs_proc
@pytest.mark.parametrize("victim", ["launcher", "worker"])
def test_pieces_of_captions_do_not_outlive_the_next_run(inputs, finished, imagepivot, tmp_path, victim):
    output = tmp_path / "o"
    with start(*captions_of(inputs, output, 2), folder=tmp_path / "process") as run:
        wait_for(lambda: list(output.glob(".captions-*")) or not run.runs)
        if victim == "launcher":
            os.kill(run.pid, signal.SIGKILL)
        else:
            os.kill(next(pid for pid, command in group_of(run.pid).items() if "process_pool" in command), signal.SIGKILL)
            assert run.wait().returncode == 1
        wait_for(lambda: not group_of(run.pid), seconds=15)
    # Only a launcher that lives on can tidy up.
    assert bool(list(output.glob(".captions-*"))) == (victim != "worker")
    imagepivot(*captions_of(inputs, output, 1))
    assert tree(output) == tree(finished / "captions")
