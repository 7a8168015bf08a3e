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

from schemas.writing.file_names import PUBLISHING_NAME
from schemas.writing.validation import validate
from tests.builders import tree
from tests.fake_extractors import colours, colours_until_a_shard, use_colours
from tests.integration.processes import Started, group_of, start, wait_for

SHARDS = 6
PROJECT = Path(__file__).parents[2]
PAGE = (PROJECT / "docs" / "how-to" / "array-jobs.md").read_text(encoding="utf-8")
DONE = "features: 24 rows in 6 shards"
MISSING = re.compile(r"[0-5] of 6 shards are done; missing [0-5,-]+: run tasks? [0-2,-]+ of [23] again\n")
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
    options = f"--weights random:0 --device cpu --shards {SHARDS} --batch-size 2 --max-failures 2".split()
    return ["features", images, output, *options, *(["--task", task] if task else []), *more]


def times_of(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def shards_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("part-*.parquet"))


@pytest.fixture(scope="module")
def plain(images, imagepivot, tmp_path_factory) -> dict[str, bytes]:
    """The files of one plain run."""
    folder = tmp_path_factory.mktemp("plain") / "o"
    imagepivot(*features_of(images, folder))
    return tree(folder)


def codes_of(images: Path, output: Path, tasks: Sequence[str], folder: Path) -> list[int]:
    """Run tasks at the same time, each in a folder of its own, and return their exit codes."""
    with ExitStack() as stack:
        runs = [
            stack.enter_context(start(*features_of(images, output, task), folder=folder / str(number)))
            for number, task in enumerate(tasks)
        ]
        return [run.wait(300).returncode for run in runs]


# --- at the same time ------------------------------------------------------------------------------------------------


@pytest.mark.cluster
def test_tasks_at_the_same_time_end_in_a_committed_dataset(images, plain, imagepivot, tmp_path):
    output = tmp_path / "o"
    assert codes_of(images, output, ["0/3", "1/3", "2/3"], tmp_path) == [0, 0, 0]
    told = [(tmp_path / str(index) / "stdout").read_text() for index in range(3)]
    committed = [DONE in text for text in told]
    assert any(committed)
    assert [MISSING.fullmatch(text) is None for text in told] == committed
    assert tree(output) == plain
    assert validate(output) == []
    times = times_of(output)
    for task in ("0/3", "1/4"):
        assert DONE in imagepivot(*features_of(images, output, task)).stdout
    assert times_of(output) == times


@pytest.mark.cluster
def test_copies_of_one_task_at_the_same_time(images, plain, imagepivot, tmp_path):
    output = tmp_path / "o"
    assert codes_of(images, output, ["1/2"] * 3, tmp_path) == [0, 0, 0]
    told = {(tmp_path / str(number) / "stdout").read_text() for number in range(3)}
    assert told == {"3 of 6 shards are done; missing 0,2,4: run task 0 of 2 again\n"}
    assert DONE in imagepivot(*features_of(images, output, "0/2")).stdout
    assert tree(output) == plain


@pytest.mark.cluster
@pytest.mark.parametrize("seed", range(2))
def test_killed_array_task_rerun_completes_the_dataset(images, plain, imagepivot, tmp_path, seed):
    generator, output = random.Random(seed), tmp_path / "o"
    with start(*features_of(images, output, "0/2"), folder=tmp_path / "other") as other:
        for attempt in range(3):
            before = len(list(output.rglob("*")))
            with start(*features_of(images, output, "1/2"), folder=tmp_path / str(attempt)) as run:
                wait_for(lambda before=before, run=run: len(list(output.rglob("*"))) > before or not run.runs)
                run.process.join(generator.random())
                if run.runs:
                    run.send(signal.SIGKILL)
                wait_for(lambda run=run: not group_of(run.pid), seconds=15)
        assert other.wait(300).returncode == 0
    assert DONE in imagepivot(*features_of(images, output, "1/2")).stdout
    assert tree(output) == plain


