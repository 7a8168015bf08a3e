"""The validation split during a training, against losses of one hinge at a time."""

import io
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from tests.train.trainings import CONFIG, ORDER, PARALLEL, assert_equal, events, weights
from train.config.sections import from_toml
from train.data.batches import CaptionBatch
from train.data.sampling import fixed_batches
from train.evaluation.evaluating import evaluate
from train.evaluation.validating import Validation, validate
from train.jobs import TrainJob
from train.loop import train
from train.losses import terms_of
from train.models.catalogue import build_model
from train.models.retrieval_model import ImageBatch
from train.progress import TrainingDisplay
from train.training_data import Material, open_material

MAX = CONFIG.replace("c2c_probability = 0.5", 'c2c_probability = 0.5\nhinges = "max"\nsum_warmup_steps = 10')
THREE = CONFIG.replace("[model]", "[model]\nshared_encoder = true").replace(
    "portions = {", 'portions = { fr = ["translation"],'
)


def by_hand(model, data, batch, hinges):
    """The losses of a batch by name: every item is encoded alone, every score is computed alone."""
    captions = data.captions

    def caption(row):
        one = CaptionBatch(captions.token_ids, captions.offsets, torch.tensor([row]).numpy())
        return model.encode_captions(one, captions.language_names[captions.languages[row]])

    def image(number):
        return model.encode_images(ImageBatch(torch.from_numpy(data.features.array[[number]])))

    views = [(language, [caption(row) for row in rows]) for language, rows in zip(batch.languages, batch.captions, strict=True)]
    pairs = [
        (f"c2c/{one}-{other}" if one and other else "c2c", first, second)
        for n, (one, first) in enumerate(views)
        for other, second in views[n + 1 :]
    ]
    if batch.task != "c2c":
        images = [image(number) for number in batch.images]
        pairs += [(f"c2i/{language}", images, others) for language, others in views]
    losses = {}
    for name, a, b in pairs:
        total, count = 0.0, range(len(a))
        score = [[float(model.scores(a[r], b[c])) for c in count] for r in count]
        for r in count:
            others = [c for c in count if batch.images[c] != batch.images[r]]
            rows = [max(0.0, 0.2 - score[r][r] + score[r][c]) for c in others]
            columns = [max(0.0, 0.2 - score[r][r] + score[c][r]) for c in others]
            total += sum(rows) + sum(columns) if hinges == "sum" else max(rows, default=0.0) + max(columns, default=0.0)
        losses[name] = total
    return losses


@pytest.mark.parametrize("text", [CONFIG, MAX, PARALLEL, THREE], ids=["tasks", "max", "images", "three languages"])
def test_losses_are_those_of_the_batches_by_hand(toy, text):
    config = from_toml(text, "test")
    material = open_material(config, toy, seed=0)
    model = build_model(config.model, material.dimensions, 0)
    found = validate(model, material.validation, config, terms_of(config.loss, model))
    assert found.retrieval == evaluate(model, material.validation)
    sums, queries, total, every = {}, {}, 0.0, 0
    with torch.no_grad():
        for batch in fixed_batches(material.validation.captions, config.schedule, config.loss):
            losses = by_hand(model, material.validation, batch, config.loss.hinges)
            total, every = total + sum(losses.values()), every + 2 * len(batch.images)
            for name, loss in losses.items():
                sums[name] = sums.get(name, 0.0) + loss
                queries[name] = queries.get(name, 0) + 2 * len(batch.images)
    assert found.loss == pytest.approx(total / every, rel=1e-4)
    assert found.terms == {name: pytest.approx(sums[name] / queries[name], rel=1e-4) for name in sums}
    assert len(sums) == {CONFIG: 3, MAX: 3, PARALLEL: 3}.get(text, len(sums))
    if text == THREE:
        assert "c2c" in sums  # Pairs of several languages in one batch.


