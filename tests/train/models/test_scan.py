"""Stacked cross attention against the equations, and SCAN as a model: its scores in both directions, languages, trainings."""

from functools import partial
from math import exp, log, sqrt

import numpy as np
import pytest
import torch

from tests.fake_gpu import fake_gpu
from tests.train.models.equations import Sizes, batch_of
from tests.train.trainings import assert_equal
from train.config.models import ScanConfig
from train.evaluation import evaluation
from train.losses import ranking_loss
from train.models import scan as module
from train.models.catalogue import build_model
from train.models.retrieval_model import Dimensions, Encoded, ImageBatch
from train.models.scan import Scan, cross_attention

CHOICES = [
    pytest.param(ScanConfig(pooling="lse"), id="t2i-lse"),
    pytest.param(ScanConfig(), id="t2i-avg"),
    pytest.param(ScanConfig(pooling="lse", lambda_softmax=4.0, lambda_lse=5.0), id="i2t-lse"),
    pytest.param(ScanConfig(lambda_softmax=4.0), id="i2t-avg"),
    pytest.param(ScanConfig(pooling="lse", negative_slope=0.0), id="as in the equations, lse"),
    pytest.param(ScanConfig(lambda_softmax=4.0, negative_slope=0.0), id="as in the equations, avg"),
    pytest.param(ScanConfig(pooling="lse", lambda_softmax=35.0, lambda_lse=20.0), id="sharp"),
]


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(sum(x * y for x, y in zip(a, b, strict=True)) / (sqrt(sum(x * x for x in a)) * sqrt(sum(y * y for y in b))))


def by_the_equations(queries: list[np.ndarray], contexts: list[np.ndarray], choices: ScanConfig) -> np.ndarray:
    """Score one pair after another."""
    scores = np.zeros((len(queries), len(contexts)))
    for row, query in enumerate(queries):
        for column, context in enumerate(contexts):
            s = [[cosine(v, e) for e in context] for v in query]
            s = [[value if value > 0 else choices.negative_slope * value for value in line] for line in s]
            norms = [sqrt(sum(s[i][j] ** 2 for i in range(len(query)))) for j in range(len(context))]  # Over what attends.
            relevances = []
            for i in range(len(query)):
                weights = [exp(choices.lambda_softmax * s[i][j] / norms[j]) if norms[j] else 1.0 for j in range(len(context))]
                attended = sum(w / sum(weights) * e for w, e in zip(weights, context, strict=True))
                relevances.append(cosine(query[i], attended))
            if choices.pooling == "avg":
                scores[row, column] = sum(relevances) / len(relevances)
            else:
                scores[row, column] = log(sum(exp(choices.lambda_lse * r) for r in relevances)) / choices.lambda_lse
    return scores


def units(counts: list[int], width: int, seed: int) -> list[np.ndarray]:
    """Sample sets of unit vectors with a common mean, like regions of images."""
    generator = np.random.default_rng(seed)
    sets = [generator.standard_normal((count, width)) + 0.3 for count in counts]
    return [vectors / np.linalg.norm(vectors, axis=1, keepdims=True) for vectors in sets]


def together(sets: list[np.ndarray], *, padding: int = 0, filled: float = 0.0, shuffled: int | None = None) -> Encoded:
    """Stack sets of vectors with a mask, padded with a value, or at random positions."""
    most, width = max(map(len, sets)) + padding, sets[0].shape[1]
    values, mask = np.full((len(sets), most, width), filled), np.zeros((len(sets), most), bool)
    for number, vectors in enumerate(sets):
        places = np.arange(len(vectors))
        if shuffled is not None:
            places = np.sort(np.random.default_rng(shuffled + number).permutation(most)[: len(vectors)])
        values[number, places], mask[number, places] = vectors, True
    return Encoded(torch.from_numpy(values), torch.from_numpy(mask))


