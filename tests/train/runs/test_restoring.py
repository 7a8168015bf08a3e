from dataclasses import replace
from pathlib import Path

import pytest
import torch

from schemas.errors import DatasetError
from schemas.storage.folder import Folder
from train.runs.checkpoints import BEST, LAST, read_checkpoint, write_checkpoint
from train.runs.run import open_run

DEEP = "a = " + "[" * 100_000


def changed(folder: Path, name: str, **change) -> None:
    """Write a checkpoint again with other fields; a function gets the old value."""
    run = Folder(str(folder))
    checkpoint = read_checkpoint(run, name)
    values = {field: value(getattr(checkpoint, field)) if callable(value) else value for field, value in change.items()}
    write_checkpoint(run, name, replace(checkpoint, **values))


def with_weights(name, values):
    return lambda model: {**model, name: values(model[name])}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": with_weights("images.weight", lambda weights: weights[:, :-1])}, r"images\.weight is float32 \[6, 7\]"),
        ({"model": with_weights("images.weight", lambda weights: weights.double())}, r"images\.weight is float64 \[6, 8\]"),
        ({"model": with_weights("images.weight", lambda weights: weights * torch.nan)}, r"images\.weight holds .* not finite"),
        ({"model": with_weights("images.weight", lambda weights: weights / 0)}, r"images\.weight holds .* not finite"),
        ({"model": lambda model: {**model, "more": torch.zeros(1)}}, "more is unknown"),
        ({"model": {}}, r"images\.weight is missing"),
        ({"config": "[data]\nportions = 3"}, "data.portions is 3, expected a table"),
        ({"config": DEEP}, "nested too deeply"),
        ({"tokens": ("<pad>", "<start>", "<end>", "<unk>")}, "the vocabulary 4"),
        ({"tokens": lambda tokens: ("x", *tokens[1:])}, "a vocabulary begins with"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_a_run_whose_checkpoint_does_not_fit_together_is_refused(copied_run, change, message):
    changed(copied_run, BEST, **change)
    with pytest.raises(DatasetError, match=rf"best\.pt is damaged, or not a checkpoint \(.*{message}"):
        open_run(copied_run)


def test_dimensions_that_no_memory_holds_are_refused(copied_run):
    changed(copied_run, BEST, dimensions=lambda dimensions: replace(dimensions, feature_shape=(2**50,)))
    with pytest.raises(DatasetError, match=r"best\.pt is damaged, .*\(no model has its dimensions"):
        open_run(copied_run)


def first_moment(value):
    return lambda state: {**state, "state": {**state["state"], 0: {**state["state"][0], "exp_avg": value}}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": {}}, "is missing"),
        ({"optimizer": {}}, "the state of its optimizer does not fit the model"),
        ({"optimizer": {"state": {}, "param_groups": []}}, "the state of its optimizer does not fit the model"),
        ({"optimizer": first_moment(torch.zeros(3))}, r"exp_avg of parameter 0 is float32 \[3\] or not finite"),
        ({"optimizer": first_moment(7)}, "the state of its optimizer does not fit the model"),
        ({"sampler": {}}, "the state of its sampler does not fit the data: KeyError"),
        (
            {"sampler": {"step": 1, "languages": {"en": {"epoch": 0, "position": 10**9}}}},
            "position 1000000000 is not in a pass",
        ),
        ({"sampler": {"step": 1, "languages": {"en": {"epoch": 0, "position": "x"}}}}, "TypeError"),
        ({"config": "[data]"}, r"data\.portions is missing"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_a_checkpoint_that_does_not_fit_together_is_not_resumed(train_toy, copied_run, change, message):
    changed(copied_run, LAST, **change)
    before = {path.name: path.read_bytes() for path in copied_run.iterdir()}
    with pytest.raises(DatasetError, match=rf"last\.pt is damaged, or not a checkpoint \(.*{message}"):
        train_toy(resume=True)
    assert {path.name: path.read_bytes() for path in copied_run.iterdir()} == before