def test_weights_of_terms_count_in_the_loss_alone(toy):
    text = PARALLEL.replace("caption_weight = 1.0", "caption_weight = 0.25")
    config = from_toml(text, "test")
    material = open_material(config, toy, seed=0)
    model = build_model(config.model, material.dimensions, 0)
    found = validate(model, material.validation, config, terms_of(config.loss, model))
    assert set(found.terms) == {"c2c/en-de", "c2i/en", "c2i/de"}
    expected = found.terms["c2i/en"] + found.terms["c2i/de"] + 0.25 * found.terms["c2c/en-de"]
    assert found.loss == pytest.approx(expected, rel=1e-5)


def test_the_model_is_left_as_it_was(toy):
    config = from_toml(CONFIG, "test")
    material = open_material(config, toy, seed=0)
    model = build_model(config.model, material.dimensions, 0).train()
    before, generator = {name: value.clone() for name, value in model.state_dict().items()}, torch.random.get_rng_state()
    first, second = (validate(model, material.validation, config, terms_of(config.loss, model)) for _ in range(2))
    assert first == second
    assert model.training
    assert_equal(dict(model.state_dict()), before)
    assert torch.equal(torch.random.get_rng_state(), generator)


class Silent(Material):
    """Material that measures no losses."""

    def evaluate(self, model, config, terms):
        return Validation(super().evaluate(model, config, terms).retrieval)


@pytest.mark.slow
def test_a_training_is_the_same_with_and_without_them(toy, finished_run, tmp_path):
    config = from_toml(CONFIG, "test")
    material = Silent(**vars(open_material(config, toy, seed=0)))
    result = train(TrainJob(config, None, str(tmp_path / "silent"), device="cpu"), material=material)
    folder, expected = finished_run
    assert result.progress == expected.progress
    assert_equal(weights(tmp_path / "silent"), weights(folder))
    assert events(tmp_path / "silent", "validation") == []
    for event in ("step", "evaluation"):
        assert events(tmp_path / "silent", event) == events(folder, event)
    logged = events(folder, "validation")
    assert [line["step"] for line in logged] == [17, 34, 44]
    assert all(set(line["terms"]) == {"c2i/en", "c2i/de", "c2c/en-de"} for line in logged)
    assert logged[-1]["loss"] < logged[0]["loss"]


def test_the_logged_loss_is_that_of_the_model(toy, finished_run):
    folder, _ = finished_run
    config = from_toml(CONFIG, "test")
    material = open_material(config, toy, seed=0)
    model = build_model(config.model, material.dimensions, 0)
    model.load_state_dict(weights(folder))
    found = validate(model, material.validation, config, terms_of(config.loss, model))
    (line,) = (line for line in events(folder, "validation") if line["step"] == 44)
    assert (line["loss"], line["terms"]) == (found.loss, found.terms)


@pytest.mark.slow
def test_it_is_shown_with_the_scores(toy, tmp_path):
    reports, output = [], io.StringIO()
    job = TrainJob(from_toml(CONFIG, "test"), toy, str(tmp_path / "run"), device="cpu")
    with TrainingDisplay(Console(file=output, width=120)) as line:
        train(job, lambda report: (reports.append(report), line(report)))
    logged = events(tmp_path / "run", "validation")
    assert [report.validation_loss for report in reports if report.scores] == [line["loss"] for line in logged]
    assert {report.validation_loss for report in reports if not report.scores} == {None}
    assert f"; validation loss {logged[0]['loss']:.4f}\n" in output.getvalue()


def test_images_that_lack_a_language_leave_no_loss(toy):
    """For batches of images that are in every language."""
    config = from_toml(
        ORDER.replace("c2c_probability = 0.5", "").replace("[schedule]", '[schedule]\nbatches = "images"'), "test"
    )
    material = open_material(config, toy, seed=0)
    captions = material.validation.captions
    apart = captions.select((captions.languages == 0) == (captions.images < 6))
    data = replace(material.validation, captions=apart)
    model = build_model(config.model, material.dimensions, 0)
    found = validate(model, data, config, terms_of(config.loss, model))
    assert (found.loss, found.terms) == (None, {})
    assert found.retrieval == evaluate(model, data)
