"""Captions among captions of the same images, against loops over single captions."""

from dataclasses import replace
from itertools import permutations, product

import numpy as np
import pytest
import torch

from schemas.errors import UsageError
from tests.train.evaluation.test_metrics import plain_ranks_between
from tests.train.trainings import encode_row
from train.chance import chance_measures
from train.data.splits import open_data
from train.evaluation.cross_lingual import CrossLingualRetrieval, evaluate_cross_lingual
from train.evaluation.metrics import RecallMetrics
from train.evaluation.scores import evaluate
from train.jobs import EvaluateJob
from train.models.retrieval_model import Encoded
from train.runs.run import open_run

PORTIONS = {"de": ["comparable"], "en": ["comparable"], "fr": ["translation"]}


@pytest.fixture
def data(toy):
    return open_data(toy.captions, toy.features, split="test", portions=PORTIONS)


def by_hand(models, data, query: str, other: str) -> CrossLingualRetrieval:
    """Rank captions, each encoded alone; the model's scores go from the language that comes first in it to the other."""
    captions, turned = data.captions, models[0].languages.index(query) > models[0].languages.index(other)
    images = {name: captions.images[captions.rows_of(name)].tolist() for name in (query, other)}
    common = set(images[query]) & set(images[other])
    rows = {name: [row for row in captions.rows_of(name).tolist() if captions.images[row] in common] for name in images}

    scores = np.zeros((len(rows[query]), len(rows[other])))
    for model, (r, row), (c, candidate) in product(models, enumerate(rows[query]), enumerate(rows[other])):
        pair = encode_row(model, captions, row, query), encode_row(model, captions, candidate, other)
        with torch.no_grad():
            scores[r, c] += float(model.scores(*(reversed(pair) if turned else pair))) / len(models)
    of_query, of_other = (captions.images[rows[name]].tolist() for name in (query, other))
    ranks, _ = plain_ranks_between(scores.tolist(), of_query, of_other)
    chance = chance_measures([of_other.count(image) for image in of_query], len(of_other))
    return CrossLingualRetrieval(RecallMetrics.of(torch.tensor(ranks)), chance, intervals=None, ranks=None)


@pytest.mark.cluster
@pytest.mark.parametrize("similarity", ["cosine", "order"])
@pytest.mark.parametrize("languages", [("en", "de", "fr"), ("fr", "en", "de")])
def test_ranks_are_those_of_single_captions(write_run, data, similarity, languages):
    model = open_run(write_run(languages=languages, similarity=similarity)).model
    found = evaluate_cross_lingual([(model, data)])
    assert set(found) == set(permutations(("de", "en", "fr"), 2))
    for (query, other), result in found.items():
        expected = by_hand([model], data, query, other)
        assert result.direction == expected.direction, (query, other)
        assert result.chance == expected.chance
    assert found["en", "de"].direction.queries == 27


def test_images_without_captions_in_both_languages_take_no_part(write_run, data):
    captions = data.captions
    english = captions.language_names.index("en")
    shuffled = np.random.default_rng(0).permutation(len(captions))
    few = captions.select(shuffled).select((captions.languages != english)[shuffled] | (captions.images < 3)[shuffled])
    model = open_run(write_run(languages=("en", "de", "fr"))).model
    found = evaluate_cross_lingual([(model, replace(data, captions=few))])
    assert {pair: result.direction.queries for pair, result in found.items()} == {
        ("en", "de"): 9,
        ("de", "en"): 6,
        ("en", "fr"): 9,
        ("fr", "en"): 3,
        ("de", "fr"): 18,
        ("fr", "de"): 9,
    }
    only = captions.select((captions.languages != english) | (captions.images < 3))
    assert found == evaluate_cross_lingual([(model, replace(data, captions=only))])
    expected = by_hand([model], replace(data, captions=only), "de", "en")
    assert (found["de", "en"].direction, found["de", "en"].chance) == (expected.direction, expected.chance)


def test_languages_without_a_common_image_are_left_out(write_run, data):
    captions = data.captions
    english, french = (captions.language_names.index(name) for name in ("en", "fr"))
    apart = captions.select(
        (captions.languages == english) & (captions.images < 4) | (captions.languages == french) & (captions.images >= 4)
    )
    model = open_run(write_run(languages=("en", "de", "fr"))).model
    assert evaluate_cross_lingual([(model, replace(data, captions=apart))]) == {}


@pytest.mark.cluster
def test_ensemble_ranks_by_the_mean(write_run, data):
    models = [open_run(write_run(f"run-{seed}", languages=("en", "fr"), seed=seed)).model for seed in range(2)]
    fewer = replace(data, captions=data.captions.select(data.captions.languages != data.captions.language_names.index("de")))
    found = evaluate_cross_lingual([(model, fewer) for model in models])
    for pair in (("en", "fr"), ("fr", "en")):
        assert found[pair].direction == by_hand(models, fewer, *pair).direction


def test_model_without_vectors_is_asked_for_its_scores(write_run, data):
    model = open_run(write_run(languages=("en", "de", "fr"))).model
    expected = evaluate_cross_lingual([(model, data)])

    class Parts(type(model)):
        """The same similarity, of captions that are several vectors: each half of the embedding is a part."""

        vectors = False

        def encode_captions(self, captions, language):
            whole = super().encode_captions(captions, language).values
            return Encoded(torch.stack(whole.chunk(2, dim=1), dim=1), torch.ones(len(whole), 2, dtype=torch.bool))

        def scores(self, a, b):
            return torch.einsum("ake,bke->ab", a.values, b.values)

    model.__class__ = Parts
    found = evaluate_cross_lingual([(model, data)])
    assert {pair: result.direction for pair, result in found.items()} == {
        pair: result.direction for pair, result in expected.items()
    }


# --- of a run ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_score_holds_them_on_request(write_run, toy):
    folder = write_run(languages=("en", "de", "fr"))
    job = EvaluateJob(folder, toy.captions, toy.features, splits=("val", "test"), device="cpu")
    plain, scores = evaluate(job), evaluate(replace(job, cross_lingual=True))
    assert [replace(score, cross_lingual={}) for score in scores] == plain
    assert all("cross_lingual" not in score.to_dict() for score in plain)
    model = open_run(folder).model
    for score in scores:
        # Portions are not mixed: French has translations alone, German comparable captions alone.
        others = {
            ("de", "comparable"): ["en"],
            ("en", "comparable"): ["de"],
            ("en", "translation"): ["fr"],
            ("fr", "translation"): ["en"],
        }
        (other,) = others[score.language, score.portion]
        data = open_data(
            toy.captions, toy.features, split=score.split, portions={name: [score.portion] for name in (score.language, other)}
        )
        assert score.cross_lingual == {other: evaluate_cross_lingual([(model, data)])[score.language, other]}
        plain_values = score.to_dict()["cross_lingual"][other]
        assert plain_values["recall_at_5"] == score.cross_lingual[other].direction.recall_at_5
        assert plain_values["chance"] == list(score.cross_lingual[other].chance)


def test_one_language_is_not_ranked_across(write_run, toy):
    run = open_run(write_run(languages=("en", "de", "fr")))
    for choice in ({"languages": ["de"]}, {"languages": ["de", "fr"]}):
        with pytest.raises(UsageError, match="nothing to rank across languages"):
            evaluate(run, captions=toy.captions, features=toy.features, splits=["test"], cross_lingual=True, **choice)
