import shutil
from dataclasses import replace

import pytest
import torch

from schemas.dataset import open_dataset
from schemas.errors import DatasetError, UsageError
from schemas.manifest import MANIFEST_NAME, Manifest
from schemas.storage.folder import Folder
from tests.train.trainings import evaluate_ensemble
from train.data.splits import default_test_splits, open_data
from train.evaluation.compatibility import check_dataset
from train.evaluation.scores import evaluate
from train.jobs import EvaluateJob
from train.reports.score_report import averages
from train.runs.run import open_run


@pytest.fixture
def run(write_run):
    return open_run(write_run(languages=("en", "de", "fr")))


def test_language_and_a_portion(run, write_run, toy):
    arguments = {"captions": toy.captions, "features": toy.features, "splits": ["val"]}
    chosen = evaluate(run, **arguments, languages=["en"], portions=("translation",))
    assert [(score.language, score.portion) for score in chosen] == [("en", "translation")]
    fewer = open_run(write_run("fewer", languages=("de",)))
    assert {score.language for score in evaluate(fewer, **arguments)} == {"de"}
    with pytest.raises(UsageError, match="--languages names fr, but this run knows only de"):
        evaluate(fewer, **arguments, languages=["de", "fr"])


def test_score_with_foreign_data_is_refused(run, toy, other_toy):
    with pytest.raises(DatasetError, match="encoded with another vocabulary"):
        evaluate(run, captions=other_toy.captions, features=toy.features, splits=["test"])
    with pytest.raises(DatasetError, match="comes from another extractor"):
        evaluate(run, captions=toy.captions, features=other_toy.features, splits=["test"])


def test_default_test_splits_prefer_test():
    assert default_test_splits(["test_2016", "train", "test"]) == ["test"]
    assert default_test_splits(["test_2016_flickr", "train", "test_2016"]) == ["test_2016", "test_2016_flickr"]
    assert default_test_splits(["train", "testing"]) == []


def scored(run, data, **arguments) -> list[tuple[str, str, str]]:
    scores = evaluate(run, captions=data.captions, features=data.features, **arguments)
    return [(score.split, score.language, score.portion) for score in scores]


@pytest.mark.slow
def test_test_captions_may_be_in_two_splits(run, write_run, multi30k):
    comparable = [("test_2016", "de", "comparable"), ("test_2016", "en", "comparable")]
    translations = [("test_2016_flickr", "en", "translation"), ("test_2016_flickr", "fr", "translation")]
    assert scored(run, multi30k) == comparable + translations
    assert scored(run, multi30k, portions=("comparable",)) == comparable
    assert scored(run, multi30k, portions=("translation",)) == translations
    assert scored(run, multi30k, languages=["fr"]) == translations[1:]
    assert scored(run, multi30k, languages=["fr", "de"]) == [comparable[0], translations[1]]
    assert scored(open_run(write_run("french", languages=("fr",))), multi30k) == translations[1:]
    assert scored(open_run(write_run("german", languages=("de",))), multi30k) == comparable[:1]


def test_requested_split_must_hold_captions(run, write_run, multi30k):
    with pytest.raises(UsageError, match=r"no captions of split 'test_2016' in .* but the run knows only en, de, fr"):
        scored(run, multi30k, splits=["test_2016_flickr", "test_2016"], languages=["fr"])
    with pytest.raises(DatasetError, match="has no captions of split 'nothing'"):
        scored(run, multi30k, splits=["test_2016", "nothing"])
    german = open_run(write_run("german", languages=("de",)))
    available = "test_2016: de comparable [0-9,]+, en comparable .*; test_2016_flickr: .*en translation [0-9,]+, fr translation"
    with pytest.raises(UsageError, match=rf"nothing to evaluate: .* {available}.*, but the run knows only de"):
        scored(german, multi30k, portions=("translation",))


def test_captions_without_features_are_left_out(run, toy, gappy):
    with pytest.raises(DatasetError, match=r"1 of 9 images of split 'test'.*--allow-missing-features"):
        evaluate(run, captions=gappy.captions, features=gappy.features, splits=["test"])
    scores = evaluate(run, captions=gappy.captions, features=gappy.features, splits=["test"], allow_missing_features=True)
    assert {score.missing_features.first for score in scores} == {("test-004",)}
    assert all(score.to_dict()["missing_features"]["images"] == 1 for score in scores)
    comparable = next(score for score in scores if (score.language, score.portion) == ("en", "comparable"))
    assert comparable.retrieval.image_to_text.queries == 8
    assert comparable.retrieval.text_to_image.queries == 24
    whole = evaluate(run, captions=toy.captions, features=toy.features, splits=["test"], allow_missing_features=True)
    assert all(score.missing_features is None and "missing_features" not in score.to_dict() for score in whole)


# --- ensembles -------------------------------------------------------------------------------------------------------


