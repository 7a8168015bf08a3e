import hashlib
import multiprocessing
import os
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from schemas.dataset import open_dataset
from schemas.errors import DatasetError, UsageError
from schemas.fingerprints import sha256_of_json
from schemas.storage.folder import Folder
from schemas.writing.locks import lock_folder
from tests.train.runs.test_checkpoints import ADVICE, damages
from tests.train.trainings import (
    CONFIG,
    DAN,
    MHA_D,
    MLMME,
    PARALLEL,
    SCAN,
    assert_equal,
    assert_same_checkpoints,
    contents,
    lasting_log,
    weights,
    with_other_features,
)
from train.config.sections import from_toml
from train.jobs import TrainJob
from train.loop import training
from train.loop.training import train
from train.runs.checkpoints import BEST, LAST, read_checkpoint, write_checkpoint
from train.runs.run import open_run


def test_open_run(write_run, toy):
    path = write_run(languages=("de", "en"), similarity="order", seed=3)
    state = torch.random.get_rng_state()
    run = open_run(path)
    assert run.step == 7
    assert repr(run) == f"Run({str(path)!r}, kind='vse', languages=('de', 'en'), step=7)"
    assert (run.seed, run.precision, run.captions) == (3, "fp32", {"text": {"recipe": "raw"}})
    assert run.config.data.languages == run.model.languages == ("de", "en")
    assert run.model.similarity == "order"
    assert not run.model.training
    assert run.vocabulary.tokens[:4] == ("<pad>", "<start>", "<end>", "<unk>")
    assert run.vocabulary.encode([run.vocabulary.tokens[9]]) == [1, 9, 2]
    assert set(run.fingerprints) == {"captions", "features", "vocabulary", "extractor"}
    assert torch.equal(torch.random.get_rng_state(), state)
    again = open_run(path)
    assert all(torch.equal(a, b) for a, b in zip(run.model.parameters(), again.model.parameters(), strict=True))


def test_open_run_of_other_folders_is_refused(write_run, tmp_path):
    with pytest.raises(DatasetError, match=r"is not a run: it holds no best\.pt"):
        open_run(tmp_path / "nothing")
    with pytest.raises(DatasetError, match=r"is not a run: it holds no last\.pt"):
        open_run(write_run(), checkpoint="last")


def train_until_killed(job: TrainJob, step: int, where: str) -> None:
    """Train, and kill this process after a step, in the middle of writing its last checkpoint, or before its best one."""

    def watch(report):
        if where == "training" and report.step == step:
            os.kill(os.getpid(), signal.SIGKILL)

    def half(folder, name, checkpoint):
        if where == "saving" and (name, checkpoint.progress.step) == (LAST, step):
            with folder.replace(name) as file:
                file.write(b"half of it")
                file.flush()
                os.kill(os.getpid(), signal.SIGKILL)
        if where == "between" and (name, checkpoint.progress.step) == (BEST, step):
            os.kill(os.getpid(), signal.SIGKILL)
        write_checkpoint(folder, name, checkpoint)

    training.write_checkpoint = half
    train(job, watch)


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("text", "data", "step", "where"),
    [
        (CONFIG, "toy", 34, "saving"),
        (CONFIG, "toy", 17, "between"),
        (CONFIG, "toy", 44, "between"),
        (PARALLEL, "toy", 30, "training"),
        (MHA_D, "toy_regions", 30, "training"),
        (DAN, "toy_regions", 30, "training"),
        (MLMME, "toy", 30, "training"),
        (SCAN, "toy_regions", 30, "training"),
    ],
    ids=["saving", "between", "between, ended", "parallel", "mha-d", "dan", "mlmme", "scan"],
)
def test_killed_run_resumes_to_the_same_weights(request, train_toy, tmp_path, text, data, step, where):
    corpus = request.getfixturevalue(data)
    output = tmp_path / "killed"
    job = TrainJob(from_toml(text, "test"), corpus, str(output), device="cpu", save_every=4, seed=5)
    killed = multiprocessing.get_context("forkserver").Process(target=train_until_killed, args=(job, step, where))
    killed.start()
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    left = read_checkpoint(Folder(str(output)), LAST).progress.step
    assert 0 < left < step + (where == "between")  # Killed in the middle, so that steps are done again.

    resumed = train_toy(text, "killed", corpus=corpus, resume=True, seed=5, save_every=4, curves=True)
    undisturbed = train_toy(text, "undisturbed", corpus=corpus, seed=5, save_every=100, curves=True)
    assert resumed.progress == undisturbed.progress
    assert_same_checkpoints(output, tmp_path / "undisturbed")
    assert lasting_log(output) == lasting_log(tmp_path / "undisturbed")
    for name in ("metrics.csv", "curves.png", "ranks.parquet"):
        assert (output / name).read_bytes() == (tmp_path / "undisturbed" / name).read_bytes(), name
    files = {"best.pt", "last.pt", "log.jsonl", "config.toml", "metrics.csv", "curves.png", "ranks.parquet"}
    assert {path.name for path in output.iterdir()} == files  # Nothing half-written.


