from dataclasses import replace

import pytest

from tests.train.trainings import SMALL
from train.config.presets import list_presets
from train.config.sections import load_config
from train.evaluation.scores import evaluate
from train.jobs import TrainJob
from train.loop.training import train
from train.runs.run import open_run

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize("name", list_presets())
def test_preset_trains(four_languages, four_languages_regions, write_words, write_tokens, tmp_path, name):
    config = load_config(name, SMALL)
    corpus = four_languages if config.model.kind in ("vse", "mlmme") else four_languages_regions
    if config.model.pretrained_width:
        corpus = replace(corpus, word_vectors=write_words(tmp_path / "words", vocabulary=corpus.vocabulary))
    if config.model.token_width:
        corpus = replace(corpus, token_features=write_tokens(tmp_path, corpus=corpus))
    result = train(TrainJob(config, corpus, str(tmp_path / "run"), device="cpu", tensorboard=False))
    assert (result.progress.step, result.progress.stop_reason) == (4, "steps")
    run = open_run(tmp_path / "run")
    assert run.config == config
    scores = evaluate(run, captions=corpus.captions, features=corpus.features, token_features=corpus.token_features)
    assert {score.language for score in scores} == set(config.data.languages)
