from collections.abc import Callable, Sequence
from statistics import median

import numpy as np
import pytest
import torch

from tests.threads import threads_of_torch
from tests.train.trainings import retrieval_ranks
from train.evaluation.metrics import RecallMetrics, RetrievalMetrics, Scores, bidirectional_ranks


@pytest.fixture
def scores_at_once(request, monkeypatch):
    monkeypatch.setattr("train.evaluation.metrics._SCORES_AT_ONCE", request.param)
    return request.param


def dot(images: torch.Tensor, captions: torch.Tensor) -> torch.Tensor:
    return images @ captions.T


def order(images: torch.Tensor, captions: torch.Tensor) -> torch.Tensor:
    return -(captions[None] - images[:, None]).clamp_min(0).pow(2).sum(2)


def between(
    images: torch.Tensor, captions: torch.Tensor, similarity: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = dot
) -> Scores:
    """The scores of embeddings."""
    return lambda rows, columns: similarity(images[rows], captions[columns])


def plain_ranks_between(scores: list[list[float]], rows: Sequence[int], columns: Sequence[int]) -> tuple[list[int], list[int]]:
    """Compute ranks by the definition: of each correct item by itself, then the best of them."""

    def ranks(scores: list[list[float]], queries: Sequence[int], items: Sequence[int]) -> list[int]:
        found = []
        for query, row in zip(queries, scores, strict=True):
            wrong = [score for score, image in zip(row, items, strict=True) if image != query]
            right = [score for score, image in zip(row, items, strict=True) if image == query]
            found.append(min((1 + sum(not other < score for other in wrong) for score in right), default=0))
        return found

    return ranks(scores, rows, columns), ranks([list(column) for column in zip(*scores, strict=True)], columns, rows)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("scores_at_once", [300, 5_000, 10**6], indirect=True)
@pytest.mark.parametrize(("images", "captions_each", "width"), [(83, 5, 64), (90, 1, 64), (91, 5, 1024), (11, 5, 300)])
@pytest.mark.parametrize("alike", ["texts", "images"])
def test_equal_inputs_rank_last_for_any_tiles_and_threads(alike, images, captions_each, width, scores_at_once, threads):
    generator = torch.Generator().manual_seed(images)
    left, right = (torch.randn(count, width, generator=generator) for count in (images, images * captions_each))
    (right if alike == "texts" else left)[:] = 1.0
    left, right = (torch.nn.functional.normalize(vectors) for vectors in (left, right))
    # As of an encoder, whose last bits depend on the batch.
    left, right = (vectors * (1 + 2e-7 * torch.rand(len(vectors), 1, generator=generator)) for vectors in (left, right))
    owner = torch.arange(len(right)) // captions_each
    with threads_of_torch(threads):
        ranks = retrieval_ranks(between(left, right), images, owner)
    if alike == "texts":
        assert ranks.image_to_text.tolist() == [(images - 1) * captions_each + 1] * images
    else:
        assert ranks.text_to_image.tolist() == [images] * len(right)


@pytest.mark.parametrize("scale", [1.0, 1000.0, -1000.0])
@pytest.mark.parametrize("scores_at_once", [30, 10**6], indirect=True)
def test_rounding_of_scores_changes_no_rank(scores_at_once, scale):
    generator = torch.Generator().manual_seed(3)
    exact = torch.randint(-40, 41, (20, 60), generator=generator) / 40
    owner = torch.arange(60) // 3
    # Each tile rounds in its own way, by up to three values of float32 around the score.
    noise = 3 * torch.finfo(torch.float32).eps

    def scores(rows: slice, columns: torch.Tensor) -> torch.Tensor:
        tile = exact[rows][:, columns]
        return scale * (tile + noise * (2 * torch.rand(tile.shape, generator=generator) - 1) * tile.abs().clamp(min=0.1))

    ranks = retrieval_ranks(scores, 20, owner)
    assert (ranks.image_to_text.tolist(), ranks.text_to_image.tolist()) == plain_ranks_between(
        (scale * exact).tolist(), range(20), owner.tolist()
    )


def test_infinite_scores_are_equal_to_their_like_only():
    scores = torch.tensor([[torch.inf, 1.0, -torch.inf], [torch.inf, 2.0, -torch.inf], [0.0, 1.0, -torch.inf]])
    ranks = retrieval_ranks(lambda rows, columns: scores[rows][:, columns], 3, torch.arange(3))
    assert (ranks.image_to_text.tolist(), ranks.text_to_image.tolist()) == ([1, 2, 3], [2, 1, 3])


