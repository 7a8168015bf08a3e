from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from statistics import mean

import numpy as np
import pytest
import torch

from schemas.errors import UsageError
from tests.fake_gpu import fake_gpu
from tests.train.test_losses import inputs_of
from tests.train.trainings import (
    ALL_PORTIONS,
    CONFIG,
    ORDER,
    PARALLEL,
    assert_equal,
    evaluate_ensemble,
    evaluate_folds,
    events,
    retrieval_ranks,
    weights,
)
from train.config.sections import from_toml
from train.data.sampling import fixed_batches
from train.data.splits import open_data
from train.devices import computing
from train.evaluation.evaluation import (
    chance,
    embed_captions,
    embed_images,
    measure_validation,
)
from train.evaluation.metrics import RetrievalMetrics
from train.loop.training_data import load_training_inputs
from train.losses import Objective, terms_of
from train.models.catalogue import build_model
from train.models.retrieval_model import ImageBatch
from train.runs.run import open_run


@pytest.fixture
def model(write_run):
    return open_run(write_run(languages=("en", "de", "fr"))).model


@pytest.fixture
def data(toy):
    return open_data(toy.captions, toy.features, split="test", portions=ALL_PORTIONS)


def rows_of(data, language):
    return data.captions.batch(data.captions.rows_of(language))


@pytest.mark.parametrize("batch_size", [1, 4, 512])
def test_embeddings_are_those_of_each_caption_alone(model, data, batch_size, monkeypatch):
    monkeypatch.setattr("train.evaluation.evaluation._BATCH", batch_size)
    for language in data.captions.language_names:
        batch = rows_of(data, language)
        together = embed_captions(model, batch, language).values
        assert len(together) == len(batch) > 0
        assert not together.requires_grad
        with torch.no_grad():
            for row, embedding in zip(batch.rows, together, strict=True):
                alone = replace(batch, rows=np.array([row]))
                expected = model.encode_captions(alone, language).values[0]
                torch.testing.assert_close(embedding, expected, atol=1e-6, rtol=1e-5)
    images = embed_images(model, data.features).values
    with torch.no_grad():
        expected = model.encode_images(ImageBatch(torch.from_numpy(data.features[:]))).values
    torch.testing.assert_close(images, expected, atol=1e-6, rtol=1e-5)
    assert not images.requires_grad


def test_images_without_a_caption_in_the_language_take_no_part(model, data):
    captions = data.captions
    english = captions.language_names.index("en")
    # All images have German and French captions, three have English ones.
    few = captions.select((captions.languages != english) | (captions.images < 3))
    english_result = evaluate_ensemble([(model, replace(data, captions=few))])["en"]
    assert english_result.image_to_text.queries == 3
    assert english_result.text_to_image.queries == 12
    assert english_result.text_to_image.recall_at_5 == 100  # Three candidates only.


def test_chance_equals_random_scores(data):
    captions = data.captions
    rows = captions.rows_of("en")
    owner = torch.from_numpy(captions.images[rows]).long()
    expected = chance(captions, "en")
    generator = torch.Generator().manual_seed(0)
    hits = np.zeros(2)
    rounds = 400
    for _ in range(rounds):
        scores = torch.rand(9, len(rows), generator=generator)
        ranks = retrieval_ranks(lambda rows, columns, scores=scores: scores[rows][:, columns], 9, owner)
        hits += (ranks.image_to_text <= 5).float().mean().item(), (ranks.text_to_image <= 5).float().mean().item()
    recalls = 100 * hits / rounds
    assert recalls[0] == pytest.approx(expected.image_to_text[1], abs=2)
    assert recalls[1] == pytest.approx(expected.text_to_image[1], abs=2)
    assert expected.text_to_image == pytest.approx((100 / 9, 500 / 9, 100, 5))


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", None])
def test_evaluation_on_a_gpu_computes_in_float32(model, data, precision):
    seen = []

    def look(*_):
        cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
        found = {owner.fp32_precision for owner in (cudnn.conv, cudnn.rnn, matmul)}
        seen.append((found, torch.is_autocast_enabled("cuda"), gpu.device))

    with fake_gpu() as gpu:
        model = model.to("cuda:0")
        for module in model.modules():
            module.register_forward_pre_hook(look)
        scores = model.scores
        model.scores = lambda *args: (look(), scores(*args))[1]
        before = torch.backends.cudnn.rnn.fp32_precision
        with nullcontext() if precision is None else computing(precision, model.device):
            found = evaluate_ensemble([(model, data)])
        assert torch.backends.cudnn.rnn.fp32_precision == before
    assert seen
    assert all(each == ({"ieee"}, False, 0) for each in seen)
    assert list(found) == list(data.captions.language_names)


@pytest.fixture
def untrained(toy):
    """Build the model of a configuration, and open its data."""

    def build(text: str = CONFIG):
        config = from_toml(text, "test")
        inputs = load_training_inputs(config, toy, seed=0)
        model = build_model(config.model, inputs.dimensions, 0)
        return config, inputs.validation, model, terms_of(config.loss, model)

    return build


MAX = CONFIG.replace("c2c_probability = 0.5", 'c2c_probability = 0.5\nhinges = "max"\nsum_warmup_steps = 10')
WEIGHTED = PARALLEL.replace("caption_weight = 1.0", "caption_weight = 0.25")
THREE = CONFIG.replace("[model]", "[model]\nshared_encoder = true").replace(
    "portions = {", 'portions = { fr = ["translation"],'
)


