"""Array jobs as schedulers run them: commands at the same time in one folder, killed at any moment and given again."""

import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml
from PIL import Image

from schemas.writing.own_names import PUBLISHING_NAME
from schemas.writing.validation import validate
from tests.integration.processes import Started, group_of, start, wait_for

SHARDS = 6
PAGE = (Path(__file__).parents[2] / "docs" / "array-jobs.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    generator = random.Random(8)
    folder = tmp_path_factory.mktemp("array") / "photos"
    folder.mkdir()
    for number in range(24):
        size = generator.randrange(40, 300), generator.randrange(40, 300)
        Image.frombytes("RGB", size, generator.randbytes(3 * size[0] * size[1])).save(folder / f"image{number}.png")
    (folder / "empty.jpg").touch()
    (folder / "page.jpg").write_text("<html>")
    return folder


def features_of(images: Path, output: Path, task: str = "", *more: object) -> list[object]:
    arguments = [
        "features",
        images,
        output,
        "--weights",
        "random:0",
        "--device",
        "cpu",
        "--shards",
        SHARDS,
        "--batch-size",
        "2",
    ]
    return [*arguments, "--max-failures", "2", *(["--task", task] if task else []), *more]


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def shards_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("part-*.parquet"))


@pytest.fixture(scope="module")
def plain(images, imagepivot, tmp_path_factory) -> dict[str, bytes]:
    """The files of one plain run."""
    folder = tmp_path_factory.mktemp("plain") / "o"
    imagepivot(*features_of(images, folder))
    return snapshot(folder)


def codes_of(images: Path, output: Path, tasks: Sequence[str], folder: Path) -> list[int]:
    """Run tasks at the same time, each in a folder of its own, and return their exit codes."""
    with ExitStack() as stack:
        runs = [
            stack.enter_context(start(*features_of(images, output, task), folder=folder / str(number)))
            for number, task in enumerate(tasks)
        ]
        return [run.wait(300).returncode for run in runs]


# --- at the same time ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.cluster
def test_tasks_at_the_same_time_and_a_commit(images, plain, imagepivot, tmp_path):
    output = tmp_path / "o"
    assert codes_of(images, output, ["0/3", "1/3", "2/3"], tmp_path) == [0, 0, 0]
    assert "task 0/3: " in (tmp_path / "0" / "stdout").read_text()
    assert not (output / "_manifest.json").exists()
    done = imagepivot("commit", output, "--max-failures", "2")
    assert "features: 24 rows in 6 shards" in done.stdout
    assert snapshot(output) == plain
    assert validate(output) == []
    done = imagepivot("commit", output, "--max-failures", "2")
    assert "the dataset was committed before: nothing to do" in done.stderr
    assert snapshot(output) == plain


@pytest.mark.slow
@pytest.mark.cluster
def test_copies_of_one_task_at_the_same_time(images, plain, imagepivot, tmp_path):
    output = tmp_path / "o"
    assert codes_of(images, output, ["1/2"] * 3, tmp_path) == [0, 0, 0]
    imagepivot(*features_of(images, output, "0/2"))
    imagepivot("commit", output, "--max-failures", "2")
    assert snapshot(output) == plain


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.parametrize("seed", range(2))
def test_tasks_that_are_killed_at_random_moments_and_given_again(images, plain, imagepivot, tmp_path, seed):
    generator, output = random.Random(seed), tmp_path / "o"
    with start(*features_of(images, output, "0/2"), folder=tmp_path / "other") as other:
        for attempt in range(3):
            before = len(list(output.rglob("*")))
            with start(*features_of(images, output, "1/2"), folder=tmp_path / str(attempt)) as run:
                wait_for(lambda before=before, run=run: len(list(output.rglob("*"))) > before or not run.runs)
                run.process.join(generator.random())
                run.send(signal.SIGKILL)
                wait_for(lambda run=run: not group_of(run.pid), seconds=15)
        assert other.wait(300).returncode == 0
    assert imagepivot("commit", output, code=(0, 1, 3)).returncode in (1, 3)
    imagepivot(*features_of(images, output, "1/2"))
    imagepivot("commit", output, "--max-failures", "2")
    assert snapshot(output) == plain


# --- one or the other ------------------------------------------------------------------------------------------------


