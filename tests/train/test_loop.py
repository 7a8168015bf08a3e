import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from schemas.errors import DatasetError, ImagepivotError, UsageError
from schemas.output import hold
from schemas.storage import Folder
from train.config.sections import ScheduleConfig, from_toml
from train.data.corpus import Corpus
from train.evaluation.evaluating import evaluate
from train.loop import Result, TrainJob, learning_rate, stop_reason, train
from train.material import open_material
from train.runs.checkpoints import BEST, LAST, Standing, read_checkpoint, write_checkpoint
from train.runs.run import open_run

CONFIG = """
[data]
portions = { en = ["comparable"], de = ["comparable"] }
[model]
embedding = 6
words = 4
[loss]
c2c_probability = 0.5
[optimizer]
learning_rate = 0.01
[schedule]
batch_size = 9
evaluate_every = 17
patience = 0
max_steps = 44
"""
ENGLISH = CONFIG.replace("c2c_probability = 0.5", "").replace(', de = ["comparable"]', "")
ORDER = CONFIG.replace("words = 4", 'words = 4\nshared = false\nsimilarity = "order"')
PARALLEL = ORDER.replace("c2c_probability = 0.5", 'objective = "parallel"')


@pytest.fixture
def run(toy, tmp_path):
    """Train on the toy; keyword arguments are fields of `TrainJob`."""

    def run(text: str = CONFIG, name: str = "run", *, corpus=toy, **fields):
        return train(TrainJob(from_toml(text, "test"), corpus, str(tmp_path / name), device="cpu", **fields))

    return run