@pytest.mark.cluster
def test_array_of_64_tasks_with_two_killed_lists_the_missing_tasks(imagepivot, tmp_path, monkeypatch):
    photos, output = tmp_path / "photos", tmp_path / "o"
    photos.mkdir()
    for number in range(100):
        Image.new("RGB", (2, 2), (number, 2 * number, 255 - number)).save(photos / f"image{number}.png")
    arguments = ("features", photos, output, "--device", "cpu", "--shards", "64", "--task")

    def run(killed: Sequence[int], others: Sequence[int]) -> list[str]:
        with ExitStack() as stack:
            run = [
                stack.enter_context(start(*arguments, f"{index}/64", folder=tmp_path / str(index), before=before))
                for before, indices in ((colours_until_a_shard, killed), (colours, others))
                for index in indices
            ]
            ended = [task.wait(300) for task in run]
        assert [done.returncode for done in ended] == [-signal.SIGKILL] * len(killed) + [0] * len(others)
        return [done.stdout for done in ended]

    told = run([3, 17], [index for index in range(64) if index not in (3, 17)])
    last = "62 of 64 shards are done; missing 3,17: run tasks 3,17 of 64 again\n"
    assert last in told
    assert f"\n{last}```" in PAGE
    assert len(shards_in(output)) == 62
    assert not (output / "_manifest.json").exists()
    assert any("features: 100 rows in 64 shards" in text for text in run([], [3, 17]))
    use_colours(monkeypatch)
    imagepivot("features", photos, tmp_path / "plain", "--device", "cpu", "--shards", "64", "--workers", "1")
    assert tree(output) == tree(tmp_path / "plain")


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


@pytest.mark.cluster
def test_while_a_task_runs_a_plain_run_is_refused_and_another_task_is_not(images, plain, imagepivot, tmp_path):
    output = tmp_path / "o"
    with start(*features_of(images, output, "0/2"), folder=tmp_path / "process") as run:
        stopped(run, output)
        try:
            for more in ((), ("--overwrite",)):
                done = imagepivot(*features_of(images, output, "", *more), code=1)
                assert f"Error: {str(output)!r} is in use" in done.stderr
            assert MISSING.fullmatch(imagepivot(*features_of(images, output, "1/2")).stdout)
        finally:
            run.send(signal.SIGCONT)
        done = run.wait()
        assert (done.returncode, DONE in done.stdout) == (0, True)
    assert tree(output) == plain


# --- what the command says -------------------------------------------------------------------------------------------


@pytest.mark.cluster
def test_array_task_reports_missing_and_damaged_shards(images, plain, imagepivot, tmp_path):
    output = tmp_path / "o"
    done = imagepivot(*features_of(images, output, "1/3", "--dry-run"))
    assert "2 shards to do, 0 finished" in done.stdout
    assert not output.exists()
    for index, told in (
        (1, "2 of 6 shards are done; missing 0,2-3,5: run tasks 0,2 of 3 again\n"),
        (0, "4 of 6 shards are done; missing 2,5: run task 2 of 3 again\n"),
    ):
        done = imagepivot(*features_of(images, output, f"{index}/3", "--max-failures", "0", "--log-json"))
        end = json.loads(done.stderr.splitlines()[-1])
        assert (end["event"], end["status"], end["exit_code"], end["counts"]) == ("end", "done", 0, {})
        assert done.stdout == f"{end['message']}\n" == told
    assert "is not a dataset" in imagepivot("inspect", output, code=1).stderr
    damaged = shards_in(output)[0]
    damaged.write_bytes(damaged.read_bytes()[:-1])
    done = imagepivot(*features_of(images, output, "2/3"), code=1)
    assert "cannot be committed, 5 of 6 shards are done; damaged 0: run task 0 of 3 again" in done.stderr
    done = imagepivot(*features_of(images, output, "0/3", "--max-failures", "0", "--log-json"), code=3)
    *_, remark, end = map(json.loads, done.stderr.splitlines())
    assert remark["message"].startswith("2 inputs failed: 1 empty, 1 not_an_image. ")
    assert (end["event"], end["status"], end["exit_code"]) == ("end", "failures", 3)
    assert end["counts"] == {"rows": 24, "shards": 6, "failed": {"empty": 1, "not_an_image": 1}}
    assert tree(output) == plain