@pytest.fixture(params=[(1, 1), (40, 2), (2**19, 64)], ids=["single", "small", "one"])
def tiles(request, monkeypatch):
    """Tiles of different sizes."""
    monkeypatch.setitem(module._TILE_ELEMENTS, "cpu", request.param[0])
    monkeypatch.setattr(module, "_TILE_QUERIES", request.param[1])
    monkeypatch.setattr(module, "_COPIED_ELEMENTS", request.param[0])


@pytest.mark.parametrize("choices", CHOICES)
def test_cross_attention_equals_equations(choices, tiles):
    queries, contexts = units([3, 5, 1, 5, 4], 7, 0), units([6, 2, 6, 3], 7, 1)
    scores = cross_attention(together(queries), together(contexts), choices)
    assert scores.shape == (5, 4)
    np.testing.assert_allclose(scores, by_the_equations(queries, contexts, choices), rtol=0, atol=1e-9)
    queries, contexts = units([4] * 3, 7, 0), units([6] * 5, 7, 1)
    scores = cross_attention(*(Encoded(torch.from_numpy(np.stack(sets))) for sets in (queries, contexts)), choices)
    np.testing.assert_allclose(scores, by_the_equations(queries, contexts, choices), rtol=0, atol=1e-9)


@pytest.mark.slow
def test_cross_attention_float32_error_at_paper_size():
    queries, contexts = units([9, 14], 256, 0), units([36, 36, 20], 256, 1)
    for choices in (ScanConfig(pooling="lse"), ScanConfig(lambda_softmax=4.0)):
        exact = by_the_equations(queries, contexts, choices)
        ours = [Encoded(encoded.values.float(), encoded.mask) for encoded in (together(queries), together(contexts))]
        np.testing.assert_allclose(cross_attention(*ours, choices), exact, rtol=0, atol=2e-6)


@pytest.mark.parametrize("choices", CHOICES)
@pytest.mark.parametrize("dense", [0, 1], ids=["whole tiles", "a context at a time"])
def test_cross_attention_gradients_equal_finite_differences(choices, dense, monkeypatch):
    monkeypatch.setattr(module, "_DENSE_SHARE", dense)
    monkeypatch.setattr(module, "_TILE_QUERIES", 2)
    queries, contexts = together(units([3, 1, 2], 3, 0), padding=1), together(units([2, 4], 3, 1))

    def scores(of_queries: torch.Tensor, of_contexts: torch.Tensor) -> torch.Tensor:
        return cross_attention(Encoded(of_queries, queries.mask), Encoded(of_contexts, contexts.mask), choices)

    # Products do not pass through zero within the differences.
    values = queries.values.requires_grad_(), contexts.values.requires_grad_()
    assert torch.autograd.gradcheck(scores, values)


@pytest.mark.parametrize("choices", CHOICES)
@pytest.mark.parametrize("seed", range(12))
def test_cross_attention_ignores_masked_values(choices, seed):
    generator = np.random.default_rng(seed)
    sets = [units(generator.integers(1, 7, generator.integers(1, 6)).tolist(), 5, seed + n) for n in (0, 100)]
    plain = [together(of) for of in sets]
    filled = float(generator.choice([1.0, -7.0, np.nan, np.inf, 1e300]))
    other = [together(of, padding=int(generator.integers(5)), filled=filled, shuffled=seed) for of in sets]
    weights = torch.from_numpy(generator.standard_normal((len(sets[0]), len(sets[1]))))
    results = []
    for encoded in (plain, other):
        values = [each.values.clone().requires_grad_() for each in encoded]
        scores = cross_attention(*(Encoded(v, each.mask) for v, each in zip(values, encoded, strict=True)), choices)
        (scores * weights).sum().backward()
        for value, each in zip(values, encoded, strict=True):
            assert not value.grad[~each.mask].any()
        results.append((scores.detach(), *(value.grad[each.mask] for value, each in zip(values, encoded, strict=True))))
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("choices", CHOICES)
def test_cross_attention_zeros_and_empty_masks_are_finite(choices):
    queries, contexts = together(units([3, 2, 4], 5, 0)), together(units([4, 3, 4], 5, 1))
    queries.values[0, 1] = 0
    queries.mask[1] = False
    contexts.values[2] = 0
    contexts.mask[0] = False
    values = queries.values.requires_grad_(), contexts.values.requires_grad_()
    for one, other in ((0, 1), (1, 0)):
        sets = [Encoded(values[0], queries.mask), Encoded(values[1], contexts.mask)]
        scores = cross_attention(sets[one], sets[other], choices)
        assert not scores.isnan().any()
        scores[scores.isfinite()].sum().backward()
        assert all(value.grad.isfinite().all() for value in values)
    for rows, columns in ((0, 2), (2, 0), (0, 0)):
        a, b = (torch.zeros(count, 3, 4, requires_grad=True) for count in (rows, columns))
        scores = cross_attention(Encoded(a), Encoded(b), choices)
        assert scores.shape == (rows, columns)
        scores.sum().backward()
        assert a.grad.shape == a.shape


