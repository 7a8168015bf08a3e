import json
import re
from dataclasses import replace

import pytest
import torch

from schemas.errors import DatasetError, UsageError
from schemas.storage.folder import Folder
from tests.train.trainings import (
    CONFIG,
    ENGLISH,
    PARALLEL,
    assert_equal,
    evaluate_ensemble,
    events,
    lasting_log,
    rewrite,
    weights,
)
from train.config.sections import from_toml
from train.evaluation.evaluation import measure_validation
from train.evaluation.ranks import read_ranks
from train.jobs import DivergedError, TrainJob
from train.loop import schedules, training
from train.loop.training import train
from train.loop.training_data import TrainingInputs, load_training_inputs
from train.losses import terms_of
from train.models.catalogue import build_model
from train.runs.checkpoints import BEST, LAST, TrainingProgress, read_checkpoint
from train.runs.run import open_run


def test_best_checkpoint_has_the_best_score(toy, finished_run):
    folder, result = finished_run
    best = open_run(folder)
    training_inputs = load_training_inputs(best.config, toy, seed=0)
    results = evaluate_ensemble([(best.model, training_inputs.validation)])
    assert sum(retrieval.sum_of_recalls for retrieval in results.values()) == result.progress.best_score
    assert best.step == result.progress.best_step
    scores = {line["step"]: line["score"] for line in events(folder, "evaluation")}
    assert scores[best.step] == max(scores.values()) == result.progress.best_score
    ranks, terms = read_ranks(folder), terms_of(best.config.loss, best.model)
    assert ranks.schema.metadata == {b"step": str(best.step).encode()}
    assert ranks.equals(measure_validation(best.model, training_inputs.validation, best.config, terms).ranks)
    assert set(ranks["split"].to_pylist()) == {best.config.data.validation_split}


@pytest.mark.slow
def test_weights_are_a_function_of_the_seed(train_toy, tmp_path):
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        state = torch.random.get_rng_state()
        train_toy(name=name, seed=seed)
        assert torch.equal(torch.random.get_rng_state(), state)  # The global generator is untouched.
        torch.rand(1)
    assert_equal(weights(tmp_path / "a"), weights(tmp_path / "b"))
    assert not torch.equal(weights(tmp_path / "a")["images.weight"], weights(tmp_path / "c")["images.weight"])


@pytest.mark.slow
def test_sum_warmup_steps_precede_max_hinges(train_toy, tmp_path):
    for name, hinges in (("sum", '"sum"'), ("max", '"max"'), ("warm", '"max"\nsum_warmup_steps = 25')):
        train_toy(CONFIG.replace("c2c_probability = 0.5", f"hinges = {hinges}"), name)
    sums, maxima, warm = ([line["loss"] for line in events(tmp_path / name, "step")] for name in ("sum", "max", "warm"))
    assert warm[:2] == sums[:2]  # Steps 10 and 20.
    assert warm[2] < 0.7 * sums[2]  # From step 26 on only the hardest negatives.
    assert maxima[0] < 0.7 * sums[0]


MAX_HINGES = ENGLISH.replace("[loss]", '[loss]\nhinges = "max"').replace("17", "300").replace("44", "300")


@pytest.mark.slow
def test_collapse_is_reported_once(toy, train_toy, with_equal_features, tmp_path):
    warnings, equal = [], with_equal_features(toy)
    train_toy(MAX_HINGES.replace("max_steps = 300", "max_steps = 57"), corpus=equal)
    train_toy(MAX_HINGES, corpus=equal, resume=True, on_warning=warnings.append)
    (line,) = events(tmp_path / "run", "collapse")
    at_margin = [abs(entry["terms"]["c2i/en"] - 0.2) < 0.004 for entry in events(tmp_path / "run", "step")]
    last = line["step"] // 10
    assert (line["margin"], line["steps"], at_margin[last - 10 : last]) == (0.2, 100, [True] * 10)
    assert not any(all(at_margin[end - 10 : end]) for end in range(10, last))
    (warning,) = warnings
    assert f"for 100 steps the loss has stayed at the margin {0.2}" in warning
    assert "--set loss.sum_warmup_steps=100, or with a lower optimizer.learning_rate than 0.01" in warning
    train_toy(MAX_HINGES, "learns")
    losses = [line["loss"] for line in events(tmp_path / "learns", "step")]
    assert min(abs(loss - 0.2) for loss in losses) < 0.004  # It passes the margin.
    assert losses[-1] < 0.15
    assert events(tmp_path / "learns", "collapse") == []


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_weight_decay_of_unused_words(train_toy, tmp_path, optimizer):
    rate, decay, steps = 1e-3, 1e-5, 200
    text = ENGLISH.replace("learning_rate = 0.01", f"learning_rate = {rate}\nweight_decay = {decay}").replace("44", str(steps))
    train_toy(text.replace("[schedule]", f'name = "{optimizer}"\n[schedule]'))
    stored = read_checkpoint(Folder(str(tmp_path / "run")), LAST)
    others = [number for number, token in enumerate(stored.tokens) if token.startswith(("de", "fr"))]
    name = "sentences.0.words.weight"
    before = build_model(from_toml(text, "test").model, stored.dimensions, 0).state_dict()[name][others]
    after = stored.model[name][others]
    assert len(others) > 30
    if optimizer == "adamw":
        torch.testing.assert_close(after, before * (1 - rate * decay) ** steps, rtol=1e-5, atol=0)
    else:
        assert after.norm() < 0.01 * before.norm()