@pytest.mark.parametrize("resume", [False, True])
def test_finished_run_is_up_to_date(train_toy, finished_run, copied_run, resume):
    before, stamps = contents(copied_run), {path: path.stat().st_mtime_ns for path in copied_run.iterdir()}
    assert train_toy(resume=resume).progress == finished_run[1].progress
    assert contents(copied_run) == before
    assert resume or {path: path.stat().st_mtime_ns for path in copied_run.iterdir()} == stamps


@pytest.mark.parametrize("change", [BEST, "metrics.csv", "config.toml", "unfinished", "max_steps = 45"])
def test_run_is_not_overwritten(train_toy, copied_run, change):
    if change == "unfinished":
        checkpoint = read_checkpoint(Folder(str(copied_run)), LAST)
        unfinished = replace(checkpoint, progress=replace(checkpoint.progress, stop_reason=""))
        write_checkpoint(Folder(str(copied_run)), LAST, unfinished)
    elif not change.startswith("max_steps"):
        (copied_run / change).unlink()
    before = contents(copied_run)
    with pytest.raises(UsageError, match="holds a run: give --resume to continue it, or choose another folder"):
        train_toy(CONFIG.replace("max_steps = 44", change) if change.startswith("max_steps") else CONFIG)
    assert contents(copied_run) == before


@pytest.mark.parametrize("resume", [False, True])
def test_run_is_not_written_into_a_dataset(train_toy, tmp_path, resume):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "_manifest.json").write_text("{}", encoding="utf-8")
    with pytest.raises(UsageError, match="/run' holds a dataset: choose another folder for the run; nothing was changed"):
        train_toy(resume=resume)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["_manifest.json"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text": CONFIG.replace("0.01", "0.02")}, r"optimizer.learning_rate: was 0.01, now 0.02"),
        ({"text": CONFIG.replace('["comparable"], de', '["comparable", "translation"], de')}, "data.portions: was "),
        ({"seed": 1, "resume": False}, "seed: was 0, now 1"),
        ({"precision": "bf16"}, "precision: was fp32, now bf16"),
    ],
)
def test_another_run_is_refused(train_toy, copied_run, change, message):
    before = contents(copied_run)
    with pytest.raises(DatasetError, match=f"holds another run .*{message}"):
        train_toy(**{"resume": True, **change})
    assert contents(copied_run) == before


def test_only_leftovers_of_killed_runs_are_deleted(train_toy, tmp_path):
    theirs = ["sub/.part-00003.parquet.tmp-47", "data.tmp-old/x", ".notes.tmp-3", ".last.pt.tmp-x", "sub/.last.pt.tmp-123"]
    ours = [".last.pt.tmp-123", ".best.pt.tmp-1", ".config.toml.tmp-99", ".log.jsonl.tmp-5"]
    for name in [*theirs, *ours]:
        path = tmp_path / "run" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("half")
    train_toy(CONFIG.replace("max_steps = 44", "max_steps = 2"))
    assert [name for name in theirs if not (tmp_path / "run" / name).exists()] == []
    assert [name for name in ours if (tmp_path / "run" / name).exists()] == []


@pytest.mark.parametrize("resume", [False, True])
def test_run_without_its_last_checkpoint_is_not_overwritten(train_toy, copied_run, resume):
    (copied_run / LAST).unlink()
    before = contents(copied_run)
    with pytest.raises(UsageError, match=r"holds a run, but has no last\.pt to resume from: choose another folder"):
        train_toy(seed=1, resume=resume)
    assert contents(copied_run) == before