def stopped(run: Started, output: Path) -> None:
    """Wait for a shard, and let the run wait then, but not while it publishes, when others would wait for it."""
    wait_for(lambda: shards_in(output) or not run.runs)
    assert run.runs, f"the run ended too early: {run.wait().stderr}"
    run.send(signal.SIGSTOP)
    while (output / PUBLISHING_NAME).exists():
        run.send(signal.SIGCONT)
        time.sleep(0.01)
        run.send(signal.SIGSTOP)


@pytest.mark.slow
@pytest.mark.cluster
def test_while_a_task_runs_a_plain_run_and_a_commit_are_refused_and_another_task_is_not(images, plain, imagepivot, tmp_path):
    output = tmp_path / "o"
    with start(*features_of(images, output, "0/2"), folder=tmp_path / "process") as run:
        stopped(run, output)
        try:
            for arguments in (features_of(images, output), features_of(images, output, "", "--overwrite"), ["commit", output]):
                done = imagepivot(*arguments, code=1)
                assert f"Error: {str(output)!r} is in use: another run is writing it." in done.stderr
            imagepivot(*features_of(images, output, "1/2"))
        finally:
            run.send(signal.SIGCONT)
        assert run.wait().returncode == 0
    imagepivot("commit", output, "--max-failures", "2")
    assert snapshot(output) == plain


@pytest.mark.slow
@pytest.mark.cluster
def test_while_a_plain_run_writes_a_task_is_refused(images, plain, imagepivot, tmp_path):
    output = tmp_path / "o"
    with start(*features_of(images, output), folder=tmp_path / "process") as run:
        stopped(run, output)
        try:
            done = imagepivot(*features_of(images, output, "0/2"), code=1)
            assert f"Error: {str(output)!r} is in use: another run is writing it." in done.stderr
            done = imagepivot("commit", output, code=1)
            assert f"Error: {str(output)!r} is not a dataset" in done.stderr
        finally:
            run.send(signal.SIGCONT)
        assert run.wait().returncode == 0
    assert snapshot(output) == plain


# --- what the command says -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.cluster
def test_what_a_task_and_a_commit_say(images, plain, imagepivot, tmp_path):
    output = tmp_path / "o"
    done = imagepivot(*features_of(images, output, "1/3", "--dry-run"))
    assert "2 shards to do, 0 finished" in done.stdout
    assert not output.exists()
    codes = []
    for index in (0, 1):
        done = imagepivot(*features_of(images, output, f"{index}/3", "--max-failures", "0", "--log-json"), code=(0, 3))
        end = json.loads(done.stderr.splitlines()[-1])
        failed = sum(end["counts"]["failed"].values())
        assert (end["event"], end["counts"]["shards"]) == ("end", 2)
        codes.append((done.returncode, 3 if failed else 0))
    assert all(code == expected for code, expected in codes)
    done = imagepivot("commit", output, code=1)
    assert "cannot be committed, 2 of 6 shards are not there (missing: 2,5). Give 1 of the 3 tasks again" in done.stderr
    done = imagepivot("inspect", output, code=1)
    assert "is not a dataset yet: the tasks of an array job are writing it" in done.stderr
    imagepivot(*features_of(images, output, "2/3"))
    assert "0 of them made now" in imagepivot(*features_of(images, output, "2/3")).stdout
    done = imagepivot("commit", output, code=3)
    assert "2 inputs failed: 1 empty, 1 not_an_image" in done.stderr
    assert snapshot(output) == plain


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task", "3"], "--task is '3', expected I/N"),
        (["--task", "/64"], "check the variable with the number of the task"),
        (["--task", "6/6"], "tasks are numbered from 0"),
        (["--task", "0/7"], "--task is '0/7', and there are 6 shards"),
        (["--task", "0/2", "--overwrite"], "--overwrite with --task would delete the shards of the other tasks"),
        (["--task", "0/2", "--", "--runner=DataflowRunner"], "a task makes its shards on the machine on which it is started"),
        (["--task", "0/2", "--dry-run", "--", "--runner=DataflowRunner"], "Leave out one of the two"),
    ],
)
def test_wrong_usage(images, imagepivot, tmp_path, arguments, message):
    done = imagepivot(*features_of(images, tmp_path / "o"), *arguments, code=2)
    assert message in done.stderr
    assert not (tmp_path / "o").exists()