@pytest.fixture(scope="module")
def finished(toy, tmp_path_factory) -> tuple[Path, Result]:
    """A run of `CONFIG` with the default seed, and what training it returned; never to be written to."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    return folder, train(TrainJob(from_toml(CONFIG, "test"), toy, str(folder), device="cpu"))


@pytest.fixture
def copied(finished, tmp_path) -> Path:
    """A copy of the finished run in the folder ``run``, where `run` finds it."""
    return shutil.copytree(finished[0], tmp_path / "run")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def weights(folder: Path, name: str = LAST) -> dict[str, torch.Tensor]:
    return dict(read_checkpoint(Folder(str(folder)), name).model)


def assert_equal(a, b):
    """Check that nested values are equal, bit for bit."""
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_equal(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            assert_equal(one, other)
    else:
        assert a == b


def events(folder: Path, event: str) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == event]


# --- learning --------------------------------------------------------------------------------------------------------


def test_it_learns(toy, run, tmp_path):
    text = CONFIG.replace("embedding = 6", "embedding = 24").replace("max_steps = 44", "max_steps = 120")
    result = run(text)
    assert result.standing.stopped == "steps"
    assert result.standing.step == 120
    scores = [line["score"] for line in events(tmp_path / "run", "evaluation")]
    assert max(scores) > scores[0] + 100
    assert result.standing.best_score == max(scores)
    assert result.standing.best_step == 17 * (1 + scores.index(max(scores))) or result.standing.best_step == 120
    losses = [line["loss"] for line in events(tmp_path / "run", "step")]
    assert np.mean(losses[-3:]) < 0.7 * np.mean(losses[:3])


def test_the_best_model_is_kept(toy, finished):
    folder, result = finished
    best = open_run(folder)
    material = open_material(best.config, toy, seed=0)
    results = evaluate(best.model, material.validation)
    assert sum(retrieval.sum_of_recalls for retrieval in results.values()) == result.standing.best_score
    assert best.step == result.standing.best_step


def test_only_monitored_languages_count(run, tmp_path):
    run(CONFIG + 'monitor = ["de"]')
    for line in events(tmp_path / "run", "evaluation"):
        assert line["score"] == line["de"]["sum_of_recalls"]
        assert line["en"]["sum_of_recalls"] > 0


def test_weights_depend_on_the_seed_alone(run, tmp_path):
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        state = torch.random.get_rng_state()
        run(name=name, seed=seed)
        assert torch.equal(torch.random.get_rng_state(), state)  # The global generator is untouched.
        torch.rand(1)
    assert_equal(weights(tmp_path / "a"), weights(tmp_path / "b"))
    assert not torch.equal(weights(tmp_path / "a")["images.weight"], weights(tmp_path / "c")["images.weight"])


def test_the_last_step_is_evaluated(finished):
    assert [line["step"] for line in events(finished[0], "evaluation")] == [17, 34, 44]


def test_an_epoch_ends_with_an_evaluation(run, tmp_path):
    run(ENGLISH.replace("evaluate_every = 17", "").replace("max_steps = 44", "max_epochs = 3"))
    # 40 images with three English captions, nine per batch: 14 batches, the last one short.
    assert [line["step"] for line in events(tmp_path / "run", "evaluation")] == [14, 28, 42]


def test_gradients_are_clipped_and_their_norm_is_written_down(finished, tmp_path, run):
    run(CONFIG.replace("learning_rate = 0.01", "learning_rate = 0.01\ngradient_clipping = 0.0"), "free")
    free, clipped = (events(folder, "step") for folder in (tmp_path / "free", finished[0]))
    assert free[0]["gradient_norm"] > 2.0  # Otherwise this test shows nothing.
    assert clipped[0]["gradient_norm"] > 2.0  # Before clipping.
    assert not torch.equal(weights(tmp_path / "free")["images.weight"], weights(finished[0])["images.weight"])


def test_warm_up_is_the_sum_then_the_max(run, tmp_path):
    for name, hinges in (("sum", '"sum"'), ("max", '"max"'), ("warm", '"max"\nwarmup_steps = 25')):
        run(CONFIG.replace("c2c_probability = 0.5", f"hinges = {hinges}"), name)
    sums, maxima, warm = ([line["loss"] for line in events(tmp_path / name, "step")] for name in ("sum", "max", "warm"))
    assert warm[:2] == sums[:2]  # Steps 10 and 20.
    assert warm[2] < 0.7 * sums[2]  # From step 26 on only the hardest negatives.
    assert maxima[0] < 0.7 * sums[0]


def test_bf16_learns_too(run, finished, tmp_path):
    run(precision="bf16")
    low, full = weights(tmp_path / "run"), weights(finished[0])
    assert all(value.dtype == torch.float32 for value in low.values())
    assert not torch.equal(low["images.weight"], full["images.weight"])
    assert (low["images.weight"] - full["images.weight"]).norm() < 0.2 * full["images.weight"].norm()


def test_unshared_encoders_have_only_the_words_of_their_language(run, tmp_path):
    run(PARALLEL)
    opened = open_run(tmp_path / "run")
    english, german = (encoder.words.weight for encoder in opened.model.sentences)
    tokens = opened.vocabulary.tokens
    assert len(english) == 4 + sum(token.startswith("en") for token in tokens)
    assert len(german) == 4 + sum(token.startswith("de") for token in tokens)


# --- stopping --------------------------------------------------------------------------------------------------------


def test_patience(run, tmp_path):
    text = CONFIG.replace("patience = 0", "patience = 2").replace("max_steps = 44", "").replace("0.01", "1e-9")
    result = run(text)
    # Nothing is learned at such a rate, so that no evaluation is better than the first.
    assert result.standing.stopped == "patience"
    assert (result.standing.best_step, result.standing.stale, result.standing.step) == (17, 2, 51)


@pytest.mark.parametrize(
    ("standing", "schedule", "reason"),
    [
        (Standing(step=9, stale=1), ScheduleConfig(patience=2, max_steps=10), ""),
        (Standing(step=9, stale=2), ScheduleConfig(patience=2, max_steps=10), "patience"),
        (Standing(step=9, stale=2), ScheduleConfig(patience=0, max_steps=10), ""),
        (Standing(step=10), ScheduleConfig(max_steps=10), "steps"),
        (Standing(step=10), ScheduleConfig(max_steps=0), ""),
        (Standing(step=19), ScheduleConfig(max_epochs=2), ""),
        (Standing(step=20), ScheduleConfig(max_epochs=2), "epochs"),
    ],
)
def test_stop_reason(standing, schedule, reason):
    assert stop_reason(standing, schedule, 10) == reason


def test_an_equal_score_does_not_count_as_better():
    standing = replace(Standing(), step=5).evaluated(100.0)
    assert (standing.best_score, standing.best_step, standing.stale) == (100.0, 5, 0)
    later = replace(standing, step=9).evaluated(100.0)
    assert (later.best_score, later.best_step, later.stale) == (100.0, 5, 1)
    assert replace(later, step=11).evaluated(100.5) == Standing(step=11, best_score=100.5, best_step=11)
    assert Standing(step=1).evaluated(0.0).best_step == 1  # Even a model without a single hit is better than none.


def test_learning_rate_falls():
    config = from_toml(CONFIG + "decay_epochs = 15\ndecay_factor = 0.1", "test")
    assert [learning_rate(config, epoch) for epoch in (0, 14)] == [0.01, 0.01]
    assert learning_rate(config, 15) == pytest.approx(0.001)
    assert learning_rate(config, 30) == pytest.approx(0.0001)
    assert learning_rate(from_toml(CONFIG, "test"), 1000) == 0.01


def test_the_rate_of_each_epoch_is_used(run, tmp_path):
    run(ENGLISH + "decay_epochs = 1\ndecay_factor = 0.5")
    # 14 steps per epoch: step 10 is in the first, 20 in the second, 30 in the third, 40 too.
    rates = [line["learning_rate"] for line in events(tmp_path / "run", "step")]
    assert rates == pytest.approx([0.01, 0.005, 0.0025, 0.0025])


# --- going on --------------------------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
import torch
from train.config.sections import from_toml
from train.data.corpus import Corpus
from train.loop import TrainJob, train

captions, features, vocabulary, output, text, step, where = sys.argv[1:]

def kill():
    os.kill(os.getpid(), signal.SIGKILL)

def watch(report):
    if where == "training" and report.step == int(step):
        kill()

def half(content, file, save=torch.save):
    if where == "saving" and content["standing"]["step"] == int(step) and content["sampler"] is not None:
        file.write(b"half of it")
        file.flush()
        kill()
    save(content, file)

torch.save = half
corpus = Corpus(captions, features, vocabulary)
train(TrainJob(from_toml(text, "test"), corpus, output, device="cpu", save_every=4, seed=5), watch)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "step", "where"),
    [(CONFIG, 34, "saving"), (PARALLEL, 30, "training")],
    ids=["c2c, saving", "parallel, training"],
)
def test_a_killed_run_resumes_to_the_same_weights(toy, run, tmp_path, text, step, where):
    output = tmp_path / "killed"
    arguments = [toy.captions, toy.features, toy.vocabulary, str(output), text, str(step), where]
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, *arguments], env=environment, cwd=Path(__file__).parents[2], check=False
    )
    assert killed.returncode == -signal.SIGKILL
    left = read_checkpoint(Folder(str(output)), LAST).standing.step
    assert 0 < left < step  # Killed in the middle, so that steps are done again.

    resumed = run(text, "killed", resume=True, seed=5, save_every=4)
    undisturbed = run(text, "undisturbed", seed=5, save_every=100)
    assert resumed.standing == undisturbed.standing
    for name in (LAST, BEST):
        ours, expected = (read_checkpoint(Folder(str(tmp_path / run)), name) for run in ("killed", "undisturbed"))
        for key in ours.__dataclass_fields__:
            assert_equal(getattr(ours, key), getattr(expected, key))
    assert (output / "log.jsonl").read_bytes() == (tmp_path / "undisturbed" / "log.jsonl").read_bytes()
    assert {path.name for path in output.iterdir()} == {
        "best.pt",
        "last.pt",
        "log.jsonl",
        "config.toml",
    }  # Nothing half-written.


def test_a_finished_run_stays_unchanged(run, finished, copied):
    before = contents(copied)
    assert run(resume=True).standing == finished[1].standing
    assert contents(copied) == before


def test_a_run_resumes_with_a_greater_budget(run, finished, tmp_path):
    run(CONFIG.replace("max_steps = 44", "max_steps = 20"))
    more = run(resume=True)
    assert more.standing.step == 44
    assert_equal(weights(tmp_path / "run"), weights(finished[0]))


def test_resume_without_a_run_begins_one(run):
    assert run(CONFIG.replace("max_steps = 44", "max_steps = 3"), resume=True).standing.step == 3


def test_a_run_is_not_overwritten(run, copied):
    before = contents(copied)
    with pytest.raises(UsageError, match="holds a run: give --resume to continue it, or choose another folder"):
        run()
    assert contents(copied) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text": CONFIG.replace("0.01", "0.02")}, r"optimizer.learning_rate: was 0.01, now 0.02"),
        ({"text": CONFIG.replace("words = 4", "words = 5")}, "model.words: was 4, now 5"),
        ({"text": CONFIG.replace('["comparable"], de', '["comparable", "translation"], de')}, "data.portions: was "),
        ({"seed": 1}, "seed: was 0, now 1"),
        ({"precision": "bf16"}, "precision: was fp32, now bf16"),
    ],
)
def test_another_run_is_refused(run, copied, change, message):
    before = contents(copied)
    with pytest.raises(DatasetError, match=f"holds another run .*{message}"):
        run(**change, resume=True)
    assert contents(copied) == before


def test_only_leftovers_of_killed_runs_are_deleted(run, tmp_path):
    theirs = ["sub/.part-00003.parquet.tmp-47", "data.tmp-old/x", ".notes.tmp-3", ".last.pt.tmp-x", "sub/.last.pt.tmp-123"]
    ours = [".last.pt.tmp-123", ".best.pt.tmp-1", ".config.toml.tmp-99", ".log.jsonl.tmp-5"]
    for name in [*theirs, *ours]:
        path = tmp_path / "run" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("half")
    run(CONFIG.replace("max_steps = 44", "max_steps = 2"))
    assert [name for name in theirs if not (tmp_path / "run" / name).exists()] == []
    assert [name for name in ours if (tmp_path / "run" / name).exists()] == []


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_without_its_last_checkpoint_is_not_overwritten(run, copied, resume):
    (copied / LAST).unlink()
    before = contents(copied)
    with pytest.raises(UsageError, match=r"holds a run, but has no last\.pt to resume from: choose another folder"):
        run(seed=1, resume=resume)
    assert contents(copied) == before


@pytest.mark.parametrize("steps", [17, 44])
def test_a_run_killed_between_its_two_checkpoints_resumes(run, tmp_path, monkeypatch, steps):
    write = write_checkpoint

    def killed(folder, name, checkpoint):
        if name == BEST:
            raise KeyboardInterrupt
        write(folder, name, checkpoint)

    text = CONFIG.replace("max_steps = 44", f"max_steps = {steps}")
    with monkeypatch.context() as patched:
        patched.setattr("train.loop.write_checkpoint", killed)
        with pytest.raises(KeyboardInterrupt):
            run(text)
    run(text, resume=True)
    run(text, "whole")
    for name in (LAST, BEST):
        ours, expected = (read_checkpoint(Folder(str(tmp_path / folder)), name) for folder in ("run", "whole"))
        for key in ours.__dataclass_fields__:
            assert_equal(getattr(ours, key), getattr(expected, key))


@pytest.mark.parametrize("lost", ["optimizer", "sampler"])
def test_a_checkpoint_that_cannot_be_resumed_is_refused(run, copied, lost):
    folder = Folder(str(copied))
    write_checkpoint(folder, LAST, replace(read_checkpoint(folder, LAST), **{lost: None}))
    with pytest.raises(DatasetError, match=rf"last\.pt has no state of the {lost} to resume from"):
        run(resume=True)


def test_a_folder_in_use_is_refused(run, tmp_path):
    with hold(Folder(str(tmp_path / "run"))), pytest.raises(DatasetError, match="is in use: another run is writing it"):
        run()


@pytest.mark.parametrize("name", ["captions", "features", "vocabulary", "extractor"])
def test_other_data_is_refused(run, copied, name):
    checkpoint = read_checkpoint(Folder(str(copied)), LAST)
    other = replace(checkpoint, fingerprints={**checkpoint.fingerprints, name: "0" * 64})
    write_checkpoint(Folder(str(copied)), LAST, other)
    with pytest.raises(
        DatasetError, match=f"holds another run .{name}: was 000000000000..., now {checkpoint.fingerprints[name][:12]}"
    ):
        run(resume=True)


# --- errors before anything is trained -------------------------------------------------------------------------------


def test_another_vocabulary_is_refused(run, toy, other_toy, tmp_path):
    with pytest.raises(DatasetError, match="was encoded with another vocabulary"):
        run(corpus=replace(toy, vocabulary=other_toy.vocabulary))
    assert not (tmp_path / "run").exists()


def test_missing_features_are_refused(run, toy, other_toy, tmp_path):
    with pytest.raises(DatasetError, match=r"12 of 12 images"):
        run(corpus=replace(toy, features=other_toy.features))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"compile": True}, "--compile needs a GPU"),
        ({"precision": "tf32"}, "precision 'tf32' needs a GPU"),
        ({"precision": "fp64"}, "precision is 'fp64', expected one of fp32, tf32, bf16"),
        ({"save_every": 0}, "save_every is 0, expected 1 or more"),
        ({"seed": -1}, "seed is -1, expected 0 or more"),
    ],
)
def test_impossible_arguments_are_refused(run, tmp_path, arguments, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        run(**arguments)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"output": ""}, "OUTPUT is missing: imagepivot train CONFIG OUTPUT"),
        ({"corpus": Corpus("", "f", "v")}, "--captions is missing"),
        ({"corpus": Corpus("c", "", "v")}, "--features is missing"),
        ({"corpus": Corpus("c", "f")}, "--vocabulary is missing"),
        ({"output": "gs://bucket/run"}, "'gs://bucket/run' is not a local folder: train into one"),
        ({"device": "gpu"}, "device is 'gpu', expected 'cpu'"),
    ],
)
def test_a_job_checks_its_values_when_it_is_created(toy, change, message):
    job = TrainJob(from_toml(CONFIG, "test"), toy, "run")
    with pytest.raises(UsageError, match=re.escape(message)):
        replace(job, **change)


def test_a_loss_that_is_not_finite_ends_the_run(run, tmp_path):
    with pytest.raises(
        ImagepivotError, match=r"the loss is nan and the norm of its gradient nan at step 10: the training has diverged"
    ):
        run(CONFIG.replace("learning_rate = 0.01", "learning_rate = 1e38"))