@pytest.mark.slow
def test_equal_score_is_no_improvement(train_toy):
    progress = replace(TrainingProgress(), step=5).evaluated(100.0)
    assert (progress.best_score, progress.best_step, progress.evals_since_best) == (100.0, 5, 0)
    later = replace(progress, step=9).evaluated(100.0)
    assert (later.best_score, later.best_step, later.evals_since_best) == (100.0, 5, 1)
    assert replace(later, step=11).evaluated(100.5) == TrainingProgress(step=11, best_score=100.5, best_step=11)
    assert TrainingProgress(step=1).evaluated(0.0).best_step == 1  # Even a model without a single hit is better than none.
    text = CONFIG.replace("patience = 0", "patience = 2").replace("max_steps = 44", "").replace("0.01", "1e-9")
    ended = train_toy(text).progress
    # Nothing is learned at such a rate, so that no evaluation is better than the first.
    assert (ended.stop_reason, ended.best_step, ended.evals_since_best, ended.step) == ("patience", 17, 2, 51)


@pytest.mark.slow
def test_timing_events(train_toy, tmp_path):
    lines = []
    train_toy(PARALLEL, on_log=lines.append)
    logged = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [{"event": line.event, "step": line.step, **line.values} for line in lines] == logged
    assert {"training_data", "chance", "step", "evaluation", "timing"} <= {line.event for line in lines}
    assert {line.run for line in lines} == {str(tmp_path / "run")}
    laps = events(tmp_path / "run", "timing")
    assert [lap["step"] for lap in laps] == [17, 34, 44]
    assert [lap["steps"] for lap in laps] == [17, 17, 10]
    # 40 images, nine a batch, with a caption in each of two languages.
    assert [lap["pairs"] for lap in laps] == [2 * (3 * 40 + 18), 2 * (22 + 2 * 40 + 36), 2 * (4 + 40 + 36)]
    assert lasting_log(tmp_path / "run").count(b"second") == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"output": ""}, "OUTPUT is missing: imagepivot train CONFIG OUTPUT"),
        ({"output": "gs://bucket/run"}, "'gs://bucket/run' is not a local folder: train into one"),
        ({"compile": True, "device": "cpu"}, "--compile needs a GPU"),
    ],
)
def test_invalid_jobs_are_refused(toy, tmp_path, change, message):
    job = TrainJob(from_toml(CONFIG, "test"), toy, str(tmp_path / "run"))
    with pytest.raises(UsageError, match=re.escape(message)):
        train(replace(job, **change))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_diverged_weights_stop_training(train_toy, tmp_path, monkeypatch):
    expected = r"weights are not finite at step 1, with a learning rate of 1e\+38: the training has diverged\. .* no checkpoint"
    config = CONFIG.replace("learning_rate = 0.01", "learning_rate = 1e38")
    with pytest.raises(DivergedError, match=expected):
        train_toy(config.replace("eval_every_steps = 17", "eval_every_steps = 1"))
    with pytest.raises(DivergedError, match="the loss is nan and the norm of its gradient nan at step 2"):
        train_toy(config, "late")
    measure = TrainingInputs.evaluate
    monkeypatch.setattr(TrainingInputs, "evaluate", lambda *given: replace(measure(*given), loss=float("inf")))
    with pytest.raises(DivergedError, match="the loss on the validation split is not finite at step 17"):
        train_toy(name="late")
    monkeypatch.undo()
    assert events(tmp_path / "late", "validation") == []
    assert not list(tmp_path.glob("late/*.pt"))
    # The advice: the same folder, with a lower rate.
    assert train_toy(CONFIG).progress.step == 44