def test_cross_attention_memory_is_bounded_by_a_tile(monkeypatch):
    monkeypatch.setitem(module._TILE_ELEMENTS, "cpu", 6000)
    monkeypatch.setattr(module, "_TILE_QUERIES", 8)
    queries, contexts = torch.randn(60, 7, 16).requires_grad_(), torch.randn(50, 9, 16).requires_grad_()
    with Sizes() as watch:
        scores = cross_attention(Encoded(queries), Encoded(contexts), ScanConfig(pooling="lse"))
        scores.sum().backward()
    assert max(watch.sizes) <= max(6000, queries.numel(), contexts.numel()) < scores.numel() * 7 * 9 / 20


@pytest.mark.parametrize("gathered", [1, 300, 2**25], ids=["a pair", "some pairs", "all pairs"])
@pytest.mark.parametrize("choices", CHOICES)
def test_cross_attention_gathered_gradients_equal_tiles(choices, gathered, monkeypatch):
    monkeypatch.setattr(module, "_GATHERED_ELEMENTS", gathered)
    sets = [
        together(units(counts, 6, seed), filled=np.nan, padding=1) for counts, seed in (([3, 5, 1, 5, 2], 0), ([6, 2, 3, 4], 1))
    ]
    plain = [Encoded(torch.from_numpy(np.stack(units([4] * count, 6, 2 + count)))) for count in (5, 4)]
    weights = torch.zeros(5, 4, dtype=torch.float64)
    weights[0, 1], weights[2, 1], weights[4, 1], weights[2, 3] = 0.7, -2, 0.4, 1

    def gradients(encoded, weights, device) -> list[torch.Tensor]:
        masks = [None if one.mask is None else one.mask.to(device) for one in encoded]
        values = [one.values.clone().to(device).requires_grad_() for one in encoded]
        scores = cross_attention(*(Encoded(*one) for one in zip(values, masks, strict=True)), choices)
        (scores * weights.to(device)).sum().backward()
        return [value.grad.cpu() for value in values]

    monkeypatch.setattr(module, "_DENSE_SHARE", 0.2)
    for encoded in (sets, plain, [sets[0], plain[1]], [plain[0], sets[1]]):
        for some in (weights, torch.zeros_like(weights)):
            expected = gradients(encoded, some, "cpu")
            with fake_gpu():
                found = gradients(encoded, some, "cuda")
            for mine, other, one in zip(found, expected, encoded, strict=True):
                torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)
                assert one.mask is None or not mine[~one.mask].any()


batch = partial(batch_of, [[1, 4, 2], [1, 4, 5, 6, 2], [1, 2], [1, 7, 2]])


def build(*, languages=("en", "de"), feature_shape=(3, 7), **choices) -> Scan:
    model = build_model(ScanConfig(**{"embed_dim": 6, "word_dim": 5} | choices), Dimensions(languages, 9, feature_shape), 0)
    assert isinstance(model, Scan)
    return model


@pytest.fixture
def images() -> ImageBatch:
    torch.manual_seed(1)
    return ImageBatch(torch.randn(4, 3, 7), torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1]]).bool())


