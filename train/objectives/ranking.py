"""Ranking losses over the scores of a batch.

Letters in shapes: ``B`` true pairs in the batch.
"""

from __future__ import annotations

from torch import Tensor

HINGES = ("sum", "max")


def ranking_loss(scores: Tensor, row_images: Tensor, column_images: Tensor, *, margin: float, hinges: str = "sum") -> Tensor:
    """Return the sum of hinges over the batch: how far true pairs are from a margin above the others, in both directions.

    With s(r, c) the score of row r with column c, and the true pairs on the diagonal, the hinges are
    ``max(0, margin - s(r, r) + s(r, c))`` for the negatives c of each row and ``max(0, margin - s(c, c) + s(r, c))`` for the
    negatives r of each column. ``"sum"`` adds them all (Kiros et al. 2015; Gella et al. 2017, equation 1); ``"max"`` only the
    largest in each row and in each column (Faghri et al. 2018, VSE++; Kádár et al. 2018, equation 1).

    Items that belong to the image of the true pair are not negatives. A hinge at exactly zero has no gradient; if several hinges
    are the largest, the first has the gradient.

    Args:
        scores: ``[B, B]``, higher means more alike.
        row_images: integers ``[B]``, the image of each row.
        column_images: integers ``[B]``, the image of each column; on the diagonal the same as ``row_images``.
        margin: margin in the unit of the scores.
        hinges: ``"sum"`` or ``"max"``.

    Returns:
        A scalar; zero if there are no negatives.
    """
    if hinges not in HINGES:
        raise ValueError(f"hinges is {hinges!r}, expected one of {HINGES}")
    if scores.dim() != 2 or not len(row_images) == len(column_images) == scores.shape[0] == scores.shape[1]:
        shapes = list(scores.shape), len(row_images), len(column_images)
        raise ValueError("scores are {}, of {} rows and {} columns: expected as many rows as columns".format(*shapes))
    true = scores.diagonal()
    same = row_images[:, None] == column_images[None]  # [B, B]
    of_rows = (margin - true[:, None] + scores).relu().masked_fill(same, 0)  # [B, B]
    of_columns = (margin - true[None] + scores).relu().masked_fill(same, 0)  # [B, B]
    if hinges == "sum" or not len(scores):
        return of_rows.sum() + of_columns.sum()
    return of_rows.max(dim=1).values.sum() + of_columns.max(dim=0).values.sum()
