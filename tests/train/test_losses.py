"""Losses and the objective against the papers' equations in loops, and as a compiled graph."""

from copy import deepcopy
from dataclasses import replace
from itertools import combinations_with_replacement

import numpy as np
import pytest
import torch

from schemas.dataset import open_dataset
from schemas.errors import UsageError
from schemas.vocabulary import SPECIALS, Vocabulary
from tests.train.models.equations import cosine, diversity
from tests.train.models.test_every_kind import CONFIGS, SEVERAL
from train.config.models import MhaDConfig, VseConfig
from train.config.sections import LossConfig
from train.data.batches import CaptionBatch
from train.data.sampling import Batch, ImageSampler, TaskSampler
from train.data.splits import SplitData, open_data
from train.loop.distributed import DistributedContext
from train.loop.training_data import TrainingInputs
from train.losses import Inputs, Objective, Views, diversity_loss, named_losses, ranking_loss, terms_of
from train.models.catalogue import build_model
from train.models.retrieval_model import Dimensions, Encoded, ImageBatch


def inputs_of(data: SplitData, batch: Batch) -> Inputs:
    dimensions = Dimensions(data.captions.language_names, 1, data.features.shape[1:])
    inputs = TrainingInputs(data, data, Vocabulary(SPECIALS), {}, dimensions)
    return inputs.inputs(batch, torch.device("cpu"))


def brute_force(scores: list[list[float]], rows: list[int], columns: list[int], margin: float, hinges: str) -> float:
    """Compute the loss one pair at a time."""
    total, together = 0.0, sum if hinges == "sum" else max
    for i in range(len(scores)):
        true = scores[i][i]
        of_row = [max(0.0, margin - true + scores[i][j]) for j in range(len(scores)) if columns[j] != rows[i]]
        of_column = [max(0.0, margin - true + scores[j][i]) for j in range(len(scores)) if rows[j] != columns[i]]
        total += together([*of_row, 0.0]) + together([*of_column, 0.0])
    return total


