"""Trainings that start from the weights of another run."""

import re
import shutil
from pathlib import Path

import pytest
import torch

from schemas.errors import DatasetError, UsageError
from tests.train.conftest import EDGES, write_toy
from tests.train.trainings import CONFIG, ENGLISH, ORDER, assert_equal, assert_same_checkpoints, events, lasting_log, weights
from train.config.sections import from_toml
from train.jobs import Corpus, TrainJob
from train.loop.training import train
from train.loop.training_data import load_training_inputs
from train.models.catalogue import build_model
from train.runs.checkpoints import BEST, LAST, weights_digest
from train.runs.init_from_run import init_from_run
from train.runs.run import open_run

SHORT = {"max_steps = 44": "max_steps = 6", "eval_every_steps = 17": "eval_every_steps = 3"}
UNSHARED = ORDER.replace("c2c_probability = 0.5", "")
FROZEN = {"learning_rate = 0.01": "learning_rate = 1e-30", "max_steps = 44": "max_steps = 1"}


def changed(text: str, changes: dict[str, str]) -> str:
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    return text


def languages(text: str, portions: str) -> str:
    return re.sub(r"portions = .*", f"portions = {portions}", text)


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> Corpus:
    """Datasets with other captions, so that words have other ids, and some are in one vocabulary only."""
    return write_toy(tmp_path_factory.mktemp("other-words"), seed=3)


@pytest.fixture
def source(train_toy, tmp_path):
    """A run of some configuration, opened."""

    def opened(text: str = CONFIG):
        train_toy(changed(text, SHORT), "source")
        return open_run(tmp_path / "source")

    return opened


def started(text: str, corpus: Corpus, run, seed: int = 1):
    """A new model with the weights of a run."""
    config = from_toml(text, "test")
    training_inputs = load_training_inputs(config, corpus, seed=seed)
    model = build_model(config.model, training_inputs.dimensions, seed)
    init_from_run(model, training_inputs.vocabulary.tokens, run)
    return model


def test_all_weights_are_taken(source, toy):
    run = source(UNSHARED)
    assert_equal(dict(started(UNSHARED, toy, run).state_dict()), dict(run.model.state_dict()))


def test_shared_encoder_of_other_languages_is_taken(source, toy):
    run = source(languages(ENGLISH, '{ en = ["comparable"] }'))
    model = started(CONFIG, toy, run)
    assert model.languages == ("en", "de")
    assert_equal(dict(model.state_dict()), dict(run.model.state_dict()))


def test_encoders_of_other_languages_are_refused(source, toy):
    run = source(UNSHARED)
    swapped = languages(UNSHARED, '{ fr = ["translation"], de = ["comparable"] }')
    with pytest.raises(UsageError, match=r"; it has encoders of en, de, not of fr, de\), so that its weights"):
        started(swapped, toy, run)


@pytest.mark.parametrize("is_other_corpus", [True, False])
def test_other_words_are_refused(source, toy, other, is_other_corpus):
    run = source(CONFIG if is_other_corpus else CONFIG.replace("[model]", "min_count = 14\n[model]"))
    with pytest.raises(UsageError, match="its word embeddings are of other words"):
        started(CONFIG, other if is_other_corpus else toy, run)


@pytest.mark.usefixtures("kinds")
def test_embeddings_of_ones_own_are_compared_by_token(source, toy, other):
    exec(compile(EDGES, "edges.py", "exec", dont_inherit=True), {"__name__": __name__})
    text = re.sub(r"embed_dim = 6\nword_dim = 4", 'kind = "counts"', CONFIG).replace("c2c_probability = 0.5", "")
    run = source(text)
    assert_equal(dict(started(text, toy, run).state_dict()), dict(run.model.state_dict()))
    with pytest.raises(UsageError, match="its word embeddings are of other words"):
        started(text, other, run)


# --- trainings -------------------------------------------------------------------------------------------------------


