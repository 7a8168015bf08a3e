"""Every preset trains, evaluates and can be opened, with small numbers in place of its own."""

from __future__ import annotations

import pytest

from tests.train.trainings import SMALL
from train.config.presets import preset_names
from train.config.sections import resolve
from train.evaluation.scoring import score_run
from train.jobs import TrainJob
from train.loop import train
from train.runs.run import open_run

pytestmark = [pytest.mark.slow, pytest.mark.cluster]


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_trains(four_languages, four_languages_regions, tmp_path, name):
    config = resolve(name, SMALL)
    corpus = four_languages if config.model.kind in ("vse", "mlmme") else four_languages_regions
    result = train(TrainJob(config, corpus, str(tmp_path / "run"), device="cpu", tensorboard=False))
    assert (result.standing.step, result.standing.stopped) == (4, "steps")
    run = open_run(tmp_path / "run")
    assert run.config == config
    scores = score_run(run, captions=corpus.captions, features=corpus.features)
    assert {score.language for score in scores} == set(config.data.languages)
