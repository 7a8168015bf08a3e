"""A disk that is full, or files that may not grow: one clear error, and the last checkpoint is kept."""

import json
from pathlib import Path

import pytest

from schemas.errors import DatasetError
from schemas.storage.folder import Folder
from tests.train.trainings import CONFIG, assert_equal, weights
from train.config.sections import from_toml
from train.data.memmap import mapped_array
from train.evaluation.embedding import embed
from train.jobs import EmbedJob, TrainJob
from train.loop.training import train
from train.reports.report_plot import plot_report
from train.reports.reproduce_report import read_report
from train.reports.row_results import write_result
from train.runs.checkpoints import LAST, read_checkpoint
from train.runs.log import LOG, RunLog

pytestmark = pytest.mark.cluster

FULL = "the disk is full: free some space"


def fill(folder: Path) -> Path:
    """Take all the space that is left."""
    path = folder / "ballast"
    with path.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            return path


def job_of(toy, output: Path, **fields) -> TrainJob:
    return TrainJob(from_toml(CONFIG, "test"), toy, str(output), device="cpu", save_every=4, **fields)


@pytest.mark.parametrize("tensorboard", [False, True])
def test_full_disk_keeps_the_last_checkpoint(toy, disk, finished_run, tensorboard, capfd):
    folder = disk(10_000)
    output = folder / "run"

    def watch(report) -> None:
        if report.step == 20:
            disk(sum(path.stat().st_size for path in output.rglob("*") if path.is_file()) // 1024 + 20)

    with pytest.raises(DatasetError, match=rf"cannot use '.*/run/.*': {FULL}"):
        train(job_of(toy, output, tensorboard=tensorboard), watch)
    assert capfd.readouterr() == ("", "")
    assert read_checkpoint(Folder(str(output)), LAST).progress.step == 17  # That of step 20 found no space.
    assert not [path for path in output.iterdir() if path.name.startswith(".")]
    disk(10_000)
    assert train(job_of(toy, output, tensorboard=tensorboard, resume=True)).progress.step == 44
    assert_equal(weights(output), weights(finished_run[0]))


def test_full_disk_while_logging(disk):
    folder = disk(64)
    with RunLog(folder, step=0, tensorboard=False) as log:
        log.write("step", 10, {"loss": 1.0})
        fill(folder)
        with pytest.raises(DatasetError, match=rf"cannot use '.*/{LOG}': {FULL}"):
            log.write("step", 20, {"text": "x" * 100_000})
        (folder / "ballast").unlink()
    with RunLog(folder, step=20, tensorboard=False) as log:
        log.write("step", 30, {})
    assert [json.loads(line)["step"] for line in (folder / LOG).read_text().splitlines()] == [10, 30]


def test_full_disk_while_mapping_features(disk):
    """The space is taken first: a page of a mapped file that finds none would end the process."""
    folder = disk(64)
    with pytest.raises(DatasetError, match=rf"cannot use '.*\.npy': {FULL}"):
        mapped_array(folder / "map", ["a"], (1000, 1000), "float32", lambda array: None)
    assert list((folder / "map").iterdir()) == []


def test_full_disk_while_embedding(toy, write_run, disk, capfd):
    folder = disk(16)
    with pytest.raises(DatasetError, match=FULL):
        embed(EmbedJob(run=write_run(), output=str(folder / "e"), features=toy.features, captions=toy.captions, device="cpu"))
    assert capfd.readouterr() == ("", "")


def test_full_disk_while_reporting(disk):
    folder = disk(8)
    fill(folder)
    with pytest.raises(DatasetError, match=FULL):
        write_result(folder / "seed-0.json", {"text": "x" * 10_000})
    with pytest.raises(DatasetError, match=FULL):
        plot_report(read_report(str(folder), "gella2017"), folder / "plot.png")
    assert [path.name for path in folder.iterdir()] == ["ballast"]