@pytest.fixture
def pair(write_run):
    """Two runs with other weights; one takes features of length 1."""
    return [open_run(write_run("a", seed=0)), open_run(write_run("b", seed=1, l2=True))]


def test_ensemble_has_the_mean_of_the_scores(pair, toy, tmp_path):
    torch.nn.init.constant_(pair[1].model.images.bias, 5)  # Without it lengths of features change no rank.
    data = {"captions": toy.captions, "features": toy.features, "splits": ["test"]}
    scores = evaluate(pair, **data)
    assert evaluate(pair, **data, memory_map=str(tmp_path / "maps")) == scores
    assert list((tmp_path / "maps").iterdir())
    assert scores != evaluate(pair[0], **data)
    assert scores != evaluate(pair[1], **data)
    for score in scores:
        chosen = {"split": "test", "portions": {score.language: [score.portion]}}
        members = [
            (run.model, open_data(toy.captions, toy.features, **chosen, l2=l2))
            for run, l2 in zip(pair, (False, True), strict=True)
        ]
        assert score.retrieval == evaluate_ensemble(members)[score.language]


def test_open_runs_have_the_scores_and_the_description_of_their_folders(pair, toy):
    folders = tuple(run.folder.location for run in pair)
    options = {"splits": ("val",), "languages": ("en",), "portions": ("translation",)}
    job = EvaluateJob(folders, toy.captions, toy.features, device="cpu", **options)
    assert evaluate(job) == evaluate(replace(job, run=tuple(pair)))
    assert job.made_from() == replace(job, run=tuple(pair)).made_from()
    assert evaluate(replace(job, run=folders[0])) == evaluate(replace(job, run=pair[0]))
    for runs in ((*folders, folders[0]), (*pair, pair[0])):
        with pytest.raises(UsageError, match="is given twice, so that its scores would count twice"):
            replace(job, run=runs)


def test_ensemble_is_scored_in_common_languages(pair, write_run, toy):
    data = {"captions": toy.captions, "features": toy.features, "splits": ["test"]}
    german = open_run(write_run("german", languages=("de",)))
    assert {score.language for score in evaluate([*pair, german], **data)} == {"de"}
    with pytest.raises(UsageError, match="--languages names en, but the ensemble knows only de: give some of these"):
        evaluate([*pair, german], **data, languages=["de", "en"])


@pytest.mark.parametrize(
    ("name", "meaning"),
    [("vocabulary", "captions in the ids of another vocabulary"), ("extractor", "features of another extractor")],
)
def test_ensemble_of_runs_with_different_data_is_refused(pair, toy, name, meaning):
    other = replace(pair[1], fingerprints={**pair[1].fingerprints, name: "0" * 64})
    with pytest.raises(DatasetError, match=rf"/b' was trained with {meaning} than '.*/a' \(fingerprint 000000000000"):
        evaluate([pair[0], other], captions=toy.captions, features=toy.features, splits=["test"])


@pytest.fixture
def scores(write_run, toy):
    run = open_run(write_run(languages=("en", "de", "fr")))
    return evaluate(run, captions=toy.captions, features=toy.features, splits=["val", "test"])


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
            assert getattr(average.retrieval, name).recalls == (
                sum(direction.recall_at_1 for direction in directions) / 2,
                sum(direction.recall_at_5 for direction in directions) / 2,
                sum(direction.recall_at_10 for direction in directions) / 2,
            )
        assert average.retrieval.sum_of_recalls == pytest.approx(sum(score.retrieval.sum_of_recalls for score in of) / 2)
        assert average.retrieval.mean_recall == pytest.approx(average.retrieval.sum_of_recalls / 6)
    assert averages([score for score in scores if score.language == "fr"]) == []


def test_features_of_another_version_of_the_model_code_are_refused(run, toy, tmp_path):
    before, same, other = (1.0, 2.0), (1.0, 2.0005), (1.0, 2.1)
    trained = replace(run, sample_outputs={"extractor": before})
    arguments = {"captions": toy.captions, "splits": ["val"], "languages": ["fr"]}

    def features(outputs: tuple[float, ...]) -> str:
        folder = Folder(str(tmp_path / str(outputs[1])))
        shutil.copytree(toy.features, folder.location)
        folder.put(MANIFEST_NAME, replace(Manifest.read(folder), sample_outputs=outputs).to_json().encode())
        return folder.location

    expected = evaluate(run, features=toy.features, **arguments)
    assert evaluate(trained, features=toy.features, **arguments) == expected  # The features are of an earlier version.
    assert evaluate(trained, features=features(same), **arguments) == expected
    refused = features(other)
    assert evaluate(run, features=refused, **arguments) == expected  # The run is of an earlier version.
    with pytest.raises(DatasetError, match=r"by another version of the model's code .* was trained on: .* beyond rounding"):
        evaluate(trained, features=refused, **arguments)
    with pytest.raises(DatasetError, match="another version of the model's code"):
        check_dataset(trained, open_dataset(refused), "extractor")