def test_image_without_captions_is_a_candidate_but_not_a_query():
    images = torch.tensor([[1.0], [5.0], [0.0]])
    ranks = retrieval_ranks(between(images, torch.tensor([[1.0], [1.0]])), 3, torch.tensor([0, 2]))
    assert RetrievalMetrics.of(ranks).image_to_text.queries == 2
    assert ranks.text_to_image.tolist() == [2, 3]


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([1], (100.0, 100.0, 100.0)),
        ([1, 5, 6, 10, 11], (20.0, 40.0, 80.0)),
        ([2, 2, 2, 1000], (0.0, 75.0, 75.0)),
        ([3, 4], (0.0, 100.0, 100.0)),
        ([1, 2, 7, 30], (25.0, 50.0, 75.0)),
    ],
)
def test_recalls_and_median(ranks, expected):
    direction = RecallMetrics.of(torch.tensor(ranks))
    assert direction.recalls == expected
    assert direction.median_rank == int(np.floor(np.median(np.array(ranks) - 1))) + 1  # as the published code writes it
    assert direction.median_rank == int(median(ranks))
    assert direction.queries == len(ranks)


def test_sum_of_recalls_has_six_terms():
    one = RecallMetrics(recall_at_1=1, recall_at_5=2, recall_at_10=3, median_rank=50, queries=7)
    two = RecallMetrics(recall_at_1=10, recall_at_5=20, recall_at_10=30, median_rank=5, queries=7)
    both = RetrievalMetrics(image_to_text=one, text_to_image=two)
    assert both.sum_of_recalls == 66
    assert both.mean_recall == 66 / 6 == both.to_dict()["mean_recall"]
    assert both.to_dict()["text_to_image"]["recall_at_5"] == 20


@pytest.mark.parametrize("scores_at_once", [16], indirect=True)
def test_uneven_numbers_of_captions_are_ranked_in_tiles_of_bounded_size(scores_at_once):
    owner = torch.tensor([3] * 40 + [0, 7, 7, 9, 9, 9, 1])
    generator = torch.Generator().manual_seed(4)
    left, right = (torch.randint(3, (size, 3), generator=generator).float() for size in (12, len(owner)))
    sizes = []

    def watched(rows: slice, columns: torch.Tensor) -> torch.Tensor:
        found = dot(left[rows], right[columns])
        sizes.append(found.numel())
        return found

    ranks = retrieval_ranks(watched, 12, owner)
    assert (ranks.image_to_text.tolist(), ranks.text_to_image.tolist()) == plain_ranks_between(
        dot(left, right).tolist(), range(12), owner.tolist()
    )
    assert max(sizes) <= 4 * 40  # Strips of four images or four captions, or one image with all of its captions.
    assert sum(sizes) == 12 * len(owner)


@pytest.mark.parametrize("similarity", [dot, order])
@pytest.mark.parametrize("scores_at_once", [1, 7, 40, 10**6], indirect=True)
@pytest.mark.parametrize(
    ("rows", "columns", "images", "values"), [(1, 1, 1, 3), (12, 9, 4, 3), (23, 23, 7, 2), (20, 31, 9, 40), (9, 2, 3, 3)]
)
def test_ranks_between_captions_equal_the_definition(similarity, scores_at_once, rows, columns, images, values):
    generator = torch.Generator().manual_seed(rows * 100 + columns)
    left = torch.randint(values, (rows, 3), generator=generator).float()
    right = torch.randint(values, (columns, 3), generator=generator).float()
    if values == 40:
        left[3, 1], right[5] = torch.nan, torch.nan
    of_rows = torch.randint(images, (rows,), generator=generator).sort().values
    of_columns = torch.randint(images, (columns,), generator=generator)
    asked = torch.zeros(rows, columns, dtype=torch.int64)

    def watched(chosen: slice, others: torch.Tensor) -> torch.Tensor:
        asked[chosen, others] += 1
        return similarity(left[chosen], right[others])

    found, _ = bidirectional_ranks(watched, of_rows, of_columns)
    expected = plain_ranks_between(similarity(left, right).tolist(), of_rows.tolist(), of_columns.tolist())
    assert tuple(ranks.tolist() for ranks in found) == expected
    assert (asked == 1).all()


@pytest.mark.parametrize("scores_at_once", [999], indirect=True)
def test_random_real_scores_give_the_ranks_of_a_full_sort(scores_at_once):
    generator = torch.Generator().manual_seed(1)
    images, captions = torch.randn(40, 16, generator=generator), torch.randn(200, 16, generator=generator)
    owner = torch.arange(200) // 5
    ranks = retrieval_ranks(between(images, captions), len(images), owner)
    scores = (images.double() @ captions.double().T).numpy()
    place = np.empty_like(scores, dtype=int)
    np.put_along_axis(place, np.argsort(-scores, axis=1), np.arange(200)[None], axis=1)
    # As in the published code: the best place of the five in the sorted list, from 0.
    assert ranks.image_to_text.tolist() == [place[i, 5 * i : 5 * i + 5].min() + 1 for i in range(40)]
    place = np.argsort(np.argsort(-scores, axis=0), axis=0)
    assert ranks.text_to_image.tolist() == [place[c // 5, c] + 1 for c in range(200)]