@pytest.mark.parametrize("text", [CONFIG, MAX, WEIGHTED, THREE], ids=["tasks", "max", "images", "three languages"])
def test_losses_are_those_of_the_objective_of_each_batch(untrained, text):
    config, data, model, terms = untrained(text)
    found = measure_validation(model, data, config, terms)
    assert found.retrieval == evaluate_ensemble([(model, data)])
    objective = Objective(model.eval(), terms, gather_rows=lambda encoded, count: encoded)
    sums, queries, total, every = {}, {}, 0.0, 0
    with torch.no_grad():
        for batch in fixed_batches(data.captions, config.schedule, config.loss):
            loss, losses = objective(inputs_of(data, batch), config.loss.hinges)
            total, every = total + loss.item(), every + 2 * len(batch.images)
            for name, value in losses.items():
                sums[name] = sums.get(name, 0.0) + value.item()
                queries[name] = queries.get(name, 0) + 2 * len(batch.images)
    assert found.loss == pytest.approx(total / every, rel=1e-4)
    assert found.terms == {name: pytest.approx(sums[name] / queries[name], rel=1e-4) for name in sums}
    if text == THREE:
        assert "c2c" in sums  # Pairs of several languages in one batch.
    else:
        assert set(sums) == {"c2i/en", "c2i/de", "c2c/en-de"}


@pytest.mark.parametrize("training", [True, False])
def test_measure_validation_leaves_the_model_unchanged(untrained, training):
    config, data, model, terms = untrained()
    model.train(training)
    before, generator = {name: value.clone() for name, value in model.state_dict().items()}, torch.random.get_rng_state()
    assert measure_validation(model, data, config, terms) == measure_validation(model, data, config, terms)
    assert (model.training, torch.is_grad_enabled()) == (training, True)
    assert_equal(dict(model.state_dict()), before)
    assert torch.equal(torch.random.get_rng_state(), generator)


def test_logged_loss_equals_validate(untrained, finished_run):
    folder, _ = finished_run
    config, data, model, terms = untrained()
    model.load_state_dict(weights(folder))
    found = measure_validation(model, data, config, terms)
    logged = events(folder, "validation")
    assert [line["step"] for line in logged] == [17, 34, 44]
    assert (logged[-1]["loss"], logged[-1]["terms"]) == (found.loss, found.terms)
    assert logged[-1]["loss"] < logged[0]["loss"]


def test_measure_validation_without_images_in_all_languages_has_no_loss(untrained):
    text = ORDER.replace("c2c_probability = 0.5", "").replace("[schedule]", '[schedule]\nbatches = "images"')
    config, data, model, terms = untrained(text)
    captions = data.captions
    apart = replace(data, captions=captions.select((captions.languages == 0) == (captions.images < 6)))
    found = measure_validation(model, apart, config, terms)
    assert (found.loss, found.terms) == (None, {})
    assert found.retrieval == evaluate_ensemble([(model, apart)])


@pytest.fixture
def comparable(toy):
    return open_data(toy.captions, toy.features, split="val", portions={"en": ["comparable"], "de": ["comparable"]})


@pytest.mark.parametrize(("seeds", "folds"), [(1, 1), (3, 1), (1, 2), (2, 3), (1, 5)])
def test_mean_scores_are_ranked_in_each_language_and_fold_by_itself(write_run, comparable, seeds, folds):
    models = [open_run(write_run(f"run-{seed}", seed=seed)).model for seed in range(seeds)]
    results = evaluate_folds([(model, comparable) for model in models], folds)
    assert list(results) == ["en", "de"]
    count = len(comparable.captions.image_ids)
    # 12 images in five folds: the first two have three.
    sizes = [count // folds + (number < count % folds) for number in range(folds)]
    ends = np.cumsum([0, *sizes]).tolist()
    images = [embed_images(model, comparable.features) for model in models]
    for language, result in results.items():
        batch = rows_of(comparable, language)
        texts = [embed_captions(model, batch, language) for model in models]
        with torch.no_grad():
            scores = sum(model.scores(*pair) for model, *pair in zip(models, images, texts, strict=True)) / seeds
        owners = torch.from_numpy(comparable.captions.images[batch.rows]).long()
        metrics = []
        for start, end in pairwise(ends):
            inside = (owners >= start) & (owners < end)
            fold = scores[start:end, inside]
            ranks = retrieval_ranks(
                lambda rows, columns, fold=fold: fold[rows][:, columns], end - start, owners[inside] - start
            )
            metrics.append(RetrievalMetrics.of(ranks))
        for name in ("image_to_text", "text_to_image"):
            direction, of_folds = getattr(result, name), [getattr(fold, name) for fold in metrics]
            assert direction.recalls == pytest.approx(np.mean([fold.recalls for fold in of_folds], axis=0))
            assert direction.median_rank == pytest.approx(mean(fold.median_rank for fold in of_folds))
            assert direction.queries == sum(fold.queries for fold in of_folds)


def test_more_folds_than_images_are_refused(model, comparable):
    with pytest.raises(UsageError, match="--folds is 13, but split 'val' has only 12 images with captions in 'en'"):
        evaluate_folds([(model, comparable)], 13)