@pytest.mark.cluster
@pytest.mark.parametrize("name", ["last.pt", "log.jsonl", "config.toml", "best.pt"])
def test_resumed_training_refuses_a_damaged_file_or_does_without_it(train_toy, finished_run, tmp_path, capfd, name):
    train_toy(CONFIG.replace("max_steps = 44", "max_steps = 30"), "begun")
    ways = list(damages((tmp_path / "begun" / name).read_bytes(), 0))
    for way, content in ways if name in ("last.pt", "log.jsonl") else ways[-3:]:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        shutil.copytree(tmp_path / "begun", tmp_path / "run")
        (tmp_path / "run" / name).write_bytes(content)
        before, message = contents(tmp_path / "run"), ""
        try:
            train_toy(resume=True)
        except DatasetError as error:
            message = str(error)
        if message:
            assert re.fullmatch(rf".*{re.escape(name)}.*", message), way  # In one line.
            assert not any(word in message for word in ADVICE), message
            assert contents(tmp_path / "run") == before, way  # Nothing was lost: what is damaged can be replaced.
        else:
            assert name != "last.pt" or way.startswith(("bit", "zeros", "more")), way
            assert_equal(weights(tmp_path / "run"), weights(finished_run[0]))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("lost", ["optimizer", "sampler"])
def test_resume_without_training_state_is_refused(train_toy, copied_run, lost):
    folder = Folder(str(copied_run))
    write_checkpoint(folder, LAST, replace(read_checkpoint(folder, LAST), **{lost: None}))
    with pytest.raises(DatasetError, match=rf"last\.pt has no state of the {lost} to resume from"):
        train_toy(resume=True)


def test_folder_in_use_is_refused(train_toy, tmp_path):
    with lock_folder(Folder(str(tmp_path / "run"))), pytest.raises(DatasetError, match="is in use"):
        train_toy()


def test_resume_with_changed_content_is_refused(toy, train_toy, copied_run, tmp_path):
    before = contents(copied_run)
    other = with_other_features(toy, tmp_path / "other")
    digests = [
        sha256_of_json([hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(Path(folder).glob("part-*"))])[:12]
        for folder in (toy.features, other.features)
    ]
    message = rf"features has changed since step 44 .*was {digests[0]}\.\.\., now {digests[1]}.* --allow-changed-content"
    with pytest.raises(DatasetError, match=message):
        train_toy(corpus=other, resume=True)
    assert contents(copied_run) == before


@pytest.mark.slow
def test_resume_with_allowed_changed_content_trains_on_it(toy, tmp_path, train_toy):
    train_toy(CONFIG.replace("max_steps = 44", "max_steps = 20"))
    other, remarks = with_other_features(toy, tmp_path / "other"), []
    job = TrainJob(from_toml(CONFIG, "test"), other, str(tmp_path / "run"), device="cpu", curves=False, resume=True)
    assert train(replace(job, allow_changed_content=True), on_warning=remarks.append).progress.step == 44
    assert [remark.partition(" (")[0] for remark in remarks] == ["the content of features has changed since step 20"]
    was, now = (open_dataset(corpus.features).manifest.content_sha256 for corpus in (toy, other))
    stored = read_checkpoint(Folder(str(tmp_path / "run")), LAST).contents
    assert (stored["features"], stored["features until step 20"]) == (now, was)
    train(job)  # From here on it is a run of the new content.
    assert read_checkpoint(Folder(str(tmp_path / "run")), LAST).contents == stored


@pytest.mark.parametrize("name", ["captions", "features", "vocabulary", "extractor"])
def test_other_data_is_refused(train_toy, copied_run, name):
    checkpoint = read_checkpoint(Folder(str(copied_run)), LAST)
    other = replace(checkpoint, fingerprints={**checkpoint.fingerprints, name: "0" * 64})
    write_checkpoint(Folder(str(copied_run)), LAST, other)
    with pytest.raises(DatasetError, match=f"{name}: was 000000000000..., now {checkpoint.fingerprints[name][:12]}"):
        train_toy(resume=True)
