from dataclasses import replace
from itertools import combinations_with_replacement

import numpy as np
import pytest
import torch

from schemas.errors import UsageError
from tests.train.models.equations import diversity, triplets
from train.config.models import MhaDConfig, VseConfig
from train.config.sections import LossConfig
from train.data.batches import CaptionBatch
from train.data.sampling import Batch, ImageSampler, TaskSampler
from train.data.splits import open_data
from train.material import inputs_of
from train.models.catalogue import build_model
from train.models.dimensions import Dimensions
from train.models.retrieval_model import Encoded, ImageBatch
from train.objectives.terms import Objective, Views, named_losses, terms_of

LANGUAGES = ("en", "de", "fr")
PORTIONS = {"en": ["comparable"], "de": ["comparable"], "fr": ["translation"]}
MARGIN = 0.2


@pytest.fixture(scope="module")
def data(toy):
    return open_data(toy.captions, toy.features, toy.vocabulary, split="train", portions=PORTIONS)


@pytest.fixture(scope="module", params=["cosine", "order"])
def model(request, data):
    config = VseConfig(embed_dim=5, word_dim=4, similarity=request.param)
    return build_model(config, Dimensions(LANGUAGES, len(data.vocabulary), (8,)), seed=1)


def objective(model, *, caption_weight=1.0):
    terms = terms_of(LossConfig(margin=MARGIN, caption_weight=caption_weight), model)
    return Objective(model, terms, whole=lambda part, count: part)


def score(model, a, b):
    """Compute the similarity of one pair of embeddings by the papers' formulas."""
    if model.similarity == "cosine":
        return float(sum(x * y for x, y in zip(a.tolist(), b.tolist(), strict=True)))
    return -float(sum(max(0.0, y - x) ** 2 for x, y in zip(a.tolist(), b.tolist(), strict=True)))


def by_hand(model, a, b, images, hinges="sum"):
    """Compute the ranking loss of pairs (a, b) in both directions, one hinge at a time."""
    total = 0.0
    for r in range(len(a)):
        true = score(model, a[r], b[r])
        others = [other for other in range(len(a)) if images[other] != images[r]]
        rows = [max(0.0, MARGIN - true + score(model, a[r], b[c])) for c in others]
        columns = [max(0.0, MARGIN - true + score(model, a[c], b[r])) for c in others]
        total += sum(rows) + sum(columns) if hinges == "sum" else max(rows, default=0.0) + max(columns, default=0.0)
    return total


def embed(model, data, rows):
    """Embed captions one by one, each in its own language."""
    captions, embeddings = data.captions, []
    for row in rows:
        language = captions.language_names[captions.languages[row]]
        batch = CaptionBatch(captions.token_ids, captions.offsets, np.array([row]))
        embeddings.append(model.encode_captions(batch, language).values[0])
    return torch.stack(embeddings)


def images_of(model, data, images):
    return model.encode_images(ImageBatch(torch.from_numpy(data.features.array[images]))).values


@pytest.mark.parametrize("hinges", ["sum", "max"])
def test_captions_against_images(data, model, hinges):
    sampler = TaskSampler(data.captions, 17, seed=0)
    for _ in range(4):
        batch = sampler.next()
        assert batch.task == "c2i"
        loss, terms = objective(model)(inputs_of(data, batch, torch.device("cpu")), hinges)
        a, b = images_of(model, data, batch.images), embed(model, data, batch.captions[0])
        assert loss.item() == pytest.approx(by_hand(model, a, b, batch.images, hinges), rel=1e-5)
        assert {name: value.item() for name, value in terms.items()} == {f"c2i/{batch.languages[0]}": loss.item()}


@pytest.mark.parametrize("hinges", ["sum", "max"])
def test_captions_against_captions(data, model, hinges):
    sampler = TaskSampler(data.captions, 17, seed=0, c2c_probability=1.0)
    batch = sampler.next()
    assert batch.task == "c2c"
    assert batch.languages == (None, None) or None in batch.languages  # Pairs of all languages form one pool.
    loss, terms = objective(model)(inputs_of(data, batch, torch.device("cpu")), hinges)
    a, b = (embed(model, data, rows) for rows in batch.captions)
    assert loss.item() == pytest.approx(by_hand(model, a, b, batch.images, hinges), rel=1e-5)
    assert {name: value.item() for name, value in terms.items()} == {"c2c": loss.item()}


