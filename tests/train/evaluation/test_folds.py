from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from statistics import mean

import numpy as np
import pytest
import torch

from schemas.errors import UsageError
from train.data.batches import CaptionBatch
from train.data.splits import open_data
from train.evaluation.evaluating import chance, encode_captions, encode_images, evaluate_together
from train.evaluation.folds import chance_in_folds, evaluate_folds
from train.evaluation.scoring import score_run
from train.jobs import EvaluateJob
from train.runs.run import open_run


@pytest.fixture
def model(write_run):
    return open_run(write_run(languages=("en", "de", "fr"))).model


@pytest.fixture
def data(toy):
    return open_data(toy.captions, toy.features, split="val", portions={"en": ["comparable"], "de": ["comparable"]})


def brute_force(scores: np.ndarray, owners: list[int], images: list[int]) -> dict[str, list[int]]:
    """Rank one query at a time in one fold: scores [all images, all captions], the image of each caption, the fold's images."""
    columns = [column for column, owner in enumerate(owners) if owner in images]
    to_text, to_image = [], []
    for image in images:
        ranks = [
            1 + sum(scores[image, other] >= scores[image, column] for other in columns if owners[other] != image)
            for column in columns
            if owners[column] == image
        ]
        to_text.append(min(ranks))
    for column in columns:
        own = scores[owners[column], column]
        to_image.append(1 + sum(scores[image, column] >= own for image in images if image != owners[column]))
    return {"image_to_text": to_text, "text_to_image": to_image}


def summary(ranks: list[int]) -> list[float]:
    ordered = sorted(map(int, ranks))
    median = (ordered[(len(ranks) - 1) // 2] + ordered[len(ranks) // 2]) // 2
    return [*(100 * sum(rank <= cutoff for rank in ranks) / len(ranks) for cutoff in (1, 5, 10)), median]


@pytest.mark.parametrize("folds", [2, 3, 5])
def test_folds_are_ranked_each_by_itself_and_averaged(model, data, folds):
    results = evaluate_folds([(model, data)], folds)
    assert list(results) == ["en", "de"]
    count = len(data.captions.image_ids)
    # 12 images in five folds: the first two have three.
    sizes = [count // folds + (number < count % folds) for number in range(folds)]
    ends = np.cumsum([0, *sizes]).tolist()
    images = encode_images(model, data.features.array)
    for language, result in results.items():
        rows = data.captions.rows_of(language)
        captions = encode_captions(model, CaptionBatch(data.captions.token_ids, data.captions.offsets, rows), language)
        with torch.no_grad():
            scores = model.scores(images, captions).numpy()
        owners = data.captions.images[rows].tolist()
        of_folds = [brute_force(scores, owners, list(range(a, b))) for a, b in pairwise(ends)]
        for name in ("image_to_text", "text_to_image"):
            direction = getattr(result, name)
            expected = [mean(values) for values in zip(*(summary(ranks[name]) for ranks in of_folds), strict=True)]
            assert [*direction.recalls, direction.median_rank] == pytest.approx(expected)
            assert direction.queries == sum(len(ranks[name]) for ranks in of_folds)
    together = evaluate_together([(model, data)])
    assert all(results[name].image_to_text.recall_at_5 > together[name].image_to_text.recall_at_5 for name in results)


def test_one_fold_is_the_usual_evaluation(model, data):
    assert evaluate_folds([(model, data)], 1) == evaluate_together([(model, data)])
    assert chance_in_folds(data.captions, "en", 1) == chance(data.captions, "en")


def test_an_ensemble_is_folded_too(model, write_run, data):
    other = open_run(write_run("other", languages=("en", "de", "fr"), seed=1)).model
    alone, both = evaluate_folds([(model, data)], 3), evaluate_folds([(model, data), (other, data)], 3)
    assert evaluate_folds([(model, data), (model, data)], 3) == alone
    assert both != alone


def test_chance_is_that_of_smaller_galleries(data):
    # 12 images with three English captions each, in folds of four images and 12 captions.
    recalls = chance_in_folds(data.captions, "en", 3)
    assert recalls["text_to_image"] == (25.0, 100.0, 100.0)
    assert recalls["image_to_text"][0] == pytest.approx(25.0)


def test_a_job_has_folds(write_run, toy):
    arguments = {"captions": toy.captions, "features": toy.features, "splits": ("val",), "portion": "comparable"}
    run = open_run(write_run())
    (whole, *_), (folded, *_) = score_run(run, **arguments), score_run(run, folds=4, **arguments)
    assert folded.folds == 4
    assert (folded.to_dict()["folds"], "folds" in whole.to_dict()) == (4, False)
    data = open_data(toy.captions, toy.features, split="val", portions={folded.language: ["comparable"]})
    assert folded.retrieval == evaluate_folds([(run.model, data)], 4)[folded.language]
    assert folded.chance["text_to_image"][0] == pytest.approx(100 / 3)
    job = EvaluateJob("run", toy.captions, toy.features)
    with pytest.raises(UsageError, match="--folds is 0, expected 1 or more"):
        replace(job, folds=0)


def test_more_folds_than_images_are_refused(model, data):
    with pytest.raises(UsageError, match="--folds is 13, but split 'val' has only 12 images with captions in 'en'"):
        evaluate_folds([(model, data)], 13)
