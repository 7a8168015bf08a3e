"""Two processes that ``torchrun`` starts through the command: they stop together, and the user reads each error."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from schemas.storage.folder import Folder
from tests.integration.processes import wait_for
from tests.train.trainings import CONFIG, FOREVER, events
from train.runs.checkpoints import LAST, read_checkpoint

FLAGS = ("--nproc-per-node=2", "--local-ranks-filter=0")
"""Two processes, of which the first shows its output."""

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

# The command; the second process reads other features.
COMMAND = """
import os, sys
import imagepivot

if os.environ["RANK"] == "1" and len(sys.argv) > 1 and "OTHER" in os.environ:
    sys.argv[sys.argv.index("--features") + 1] = os.environ["OTHER"]
imagepivot.command()
"""


def torchrun(folder: Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    """Start the command in two processes."""
    (folder / "command.py").write_text(COMMAND)
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", *FLAGS, "command.py", *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "300", "PYTHONPATH": str(Path(__file__).parents[2]), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.fixture
def data(toy, tmp_path) -> list[str]:
    (tmp_path / "own.toml").write_text(CONFIG)
    (tmp_path / "forever.toml").write_text(FOREVER)
    return ["--captions", toy.captions, "--features", toy.features, "--vocabulary", toy.vocabulary, "--device", "cpu"]


@pytest.mark.parametrize("whole", [True, False])
def test_two_processes_stop_at_the_same_step(data, tmp_path, whole):
    process = torchrun(tmp_path, "train", "forever.toml", "run", *data, "--save-every", "20")
    try:
        wait_for(lambda: (tmp_path / "run" / "last.pt").exists() or process.poll() is not None)
        if whole:
            os.kill(process.pid, signal.SIGINT)
        else:
            [second] = [
                int(path.parent.name)
                for path in Path("/proc").glob("[0-9]*/environ")
                if _reads(path, f"{os.sep}{tmp_path.name}", b"\0RANK=1\0")
            ]
            os.kill(second, signal.SIGTERM)
        _, err = process.communicate(timeout=200)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    step = read_checkpoint(Folder(str(tmp_path / "run")), LAST).progress.step
    assert err.count(f"stopped at step {step:,}; last.pt holds it, the same command with --resume goes on\n") == 1
    assert err.count("stopped") == 1
    assert not list((tmp_path / "run").glob(".*"))
    assert len(events(tmp_path / "run", "step")) == step // 10


def _reads(path: Path, folder: str, text: bytes) -> bool:
    """Whether a process works in a folder, and has a variable."""
    try:
        return str(path.with_name("cwd").readlink()).endswith(folder) and text in path.read_bytes()
    except OSError:
        return False


@pytest.mark.parametrize(
    ("arguments", "message", "code"),
    [
        (("train", "vsep", "run"), "there is no preset 'vsep'", 2),
        (("train", "own.toml", "run", "--captions", "a", "--features", "b", "--vocabulary", "c"), "'a' is not a dataset", 1),
    ],
)
def test_shared_error_is_reported_by_the_first_process_to_fail(data, tmp_path, arguments, message, code):
    process = torchrun(tmp_path, *arguments)
    _, err = process.communicate(timeout=200)
    assert process.returncode != 0
    assert message in err
    assert f"traceback : {message}" in err  # Where `torchrun` would show the traceback of a bug.
    codes = {int(number) for number in re.findall(r"exitcode\s*: (-?[0-9]+)", err)}
    assert code in codes
    assert codes <= {code, -signal.SIGTERM, 128 + signal.SIGTERM}  # torchrun ends whoever is still on the way to the error.


def test_error_of_one_rank_is_reported(data, tmp_path):
    process = torchrun(tmp_path, "train", "own.toml", "run", *data, "--log-json", OTHER="nowhere")
    _, err = process.communicate(timeout=200)
    assert process.returncode != 0
    assert "traceback : 'nowhere' is not a dataset" in err
    events = [json.loads(line) for line in err.splitlines() if line.startswith("{")]
    assert [event["event"] for event in events].count("end") == 1
    assert (events[-1]["event"], events[-1]["status"] in ("failed", "stopped")) == ("end", True)