def test_equation_1(data, model):
    batch = ImageSampler(data.captions, 9, seed=0).next()
    inputs = inputs_of(data, batch, torch.device("cpu"))
    images = images_of(model, data, batch.images)
    expected = sum(by_hand(model, images, embed(model, data, rows), batch.images) for rows in batch.captions)
    assert len(batch.captions) == 3
    loss, terms = objective(model, caption_weight=0.0)(inputs, "sum")
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert list(terms) == ["c2i/en", "c2i/de", "c2i/fr"]


def test_equation_2_is_over_all_pairs_of_languages(data, model):
    batch = ImageSampler(data.captions, 9, seed=0).next()
    inputs = inputs_of(data, batch, torch.device("cpu"))
    images = images_of(model, data, batch.images)
    english, german, french = (embed(model, data, rows) for rows in batch.captions)
    pairs = [(images, english), (images, german), (images, french), (english, german), (english, french), (german, french)]
    by_pair = [by_hand(model, a, b, batch.images) for a, b in pairs]
    loss, terms = objective(model)(inputs, "sum")
    assert loss.item() == pytest.approx(sum(by_pair), rel=1e-5)
    names = ["c2i/en", "c2i/de", "c2i/fr", "c2c/en-de", "c2c/en-fr", "c2c/de-fr"]
    assert {name: value.item() for name, value in terms.items()} == pytest.approx(
        dict(zip(names, by_pair, strict=True)), rel=1e-5
    )
    weighted, same = objective(model, caption_weight=0.25)(inputs, "sum")
    assert weighted.item() == pytest.approx(sum(by_pair[:3]) + 0.25 * sum(by_pair[3:]), rel=1e-5)
    assert {name: value.item() for name, value in same.items()} == {name: value.item() for name, value in terms.items()}


def test_captions_of_the_same_image_are_not_negatives(data, model):
    """A batch of one image has no negatives."""
    captions = data.captions
    rows = np.flatnonzero((captions.images == 0) & (captions.languages == 0))
    assert len(rows) == 3
    batch = Batch("c2i", (rows,), captions.images[rows], ("en",))
    loss, _ = objective(model)(inputs_of(data, batch, torch.device("cpu")), "sum")
    assert loss.item() == 0.0


def test_a_part_of_the_rows_is_gathered_with_all_images(data):
    batch = TaskSampler(data.captions, 10, seed=0).next()
    inputs = inputs_of(data, batch, torch.device("cpu"), slice(3, 7))
    assert inputs.numbers.tolist() == batch.images.tolist()
    np.testing.assert_array_equal(inputs.images.features, data.features.array[batch.images[3:7]])
    assert len(inputs.captions[0]) == 4


def test_gradients_reach_every_parameter_that_took_part(data, model):
    model.zero_grad()
    batch = TaskSampler(data.captions, 10, seed=0, c2c_probability=1.0).next()
    objective(model)(inputs_of(data, batch, torch.device("cpu")), "sum")[0].backward()
    with_gradient = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert with_gradient == {name for name, _ in model.named_parameters() if name.startswith("sentences")}
    assert with_gradient
    model.zero_grad()


# --- attention heads: equations 3 to 7 of Huang et al. 2019 ------------------------------------------------------------

LOSS = LossConfig(margin=MARGIN, hinges="max", caption_weight=0.6, diversity_weight=0.7, diversity_margin=1.2)


@pytest.fixture(scope="module")
def regions(toy_regions):
    return open_data(
        toy_regions.captions, toy_regions.features, toy_regions.vocabulary, split="train", portions=PORTIONS, seed=0
    )


