import pytest
import torch

from train.objectives.ranking import ranking_loss


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
    loss = ranking_loss(scores, ids, ids, margin=margin, hinges=hinges)
    assert loss.shape == ()
    assert float(loss) == pytest.approx(brute_force(scores.tolist(), images, images, margin, hinges), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("hinges", ["sum", "max"])
@pytest.mark.parametrize("size", [1, 2, 3, 17])
@pytest.mark.parametrize("seed", range(5))
def test_loss_equals_brute_force(hinges, size, seed):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(size, size, generator=generator, dtype=torch.float64)
    check(scores, torch.randint(0, size, (size,), generator=generator).tolist(), 0.2, hinges)
    check(scores, list(range(size)), 0.05, hinges)
    # Scores with few distinct values give equal hinges, and hinges of exactly zero.
    check(scores.round(), list(range(size)), 1.0, hinges)


@pytest.mark.parametrize("hinges", ["sum", "max"])
def test_captions_of_one_image_are_not_negatives(hinges):
    check(torch.zeros(4, 4, dtype=torch.float64), [7, 7, 7, 7], 0.2, hinges)
    ids = torch.tensor([7, 7, 7])
    assert ranking_loss(torch.randn(3, 3), ids, ids, margin=5.0, hinges=hinges) == 0
    scores = torch.tensor([[0.9, 0.8, 0.1], [0.7, 0.9, 0.2], [0.0, 0.1, 0.9]])
    ids = torch.tensor([3, 3, 4])
    assert ranking_loss(scores, ids, ids, margin=0.2, hinges=hinges) == 0
    assert ranking_loss(scores, torch.arange(3), torch.arange(3), margin=0.2, hinges=hinges) > 0


@pytest.mark.parametrize("hinges", ["sum", "max"])
def test_by_hand(hinges):
    scores = torch.tensor([[1.0, 0.9, 1.1], [0.0, 1.0, 0.0], [0.0, 0.95, 1.0]], dtype=torch.float64)
    rows = {"sum": [0.1 + 0.3, 0.0, 0.15], "max": [0.3, 0.0, 0.15]}[hinges]
    columns = {"sum": [0.0, 0.1 + 0.15, 0.3], "max": [0.0, 0.15, 0.3]}[hinges]
    ids = torch.arange(3)
    assert float(ranking_loss(scores, ids, ids, margin=0.2, hinges=hinges)) == pytest.approx(sum(rows) + sum(columns))


@pytest.mark.parametrize("hinges", ["sum", "max"])
def test_gradients_equal_finite_differences(hinges):
    scores = torch.randn(6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([0, 1, 1, 2, 3, 4])
    assert torch.autograd.gradcheck(lambda s: ranking_loss(s, ids, ids, margin=0.2, hinges=hinges), scores)


def test_the_first_of_equally_large_hinges_has_the_gradient():
    scores = torch.zeros(3, 3, requires_grad=True)
    ids = torch.arange(3)
    ranking_loss(scores, ids, ids, margin=0.2, hinges="max").backward()
    # Row 0 -> column 1, rows 1 and 2 -> column 0; columns likewise; each true pair pays for its row and its column.
    assert scores.grad.tolist() == [[-2, 2, 1], [2, -2, 0], [1, 0, -2]]


@pytest.mark.parametrize("hinges", ["sum", "max"])
def test_a_hinge_at_zero_has_no_gradient(hinges):
    scores = torch.tensor([[1.0, 0.5], [0.5, 1.0]], requires_grad=True)
    ids = torch.arange(2)
    loss = ranking_loss(scores, ids, ids, margin=0.5, hinges=hinges)
    loss.backward()
    assert loss == 0
    assert scores.grad.abs().max() == 0


@pytest.mark.parametrize("hinges", ["sum", "max"])
def test_nothing_in_the_batch(hinges):
    none = torch.zeros(0, dtype=torch.int64)
    assert ranking_loss(torch.zeros(0, 0), none, none, margin=0.2, hinges=hinges) == 0


def test_wrong_arguments_are_refused():
    ids = torch.arange(3)
    with pytest.raises(ValueError, match="hinges is 'mean', expected one of"):
        ranking_loss(torch.zeros(3, 3), ids, ids, margin=0.2, hinges="mean")
    with pytest.raises(ValueError, match=r"scores are \[3, 4\], of 3 rows and 4 columns: expected as many rows as columns"):
        ranking_loss(torch.zeros(3, 4), ids, torch.arange(4), margin=0.2)
