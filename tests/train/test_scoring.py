from __future__ import annotations

import json
from dataclasses import replace

import pytest

from schemas.errors import DatasetError, UsageError
from train.data import open_data
from train.evaluation import evaluate
from train.runs import open_run
from train.scoring import score_run


@pytest.fixture
def run(write_run):
    return open_run(write_run(languages=("en", "de", "fr")))


def test_each_portion_is_a_test_of_its_own(run, toy):
    scores = score_run(run, captions=toy.captions, features=toy.features, splits=["test"])
    assert sorted((score.language, score.portion) for score in scores) == [
        ("de", "comparable"),
        ("en", "comparable"),
        ("en", "translation"),
        ("fr", "translation"),
    ]
    for score in scores:
        data = open_data(toy.captions, toy.features, split="test", languages=[score.language], portions=[score.portion])
        assert score.retrieval == evaluate(run.model, data)[score.language]
        assert score.split == "test"
        assert json.loads(json.dumps(score.to_dict()))["text_to_image"]["queries"] == len(data.captions)


def test_features_are_normalised_where_the_training_did(write_run, toy):
    plain, unit = (open_run(write_run(f"run-{l2}", l2=l2)) for l2 in (False, True))
    scores = score_run(unit, captions=toy.captions, features=toy.features, splits=["test"], portion="comparable")
    expected = open_data(toy.captions, toy.features, split="test", languages=["de"], portions=["comparable"], l2=True)
    assert scores[0].language == "de"
    assert scores[0].retrieval == evaluate(plain.model, expected)["de"]


def test_a_language_and_a_portion(run, write_run, toy):
    arguments = {"captions": toy.captions, "features": toy.features, "splits": ["val"]}
    chosen = score_run(run, **arguments, languages=["en"], portion="translation")
    assert [(score.language, score.portion) for score in chosen] == [("en", "translation")]
    fewer = open_run(write_run("fewer", languages=("de",)))
    assert {score.language for score in score_run(fewer, **arguments)} == {"de"}
    with pytest.raises(UsageError, match="--languages names fr, this run knows de"):
        score_run(fewer, **arguments, languages=["de", "fr"])
    with pytest.raises(UsageError, match=r"nothing to evaluate: split 'val' has languages .* the run knows de"):
        score_run(fewer, **arguments, portion="translation")


def test_what_does_not_belong_to_the_run_is_refused(run, toy, other_toy):
    with pytest.raises(DatasetError, match="encoded with another vocabulary"):
        score_run(run, captions=other_toy.captions, features=toy.features, splits=["test"])
    with pytest.raises(DatasetError, match="made by another extractor"):
        score_run(run, captions=toy.captions, features=other_toy.features, splits=["test"])
    with pytest.raises(DatasetError, match="has no captions of split 'nothing'"):
        score_run(run, captions=toy.captions, features=toy.features, splits=["nothing"])


def test_a_score_says_what_chance_reaches(run, toy):
    (score,) = score_run(run, captions=toy.captions, features=toy.features, splits=["test"], languages=["fr"])
    assert score.chance["text_to_image"][0] == pytest.approx(100 / 9)
    assert replace(score, chance={}).to_dict()["chance"] == {}


def test_without_a_split_it_is_the_test_images_of_2016(run, toy):
    with pytest.raises(UsageError, match="no split test_2016 or test_2016_flickr: choose with --split of test, train, val"):
        score_run(run, captions=toy.captions, features=toy.features)
    scores = score_run(run, captions=toy.captions, features=toy.features, splits=["val", "test"], languages=["fr"])
    assert [(score.split, score.retrieval.text_to_image.queries) for score in scores] == [("val", 12), ("test", 9)]