@pytest.fixture(scope="module")
def heads(regions):
    config = MhaDConfig(embed_dim=5, word_dim=4, num_heads=3, attention_dim=6, context_dim=7)
    return build_model(config, Dimensions(LANGUAGES, len(regions.vocabulary), (3, 8)), seed=1).double()


def view(encoded):
    return encoded.values.detach().numpy()


def doubled(inputs):
    return replace(inputs, images=ImageBatch(inputs.images.features.double()))


@pytest.mark.parametrize("languages", [("en", "de"), LANGUAGES])
def test_equation_7(regions, heads, languages):
    """Footnote 1: more languages add their terms to equations 4, 6 and 7."""
    batch = ImageSampler(regions.captions, 9, seed=0).next()
    inputs = doubled(inputs_of(regions, batch, torch.device("cpu")))
    inputs = replace(inputs, captions=inputs.captions[: len(languages)], languages=languages)
    views = {"images": view(heads.encode_images(inputs.images))}
    for language, captions in zip(languages, inputs.captions, strict=True):
        views[language] = view(heads.encode_captions(captions, language))
    split = {name: values.reshape(9, 3, 5) for name, values in views.items()}
    expected, total = {}, 0.0
    for one, other in combinations_with_replacement(views, 2):
        name = one if one == other else f"{one}-{other}"
        expected[f"diversity/{name}"] = diversity(split[one], split[other], 1.2)
        total += 0.7 * expected[f"diversity/{name}"]
        if one != other:
            ranked = f"c2i/{other}" if one == "images" else f"c2c/{name}"
            expected[ranked] = triplets(views[one], views[other], MARGIN)
            total += (1.0 if one == "images" else 0.6) * expected[ranked]
    loss, terms = Objective(heads, terms_of(LOSS, heads), whole=lambda part, count: part)(inputs, "max")
    assert loss.item() == pytest.approx(total, rel=1e-12)
    assert {name: value.item() for name, value in terms.items()} == pytest.approx(expected, rel=1e-12)
    assert len(terms) == {2: 6 + 3, 3: 10 + 6}[len(languages)]
    assert sum(value > 0 for value in terms.values()) >= len(terms) - 2


def test_diversity_of_what_a_batch_holds(regions, heads):
    """Batches of one task have images and captions in one language."""
    batch = TaskSampler(regions.captions, 9, seed=0).next()
    language = batch.languages[0]
    _, terms = Objective(heads, terms_of(LOSS, heads), whole=lambda part, count: part)(
        doubled(inputs_of(regions, batch, torch.device("cpu"))), "sum"
    )
    names = [f"c2i/{language}", "diversity/images", f"diversity/images-{language}", f"diversity/{language}"]
    assert list(terms) == names


def test_losses_of_mixed_languages_have_one_name(heads):
    captions = [Encoded(torch.randn(4, 15, dtype=torch.float64)) for _ in range(2)]
    views = Views(torch.arange(4), None, ((None, captions[0]), (None, captions[1])))
    first, second = (encoded.values.reshape(4, 3, 5).numpy() for encoded in captions)
    _, terms = named_losses(terms_of(LOSS, heads), views, "max")
    expected = sum(diversity(*pair, 1.2) for pair in ((first, first), (first, second), (second, second)))
    assert list(terms) == ["c2c", "diversity"]
    assert terms["diversity"].item() == pytest.approx(expected, rel=1e-12)


def test_without_its_weight_there_is_no_diversity(heads):
    assert [term.name for term in terms_of(replace(LOSS, diversity_weight=0.0), heads)] == ["c2c", "c2i"]


def test_models_without_heads_have_no_diversity(model, heads):
    with pytest.raises(
        UsageError, match=r"diversity_weight is 0.7, but this model \(JointEmbedding\) has 1 head: leave it at 0"
    ):
        terms_of(LOSS, model)
    single = build_model(MhaDConfig(embed_dim=5, num_heads=1), Dimensions(("en",), 9, (3, 8)), seed=0)
    with pytest.raises(UsageError, match=r"this model \(MhaD\) has 1 head"):
        terms_of(LOSS, single)