def train_from(corpus: Corpus, folder: Path, text: str = CONFIG, **fields):
    remarks = []
    job = TrainJob(from_toml(text, "test"), corpus, str(folder), device="cpu", seed=1, **fields)
    return train(job, on_warning=remarks.append), remarks


@pytest.mark.slow
def test_training_starts_from_the_best_weights_and_says_so(toy, finished_run, tmp_path):
    source, _ = finished_run
    assert not torch.equal(weights(source, BEST)["images.weight"], weights(source, LAST)["images.weight"])
    folder = tmp_path / "run"
    _, remarks = train_from(toy, folder, changed(CONFIG, FROZEN), init_from=str(source))
    for name, value in weights(source, BEST).items():
        torch.testing.assert_close(weights(folder)[name], value, rtol=0, atol=1e-20)
    assert remarks == [f"started from '{source}' (best.pt, step {open_run(source).step})"]
    run = open_run(folder)
    assert run.started_from["weights_sha256"] == weights_digest(weights(source, BEST))
    assert run.started_from["fingerprints"] == open_run(source).fingerprints
    (line,) = events(folder, "started_from")
    assert line == {"event": "started_from", "step": 0, **run.started_from}
    assert open_run(source).started_from == {}


@pytest.mark.cluster
def test_it_resumes_bit_for_bit_and_takes_nothing_again(toy, finished_run, tmp_path):
    source = shutil.copytree(finished_run[0], tmp_path / "source")
    begun = {"init_from": str(source)}
    train_from(toy, tmp_path / "whole", **begun)
    for name, resumed in (("again", begun), ("without", {})):
        train_from(toy, tmp_path / name, changed(CONFIG, {"max_steps = 44": "max_steps = 17"}), **begun)
        _, remarks = train_from(toy, tmp_path / name, resume=True, **resumed)
        assert remarks == []
        assert_same_checkpoints(tmp_path / name, tmp_path / "whole")
        assert lasting_log(tmp_path / name) == lasting_log(tmp_path / "whole")
    train_from(toy, tmp_path / "drawn")
    assert not torch.equal(weights(tmp_path / "drawn")["images.weight"], weights(tmp_path / "whole")["images.weight"])
    moved = shutil.move(source, tmp_path / "moved")  # The same run at another place is the same run.
    assert train_from(toy, tmp_path / "whole", resume=True, init_from=str(moved))[0].progress.step == 44


@pytest.mark.slow
def test_another_source_is_another_run(toy, finished_run, train_toy, tmp_path):
    source = str(finished_run[0])
    train_toy(changed(CONFIG, SHORT), "source", seed=9)
    text = changed(CONFIG, SHORT)
    train_from(toy, tmp_path / "run", text, init_from=source)
    with pytest.raises(DatasetError, match=rf"holds another run \(--init-from: was {source} .*, now .*source "):
        train_from(toy, tmp_path / "run", text, resume=True, init_from=str(tmp_path / "source"))
    train_from(toy, tmp_path / "drawn", text)
    with pytest.raises(DatasetError, match=rf"holds another run \(--init-from: was nothing, now {source} "):
        train_from(toy, tmp_path / "drawn", text, resume=True, init_from=source)


def test_source_without_a_run_is_refused_before_writing(toy, finished_run, tmp_path):
    with pytest.raises(DatasetError, match=r"nowhere' is not a run: it holds no best\.pt"):
        train_from(toy, tmp_path / "run", init_from=str(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match="its model is another one"):
        train_from(toy, tmp_path / "run", CONFIG.replace("word_dim = 4", "word_dim = 5"), init_from=str(finished_run[0]))
    assert not [path for path in (tmp_path / "run").rglob("*") if path.suffix in (".pt", ".toml", ".jsonl")]
    with pytest.raises(UsageError, match=r"--init-from '.*run/' is OUTPUT itself: name another run"):
        train_from(toy, tmp_path / "run", init_from=f"{tmp_path}/run/")