def test_task_on_a_runner_is_refused_by_a_dry_run_too(images, imagepivot, tmp_path):
    words = ("--task", "0/2", "--dry-run", "--", "--runner=DataflowRunner")
    done = imagepivot(*features_of(images, tmp_path / "o"), *words, code=2)
    assert "--task is '0/2', and --runner" in done.stderr
    assert not (tmp_path / "o").exists()


@pytest.mark.slow
def test_task_without_a_shard_to_write_commits_without_torch_and_beam(images, plain, imagepivot, tmp_path, monkeypatch):
    for name, data in plain.items():
        if name != "_manifest.json":
            (tmp_path / "o" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "o" / name).write_bytes(data)
    for name in ("torch", "torchvision", "apache_beam"):
        monkeypatch.setitem(sys.modules, name, None)
    assert DONE in imagepivot(*features_of(images, tmp_path / "o", "0/2")).stdout
    assert tree(tmp_path / "o") == plain


# --- the scripts of the documentation --------------------------------------------------------------------------------


def blocks(section: str, language: str) -> list[str]:
    text = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return [block for name, block in BLOCK.findall(text) if name == language]


def leaves(value: object) -> Iterator[str]:
    """Yield the texts and numbers in a JSON value, as text."""
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from leaves(item)
    else:
        yield str(value)


@pytest.mark.parametrize(
    ("section", "variable"),
    [("Kubernetes", "JOB_COMPLETION_INDEX"), ("AWS Batch", "AWS_BATCH_JOB_ARRAY_INDEX"), ("Google Batch", "BATCH_TASK_INDEX")],
)
def test_scheduler_files_contain_valid_commands(section, variable, imagepivot, tmp_path):
    values = [json.loads(block) for block in blocks(section, "json")]
    if section == "Kubernetes":
        values = list(yaml.safe_load_all((PROJECT / "docker/kubernetes/features.yaml").read_text()))
    assert values
    [line] = {text for text in leaves(values) if text.startswith("exec imagepivot features ")}
    words = shlex.split(line.replace(f"${variable}", "63"))
    assert words[-2:] == ["--task", "63/64"]
    assert int(words[words.index("--shards") + 1]) >= 64
    words[3:5] = [str(tmp_path / "none"), str(tmp_path / "o")]
    assert "none" in imagepivot(*words[2:], code=1).stderr
    assert "64" in leaves(values) or "size=64" in PAGE


def programs(folder: Path, **texts: str) -> dict[str, str]:
    """Write programs of the shell into a folder; return the environment in which they are found."""
    for name, text in texts.items():
        (folder / "bin").mkdir(exist_ok=True)
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / "bin" / name).chmod(0o755)
    return {**os.environ, "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}", "SLURM_ARRAY_TASK_ID": "63"}


@pytest.mark.slow
@pytest.mark.parametrize("is_container", [False, True])
def test_signal_of_slurm_reaches_the_program(is_container, imagepivot, tmp_path):
    """It goes to the script alone, B:, and leaves nothing running; what the program does then, test_signals tries."""
    tasks, *_, in_container = blocks("Slurm", "bash")
    plain = in_container.replace("apptainer exec --nv worker.sif ", "")
    assert plain in tasks
    assert "\n#SBATCH --array=0-63\n" in tasks
    assert "\n#SBATCH --signal=B:TERM@60\n" in tasks
    (tmp_path / "features.sbatch").write_text(tasks.replace(plain, in_container) if is_container else tasks)
    apptainer = '[ "$1 $2 $3" = "exec --nv worker.sif" ] || exit 255\nshift 3\nexec "$@"'
    environment = programs(tmp_path, imagepivot='echo "$@" >said~\nmv said~ said\nexec sleep 60', apptainer=apptainer)
    words = ["bash", "features.sbatch"]
    with subprocess.Popen(words, cwd=tmp_path, env=environment, start_new_session=True) as process:
        wait_for((tmp_path / "said").exists)
        process.terminate()
        assert process.wait(10) == -signal.SIGTERM
        assert not group_of(process.pid)
    words = (tmp_path / "said").read_text().split()
    assert words == shlex.split(plain.replace("$SLURM_ARRAY_TASK_ID", "63"))[2:]
    words[1:3] = [str(tmp_path / "none"), str(tmp_path / "o")]
    assert "none" in imagepivot(*words, code=1).stderr