@pytest.mark.slow
def test_diverged_run_keeps_checkpoints_and_log(train_toy, tmp_path, monkeypatch):
    train_toy(CONFIG.replace("max_steps = 44", "max_steps = 17"), "short")
    rate = schedules.learning_rate
    monkeypatch.setattr(
        training, "learning_rate", lambda config, *, step, **at: rate(config, step=step, **at) * 1e40 ** (step >= 17)
    )
    expected = r"at step 19, with a learning rate of 1e\+38: .* train into another folder; last\.pt keeps step 17"
    with pytest.raises(DivergedError, match=expected):
        train_toy()
    for name in (LAST, BEST):
        assert_equal(*(read_checkpoint(Folder(str(tmp_path / run)), name).model for run in ("run", "short")))
    for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)
    with pytest.raises(DivergedError, match=expected):
        train_toy(resume=True)
    monkeypatch.undo()
    assert train_toy(resume=True).progress.step == 44


def test_resuming_with_other_threads_is_reported(copied_run, train_toy):
    path, remarks = copied_run / "log.jsonl", []
    train_toy(resume=True, on_warning=remarks.append)
    assert remarks == []
    other, lines = torch.get_num_threads() + 1, map(json.loads, path.read_text().splitlines())
    lines = [line | ({"threads": other} if line["event"] == "timing" else {}) for line in lines]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    train_toy(resume=True, on_warning=remarks.append)
    (remark,) = remarks
    assert remark.startswith(f"the run was trained with {other} threads and goes on with {other - 1}: ")


@pytest.mark.slow
def test_resuming_needs_the_same_missing_features(train_toy, toy, gappy, tmp_path, caplog):
    allowed, remarks = {"corpus": gappy, "allow_missing_features": True}, []
    result = train_toy(CONFIG.replace("max_steps = 44", "max_steps = 20"), **allowed, on_warning=remarks.append)
    assert [(missing.split, missing.images) for missing in result.missing_features] == [("train", 7), ("val", 2)]
    assert remarks == [missing.remark for missing in result.missing_features]
    run = open_run(tmp_path / "run")
    assert run.missing_features == {missing.split: missing.to_dict() for missing in result.missing_features}
    logged = events(tmp_path / "run", "missing_features")
    assert logged == [{"event": "missing_features", "step": 0, **missing.to_dict()} for missing in result.missing_features]
    with pytest.raises(DatasetError, match="--allow-missing-features"):
        train_toy(corpus=gappy, resume=True)
    # The features have grown since: the fingerprint is the same, the captions that are trained on are not.
    features = rewrite(toy.features, tmp_path / "grown", lambda rows: [row for row in rows if row["image_id"] != "train-003"])
    with pytest.raises(DatasetError, match=r"images without features in split 'train': were 7, now 1; .* 'val': were 2, now 0"):
        train_toy(corpus=replace(toy, features=features), resume=True, allow_missing_features=True)
    with pytest.raises(DatasetError, match=r"images without features in split 'train': were 7, now 0"):
        train_toy(resume=True)
    assert train_toy(**allowed, resume=True).progress.step == 44
    assert len(events(tmp_path / "run", "missing_features")) == 2
    caplog.clear()
    train_toy(name="whole", **allowed)
    assert caplog.messages == remarks  # Nobody who calls it without `on_warning` misses it.
    assert_equal(weights(tmp_path / "run"), weights(tmp_path / "whole"))


@pytest.mark.slow
def test_zero_features_are_reported(toy, train_toy, tmp_path):
    def change(rows):
        values = {"train-004": 0.0, "train-009": 0.0, "val-001": 1e5}
        return [row | {"feature": row["feature"] * 0 + values.get(row["image_id"], row["feature"])} for row in rows]

    remarks = []
    train_toy(corpus=replace(toy, features=rewrite(toy.features, tmp_path / "odd", change)), on_warning=remarks.append)
    assert [remark.partition(":")[0] for remark in remarks] == [
        "feature outliers in split 'train'",
        "feature outliers in split 'val'",
    ]
    assert [
        (line["step"], line["split"], line["zero_features"], line["norm_outliers"], line["example"])
        for line in events(tmp_path / "run", "feature_outliers")
    ] == [(0, "train", 2, 0, "train-004"), (0, "val", 0, 1, "val-001")]
    # At first the bias is zero, and so is what the encoder makes of zeros: torch's own division had gradients of 10^12 there.
    assert all(line["gradient_norm"] < 1e3 for line in events(tmp_path / "run", "step"))
