import json

import pytest

from train.evaluation.averaging import averages, evaluation_report
from train.evaluation.scoring import score_run
from train.runs.run import open_run


@pytest.fixture
def scores(write_run, toy):
    run = open_run(write_run(languages=("en", "de", "fr")))
    return score_run(run, captions=toy.captions, features=toy.features, splits=["val", "test"])


def test_each_split_and_portion_has_its_means(scores):
    found = averages(scores)
    assert [(average.split, average.portion, average.languages) for average in found] == [
        ("val", "comparable", ("de", "en")),
        ("val", "translation", ("en", "fr")),
        ("test", "comparable", ("de", "en")),
        ("test", "translation", ("en", "fr")),
    ]
    for average in found:
        of = [s for s in scores if (s.split, s.portion) == (average.split, average.portion)]
        for name in ("image_to_text", "text_to_image"):
            directions = [getattr(score.retrieval, name) for score in of]
            assert getattr(average, name) == (
                sum(direction.recall_at_1 for direction in directions) / 2,
                sum(direction.recall_at_5 for direction in directions) / 2,
                sum(direction.recall_at_10 for direction in directions) / 2,
            )
        assert average.sum_of_recalls == pytest.approx(sum(score.retrieval.sum_of_recalls for score in of) / 2)
        assert average.mean_recall == pytest.approx(average.sum_of_recalls / 6)


def test_one_language_has_no_mean(scores):
    assert averages([score for score in scores if score.language == "fr"]) == []


def test_the_report_is_json(scores):
    report = json.loads(json.dumps(evaluation_report(scores)))
    assert report["scores"] == json.loads(json.dumps([score.to_dict() for score in scores]))
    first = report["averages"][0]
    assert (first["split"], first["portion"], first["languages"]) == ("val", "comparable", ["de", "en"])
    assert first["mean_recall"] == averages(scores)[0].mean_recall
    assert len(first["image_to_text"]) == 3