IMAGEPIVOT = f"""exec {sys.executable} - "$@" <<'EOF'
import os, signal
import imagepivot
from schemas.writing.attempts import Attempt
from tests.fake_extractors import colours
colours()
publish, end = Attempt.publish, os.environ.get("END_" + os.environ.get("SLURM_ARRAY_TASK_ID", ""))
if end:
    Attempt.publish = lambda *fields: (publish(*fields), os.kill(os.getpid(), getattr(signal, end)))
imagepivot.command()
EOF"""
SBATCH = """echo "$@" >>said
for script; do :; done
case "$*" in
    --array=*) tasks=$(echo "${1#--array=}" | tr , " ") ;;
    *features.sbatch) tasks="0 1 2" ;;
    *) tasks= && bash "$script" >out-complete 2>&1; echo $? >code-complete ;;
esac
for task in $tasks; do
    (SLURM_ARRAY_TASK_ID=$task bash "$script" >"out-$task" 2>&1; echo $? >"code-$task") &
done
wait
echo 4711"""


@pytest.mark.cluster
def test_slurm_scripts_complete_a_dataset_after_a_kill_and_a_signal(images, imagepivot, tmp_path, monkeypatch):
    """A task is killed after its first shard and another gets the scheduler's signal; they run again as the page says."""
    tasks, complete, submit, again, *_ = blocks("Slurm", "bash")
    tasks = tasks.replace("/64", "/3").replace("--shards 256", "--shards 6")
    for name, text in (("features", tasks), ("complete", complete)):
        (tmp_path / f"{name}.sbatch").write_text(text)
    (tmp_path / "photos").symlink_to(images)
    environment = {**programs(tmp_path, imagepivot=IMAGEPIVOT, sbatch=SBATCH), "PYTHONPATH": str(PROJECT)}
    del environment["SLURM_ARRAY_TASK_ID"]

    def run(script: str, **ends: str) -> dict[str, str]:
        words = ["bash", "-c", script]
        subprocess.run(words, cwd=tmp_path, env={**environment, **ends}, check=True, timeout=300)
        return {path.name: path.read_text() for path in tmp_path.glob("*-*")}

    logs = run(submit, END_0="SIGKILL", END_2="SIGTERM")
    assert [logs[f"code-{task}"] for task in (0, 1, 2, "complete")] == ["137\n", "0\n", "143\n", "1\n"], logs
    assert logs["out-2"].endswith("\nstopped; finished shards are kept, the same command continues from here\n")
    assert "'features' is not a dataset" in logs["out-complete"]
    assert 3 <= len(shards_in(tmp_path / "features")) < 6
    logs = run(again.replace("3,17", "0,2"))
    assert [logs[f"code-{task}"] for task in range(3)] == ["0\n"] * 3, logs
    assert run("sbatch complete.sbatch")["code-complete"] == "0\n"
    said = ["--parsable features.sbatch", "--dependency=afterany:4711 complete.sbatch", "--array=0,2 features.sbatch"]
    assert (tmp_path / "said").read_text().splitlines() == [*said, "complete.sbatch"]
    use_colours(monkeypatch)
    imagepivot("features", "photos", "plain", "--shards", "6", "--max-failures", "2", "--workers", "1", cwd=tmp_path)
    assert tree(tmp_path / "features") == tree(tmp_path / "plain")