def check(scores: torch.Tensor, images: list[int], margin: float, hinges: str) -> None:
    ids = torch.tensor(images)
    loss = ranking_loss(scores, ids, margin=margin, hinges=hinges)
    assert loss.shape == ()
    assert float(loss) == pytest.approx(brute_force(scores.tolist(), images, images, margin, hinges), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("hinges", ["sum", "max"])
@pytest.mark.parametrize("size", [0, 1, 2, 3, 17])
@pytest.mark.parametrize("seed", range(3))
def test_loss_equals_brute_force(hinges, size, seed):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(size, size, generator=generator, dtype=torch.float64)
    check(scores, torch.randint(0, max(size, 1), (size,), generator=generator).tolist(), 0.2, hinges)
    check(scores, [7] * size, 5.0, hinges)  # Captions of one image are no negatives.
    check(scores, list(range(size)), 0.05, hinges)
    # Scores with few distinct values give equal hinges, and hinges of exactly zero.
    check(scores.round(), list(range(size)), 1.0, hinges)


@pytest.mark.parametrize("hinges", ["sum", "max"])
def test_ranking_loss_gradients_equal_finite_differences(hinges):
    scores = torch.randn(6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([0, 1, 1, 2, 3, 4])
    assert torch.autograd.gradcheck(lambda s: ranking_loss(s, ids, margin=0.2, hinges=hinges), scores)


def test_ranking_loss_gradient_of_tied_hinges():
    scores = torch.zeros(3, 3, requires_grad=True)
    ids = torch.arange(3)
    ranking_loss(scores, ids, margin=0.2, hinges="max").backward()
    # Row 0 -> column 1, rows 1 and 2 -> column 0; columns likewise; each true pair pays for its row and its column.
    assert scores.grad.tolist() == [[-2, 2, 1], [2, -2, 0], [1, 0, -2]]


@pytest.mark.parametrize("hinges", ["sum", "max"])
def test_ranking_loss_hinge_at_zero_has_no_gradient(hinges):
    scores = torch.tensor([[1.0, 0.5], [0.5, 1.0]], requires_grad=True)
    ids = torch.arange(2)
    loss = ranking_loss(scores, ids, margin=0.5, hinges=hinges)
    loss.backward()
    assert loss == 0
    assert scores.grad.abs().max() == 0


def random_heads(seed: int, count: int = 3) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((5, count, 4)))


@pytest.mark.parametrize("margin", [0.1, 0.6, 1.0, 2.0])
@pytest.mark.parametrize(("seeds", "heads"), [((0, 0), 3), ((0, 1), 3), ((0, 0), 1)])
def test_diversity_loss_equals_equation_5(seeds, heads, margin):
    a, b = (random_heads(seed, heads).requires_grad_() for seed in seeds)
    expected = diversity(a.detach().numpy(), b.detach().numpy(), margin)
    for scale in (1, 3):
        assert diversity_loss(scale * a, b / scale, margin=margin).item() == pytest.approx(expected, abs=1e-12)
    assert torch.autograd.gradcheck(lambda a, b: diversity_loss(a, b, margin=margin), (a, b))
    with torch.autocast("cpu", torch.bfloat16):
        found = diversity_loss(a.float(), b.float(), margin=margin)
    assert torch.equal(found, diversity_loss(a.float(), b.float(), margin=margin))


def test_diversity_loss_of_zeros_has_no_gradient():
    empty = torch.zeros(2, 3, 4, requires_grad=True)
    loss = diversity_loss(empty, empty, margin=1.5)
    assert loss.item() == pytest.approx(2 * 6 * 0.5)
    loss.backward()
    assert not empty.grad.any()


LANGUAGES = ("en", "de", "fr")
PORTIONS = {"en": ["comparable"], "de": ["comparable"], "fr": ["translation"]}
MARGIN = 0.2


@pytest.fixture(scope="module")
def data(toy):
    return open_data(toy.captions, toy.features, toy.vocabulary, split="train", portions=PORTIONS)


@pytest.fixture(scope="module", params=["cosine", "order"])
def model(request, data, toy):
    config = VseConfig(embed_dim=5, word_dim=4, similarity=request.param)
    return build_model(config, Dimensions(LANGUAGES, len(open_dataset(toy.vocabulary).vocabulary()), (8,)), seed=1)


def objective(model, *, caption_weight=1.0):
    terms = terms_of(LossConfig(margin=MARGIN, caption_weight=caption_weight), model)
    return Objective(model, terms, gather_rows=lambda part, count: part)


def score(model, a, b):
    if model.similarity == "cosine":
        return float(sum(x * y for x, y in zip(a.tolist(), b.tolist(), strict=True)))
    return -float(sum(max(0.0, y - x) ** 2 for x, y in zip(a.tolist(), b.tolist(), strict=True)))


def by_hand(model, a, b, images, hinges="sum"):
    """Compute the ranking loss of pairs (a, b) in both directions, one hinge at a time."""
    return brute_force([[score(model, x, y) for y in b] for x in a], images, images, MARGIN, hinges)


def embed(model, data, rows):
    """Embed captions one by one, each in its own language."""
    captions, embeddings = data.captions, []
    for row in rows:
        language = captions.language_names[captions.languages[row]]
        batch = CaptionBatch(captions.token_ids, captions.offsets, np.array([row]))
        embeddings.append(model.encode_captions(batch, language).values[0])
    return torch.stack(embeddings)


def images_of(model, data, images):
    return model.encode_images(ImageBatch(torch.from_numpy(data.features[:][images]))).values


@pytest.mark.parametrize("hinges", ["sum", "max"])
@pytest.mark.parametrize("task", ["c2i", "c2c"])
def test_task_objective_equals_brute_force(data, model, hinges, task):
    sampler = TaskSampler(data.captions, 17, seed=0, c2c_probability=float(task == "c2c"))
    for _ in range(4):
        batch = sampler.next()
        assert batch.task == task
        loss, terms = objective(model)(inputs_of(data, batch), hinges)
        sides = [embed(model, data, rows) for rows in batch.captions]
        a, b = sides if task == "c2c" else (images_of(model, data, batch.images), *sides)
        assert loss.item() == pytest.approx(by_hand(model, a, b, batch.images, hinges), rel=1e-5)
        name = "c2c" if task == "c2c" else f"c2i/{batch.languages[0]}"  # Pairs of all languages form one pool.
        assert {name: value.item() for name, value in terms.items()} == {name: loss.item()}


def test_objective_equals_equations_1_and_2_of_gella(data, model):
    batch = ImageSampler(data.captions, 9, seed=0).next()
    inputs = inputs_of(data, batch)
    images = images_of(model, data, batch.images)
    english, german, french = (embed(model, data, rows) for rows in batch.captions)
    pairs = [(images, english), (images, german), (images, french), (english, german), (english, french), (german, french)]
    by_pair = [by_hand(model, a, b, batch.images) for a, b in pairs]
    names = ["c2i/en", "c2i/de", "c2i/fr", "c2c/en-de", "c2c/en-fr", "c2c/de-fr"]
    for weight in (0.0, 0.25, 1.0):  # Equation 1 has no captions against captions.
        loss, terms = objective(model, caption_weight=weight)(inputs, "sum")
        assert loss.item() == pytest.approx(sum(by_pair[:3]) + weight * sum(by_pair[3:]), rel=1e-5)
        expected = dict(zip(names, by_pair, strict=True) if weight else zip(names[:3], by_pair[:3], strict=True))
        assert {name: value.item() for name, value in terms.items()} == pytest.approx(expected, rel=1e-5)


LOSS = LossConfig(margin=MARGIN, hinges="max", caption_weight=0.6, diversity_weight=0.7, diversity_margin=1.2)


@pytest.fixture(scope="module")
def regions(toy_regions):
    return open_data(
        toy_regions.captions, toy_regions.features, toy_regions.vocabulary, split="train", portions=PORTIONS, seed=0
    )


@pytest.fixture(scope="module")
def heads(toy_regions):
    config = MhaDConfig(embed_dim=5, word_dim=4, num_heads=3, attention_dim=6, context_dim=7)
    tokens = open_dataset(toy_regions.vocabulary).vocabulary().tokens
    return build_model(config, Dimensions(LANGUAGES, len(tokens), (3, 8)), seed=1).double()


def view(encoded):
    return encoded.values.detach().numpy()


def doubled(inputs):
    return replace(inputs, images=ImageBatch(inputs.images.features.double()))


@pytest.mark.parametrize("languages", [("en", "de"), LANGUAGES])
def test_objective_equals_equation_7_of_huang(regions, heads, languages):
    batch = ImageSampler(regions.captions, 9, seed=0).next()
    inputs = doubled(inputs_of(regions, batch))
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
            cosines = [[cosine(a, b) for b in views[other]] for a in views[one]]
            expected[ranked] = brute_force(cosines, range(9), range(9), MARGIN, "max")
            total += (1.0 if one == "images" else 0.6) * expected[ranked]
    loss, terms = Objective(heads, terms_of(LOSS, heads), gather_rows=lambda part, count: part)(inputs, "max")
    assert loss.item() == pytest.approx(total, rel=1e-12)
    assert {name: value.item() for name, value in terms.items()} == pytest.approx(expected, rel=1e-12)
    assert len(terms) == {2: 6 + 3, 3: 10 + 6}[len(languages)]
    assert sum(value > 0 for value in terms.values()) >= len(terms) - 2


def test_diversity_of_mixed_languages(heads):
    captions = [Encoded(torch.randn(4, 15, dtype=torch.float64)) for _ in range(2)]
    views = Views(torch.arange(4), None, ((None, captions[0]), (None, captions[1])))
    first, second = (encoded.values.reshape(4, 3, 5).numpy() for encoded in captions)
    _, terms = named_losses(terms_of(LOSS, heads), views, "max")
    expected = sum(diversity(*pair, 1.2) for pair in ((first, first), (first, second), (second, second)))
    assert list(terms) == ["c2c", "diversity"]
    assert terms["diversity"].item() == pytest.approx(expected, rel=1e-12)


def test_diversity_without_heads_is_refused(model, heads):
    with pytest.raises(UsageError, match=r"diversity_weight is 0.7, but this model \(JointEmbedding\) has 1 head: set it to 0"):
        terms_of(LOSS, model)
    single = build_model(MhaDConfig(embed_dim=5, num_heads=1), Dimensions(("en",), 9, (3, 8)), seed=0)
    with pytest.raises(UsageError, match=r"this model \(MhaD\) has 1 head"):
        terms_of(LOSS, single)


# Images, tokens of the longest caption: the last batch of an epoch is smaller, and captions have any length.
BATCHES = [(5, 6), (5, 9), (3, 7), (4, 11), (5, 5)]
# One for the first sizes, and one more for each size that is found to change: tokens, then images.
MOST_GRAPHS = 3


class Graphs:
    """A compiler that counts graphs and their runs."""

    def __init__(self) -> None:
        self.made = 0
        self.runs = 0

    def __call__(self, graph, inputs):
        self.made += 1

        def run(*values):
            self.runs += 1
            return graph(*values)

        return run


def batch_of(shape: tuple[int, ...], images: int, tokens: int) -> Inputs:
    rng = np.random.default_rng(images + 10 * tokens)
    captions = []
    for _ in range(2):
        lengths = [tokens, *rng.integers(3, tokens + 1, images - 1)]
        captions.append(CaptionBatch(rng.integers(3, 9, sum(lengths)), np.cumsum([0, *lengths]), np.arange(images)))
    mask = torch.arange(6) < torch.from_numpy(rng.integers(1, 7, (images, 1))) if len(shape) > 1 else None
    features = torch.from_numpy(rng.standard_normal((images, *shape), np.float32))
    return Inputs(torch.arange(images), ImageBatch(features, mask), tuple(captions), ("en", "de"))


@pytest.mark.cluster
@pytest.mark.parametrize("kind", [kind for kind in CONFIGS if "scan" not in kind])
def test_compiled_objective_is_one_graph(kind):
    config = CONFIGS[kind]
    config.check_compile()
    shape, loss = (6, 8) if config.kind in SEVERAL else (8,), LossConfig(diversity_weight=0.5 * (kind == "mha-d"))
    model = build_model(config, Dimensions(("en", "de"), 9, shape), seed=0)
    plain, compiled = (
        Objective(each, terms_of(loss, each), gather_rows=DistributedContext().gather_rows) for each in (model, deepcopy(model))
    )
    torch._dynamo.reset()
    graphs = Graphs()
    compiled.compile(backend=graphs)
    for number, sizes in enumerate(BATCHES, start=1):
        gradients = []
        for objective in (plain, compiled):
            objective.zero_grad()
            value, terms = objective(batch_of(shape, *sizes), "max")
            value.backward()
            gradients.append([value, terms, {name: parameter.grad for name, parameter in objective.named_parameters()}])
        torch.testing.assert_close(*gradients)
        assert graphs.runs == number
    assert graphs.made <= MOST_GRAPHS
    torch.testing.assert_close(compiled.state_dict(), plain.state_dict(), rtol=0, atol=0)  # Seeds of dropout, too.