def test_scan_encodes_unit_vectors(images):
    model = build()
    regions, words = model.encode_images(images), model.encode_captions(batch(), "de")
    assert (regions.values.shape, words.values.shape) == ((4, 3, 6), (4, 5, 6))
    assert torch.equal(regions.mask, images.mask)
    assert words.mask.sum(1).tolist() == [3, 5, 2, 3]
    for encoded in (regions, words):
        lengths = encoded.values.norm(dim=2)[encoded.mask]
        torch.testing.assert_close(lengths, torch.ones_like(lengths))
    mapped = images.features @ model.images.weight.T + model.images.bias
    torch.testing.assert_close(regions.values[0], torch.nn.functional.normalize(mapped[0], dim=1))
    assert not model.vectors


@pytest.mark.parametrize("attention", ["t2i", "i2t"])
@pytest.mark.parametrize("pooling", ["lse", "avg"])
def test_scan_scores_by_attention_and_pooling(attention, pooling, images):
    model = build(attention=attention, pooling=pooling, lambda_softmax=7.0, lambda_lse=3.0, negative_slope=0.2)
    regions, words = model.encode_images(images), model.encode_captions(batch([1, 2, 0]), "en")
    scores = model.scores(regions, words)
    choices = ScanConfig(pooling=pooling, lambda_softmax=7.0, lambda_lse=3.0, negative_slope=0.2)
    expected = cross_attention(words, regions, choices).T if attention == "t2i" else cross_attention(regions, words, choices)
    assert torch.equal(scores, expected)
    assert scores.shape == (4, 3)
    assert model.similarity == f"{attention}-{pooling}"


def test_scores_between_copies_captions_in_parts(images, monkeypatch):
    model = build()
    regions, words = model.encode_images(images), model.encode_captions(batch(), "en")
    expected, seen = model.scores(regions, words)[1:, [2, 0, 3]], []
    monkeypatch.setattr(evaluation, "_COLUMNS_AT_ONCE", 2)
    monkeypatch.setattr(model, "scores", lambda a, b, whole=model.scores: seen.append(len(b)) or whole(a, b))
    scores = evaluation.scores_between(model, regions, words)
    torch.testing.assert_close(scores(slice(1, 4), torch.tensor([2, 0, 3])), expected)
    assert seen == [2, 1]
    assert scores(slice(0, 4), torch.zeros(0, dtype=torch.int64)).shape == (4, 0)


@pytest.mark.parametrize("attention", ["t2i", "i2t"])
def test_scan_gradients_are_equal_under_autocast(attention, images):
    model = build(attention=attention)
    regions, words = model.encode_images(images), model.encode_captions(batch(), "en")
    results = []
    for enabled in (False, True):
        values = [encoded.values.detach().requires_grad_() for encoded in (regions, words)]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            scores = model.scores(*(Encoded(v, each.mask) for v, each in zip(values, (regions, words), strict=True)))
            ranking_loss(scores, torch.arange(4), margin=0.2, hinges="max").backward()
        results.append((scores.detach(), *(value.grad for value in values)))
    assert_equal(*results)


@pytest.mark.parametrize("attention", ["t2i", "i2t"])
def test_scan_attention_weights_reproduce_score(attention):
    model = build(attention=attention, pooling="avg", lambda_softmax=7.0, negative_slope=0.2)
    torch.manual_seed(1)
    images = ImageBatch(torch.randn(1, 3, 7), torch.tensor([[True, False, True]]))
    regions, words = model.encode_images(images), model.encode_captions(batch([1]), "de")
    pairs = model.attention_weights(images, batch([1]), "de").pairs.detach()
    assert pairs.shape == (5, 2)  # Words, and the regions that are there.
    attended, others = words.values[0].detach(), regions.values[0][images.mask[0]].detach()
    if attention == "i2t":
        pairs, attended, others = pairs.T, others, attended
    torch.testing.assert_close(pairs.sum(1), torch.ones(len(pairs)))
    assert float(pairs.max() - pairs.min()) > 0.01
    score = torch.nn.functional.cosine_similarity(attended, pairs @ others).mean()
    torch.testing.assert_close(score, model.scores(regions, words)[0, 0].detach())
