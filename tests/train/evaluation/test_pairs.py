"""Pairs of vectors without a run: the vectors that a run embeds give what the run gives."""

import json
from dataclasses import replace

import numpy as np
import pytest

import imagepivot
from schemas.dataset import open_dataset
from schemas.duplicates import Duplicate, duplicates_csv
from schemas.errors import DatasetError, UsageError
from tests.train.trainings import rewrite
from train.evaluation.embedding import embed
from train.evaluation.pairs import UNKNOWN_TRAINING
from train.jobs import EmbedJob, EvaluateJob
from train.reports.comparison import compare_runs
from train.reports.score_report import evaluation_content, score_tables, write_evaluation


@pytest.fixture(params=["cosine", "order"])
def run(request, write_run) -> str:
    """A run whose languages are not in the order of the alphabet: the order similarity is not symmetric."""
    return write_run("run", languages=("fr", "en", "de"), similarity=request.param)


@pytest.fixture
def pair_of(tmp_path):
    """Embed a corpus with a run, and return the folders of captions and images."""

    def write(run: str, corpus, name: str = "embedded", **options) -> tuple[str, str]:
        embed(EmbedJob(run, str(tmp_path / name), corpus.features, corpus.captions, device="cpu", **options))
        return str(tmp_path / name / "captions"), str(tmp_path / name / "images")

    return write


@pytest.fixture
def duplicates(tmp_path) -> str:
    """List an image and a caption of test, and a training image that no test image equals."""
    leaks = [
        *(Duplicate(0, "hash", 1.0, f"{split}-001", split) for split in ("train", "test")),
        *(Duplicate(1, "text", 1.0, f"{split}-003", split, "en", "comparable", "1") for split in ("test", "train")),
        *(Duplicate(2, "bytes", 1.0, f"test-{n:03d}", "test") for n in (5, 6)),
        *(Duplicate(3, "bytes", 1.0, f"{split}-008", split) for split in ("val", "test")),
    ]
    (tmp_path / "duplicates.csv").write_text(duplicates_csv(leaks))
    return str(tmp_path / "duplicates.csv")


def written(folder, job: EvaluateJob) -> tuple[dict, bytes]:
    """Evaluate into a folder, and return the content of both files, without the runs."""
    scores = imagepivot.evaluate(job)
    write_evaluation(scores, evaluation_content(scores, job), str(folder))
    content = json.loads((folder / "evaluation.json").read_text())
    assert content.pop("runs")
    return content, (folder / "ranks.parquet").read_bytes()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"folds": 2},
        {"cross_lingual": True},
        {"exclude": "duplicates.csv"},
        {"folds": 2, "cross_lingual": True, "exclude": "duplicates.csv", "splits": ("val", "test"), "languages": ("de", "en")},
    ],
    ids=["whole", "folds", "cross-lingual", "exclude", "all"],
)
@pytest.mark.slow
def test_pair_of_a_run_equals_the_run_in_every_field(run, toy, pair_of, duplicates, tmp_path, options):
    if "exclude" in options:
        options = options | {"exclude": duplicates}
    captions, images = pair_of(run, toy)
    ours, ranks = written(tmp_path / "pair", EvaluateJob(captions=captions, features=images, device="cpu", **options))
    theirs, expected = written(tmp_path / "of-run", EvaluateJob(run, toy.captions, toy.features, device="cpu", **options))
    assert ours == theirs
    assert ranks == expected
    comparison = compare_runs([tmp_path / "of-run", tmp_path / "pair"])
    assert {(test.difference, test.p_value) for test in comparison.tests} == {(0.0, 1.0)}
    assert comparison.differences == {}
    assert comparison.notes[-1] == f"pair: {UNKNOWN_TRAINING}"


@pytest.mark.slow
def test_pair_without_some_images_equals_the_run(run, toy, gappy, pair_of, tmp_path):
    captions, images = pair_of(run, gappy)
    options = {"allow_missing_features": True, "device": "cpu"}
    ours = written(tmp_path / "pair", EvaluateJob(captions=captions, features=images, **options))
    assert ours == written(tmp_path / "of-run", EvaluateJob(run, gappy.captions, gappy.features, **options))
    with pytest.raises(DatasetError, match="lacks the features of 1 of 9 images of split 'test'"):
        imagepivot.evaluate(captions=captions, features=images, device="cpu")