@pytest.mark.slow
def test_the_commit_needs_no_extra():
    script = (
        "import sys\n"
        "for name in ('torch', 'torchvision', 'apache_beam', 'PIL', 'ijson', 'urllib3', 'sacremoses'): sys.modules[name] = None\n"
        "sys.argv = ['imagepivot', 'commit', 'nowhere']\n"
        "import imagepivot\n"
        "imagepivot.command()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, "is not a dataset" in done.stderr) == (1, True), done.stderr


# --- the scripts of the documentation --------------------------------------------------------------------------------


def blocks(section: str, language: str) -> list[str]:
    text = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return [block for name, block in BLOCK.findall(text) if name == language]


@pytest.mark.parametrize(("section", "scripts"), [("Slurm", 3), ("Kubernetes", 1), ("AWS Batch", 1), ("Google Batch", 1)])
def test_scripts_are_bash(section, scripts):
    found = blocks(section, "bash")
    assert len(found) == scripts
    for script in found:
        done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")


def texts(value: object) -> Iterator[str]:
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from texts(item)
    if isinstance(value, str):
        yield value


@pytest.mark.parametrize(
    ("section", "variable"),
    [
        ("Kubernetes", "JOB_COMPLETION_INDEX"),
        ("AWS Batch", "AWS_BATCH_JOB_ARRAY_INDEX"),
        ("Google Batch", "BATCH_TASK_INDEX"),
    ],
)
def test_files_for_schedulers_hold_commands_that_the_program_takes(section, variable, imagepivot, tmp_path):
    """The variables are replaced, and the images are missing: everything else about the lines is right."""
    values = [json.loads(block) for block in blocks(section, "json")]
    values += [value for block in blocks(section, "yaml") for value in yaml.safe_load_all(block)]
    assert len(values) >= 2
    [line] = {text for text in texts(values) if text.startswith("exec imagepivot features ")}
    words = shlex.split(line.replace(f"${variable}", "63"))
    assert words[-2:] == ["--task", "63/64"]
    assert int(words[words.index("--shards") + 1]) >= 64
    words[3:5] = [str(tmp_path / "none"), str(tmp_path / "o")]
    assert "none" in imagepivot(*words[2:], code=1).stderr
    assert "64" in {str(number) for value in values for number in numbers(value)} or "size=64" in PAGE


def numbers(value: object) -> Iterator[object]:
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from numbers(item)
    if isinstance(value, int) or (isinstance(value, str) and value.isdigit()):
        yield value


STAND_IN = """#!{python}
import imagepivot
imagepivot.command()
"""
SBATCH = r"""#!/bin/bash
# Runs what it is given at once: an array as processes at the same time, and a job that depends on one only if that ended well.
set -eu
script=${{!#}}
array=$(sed -n 's/^#SBATCH --array=0-//p' "$script")
if [[ -z $array ]]; then
    [[ "$*" == *--dependency=afterok:4711* && $(cat failed) == 0 ]] && bash "$script"
    exit
fi
pids=()
for index in $(seq 0 "$array"); do SLURM_ARRAY_TASK_ID=$index bash "$script" >"out-$index" 2>&1 & pids+=($!); done
failed=0
for pid in "${{pids[@]}}"; do wait "$pid" || failed=$((failed + 1)); done
echo $failed >failed
echo 4711
"""


@pytest.mark.slow
@pytest.mark.cluster
def test_the_scripts_for_slurm_run_with_a_stand_in_for_the_scheduler(images, imagepivot, tmp_path, monkeypatch):
    tasks, commit, submit = blocks("Slurm", "bash")
    fewer = tasks.replace("--array=0-63", "--array=0-1").replace("/64", "/2").replace("--shards 256", "--shards 4")
    (tmp_path / "bin").mkdir()
    for name, text in (("imagepivot", STAND_IN.format(python=sys.executable)), ("sbatch", SBATCH.format())):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "features.sbatch").write_text(fewer)
    (tmp_path / "commit.sbatch").write_text(commit)
    (tmp_path / "photos").symlink_to(images)
    monkeypatch.setenv("IMAGEPIVOT_FEATURES_WEIGHTS", "random:0")
    monkeypatch.setenv("IMAGEPIVOT_FEATURES_DEVICE", "cpu")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    done = subprocess.run(["bash", "-c", submit], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    logs = "".join(path.read_text() for path in tmp_path.glob("out-*"))
    assert done.returncode == 0, (done.stderr, logs)
    assert "features: 24 rows in 4 shards in features" in done.stdout
    imagepivot("features", "photos", "plain", "--shards", "4", "--max-failures", "2", cwd=tmp_path)
    assert snapshot(tmp_path / "features") == snapshot(tmp_path / "plain")
