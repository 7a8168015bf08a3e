"""Losses, and the objective that training minimises: a sum of named terms, each with a weight and a function of the encoded batch.

* ``c2i``: images against their captions, in each language of the batch: equation 1 of Gella et al. 2017 (PIVOT), and the task of
  that name in Kádár et al. 2018, figure 2;
* ``c2c``: captions against captions, for every two languages of the batch: equation 2 of Gella et al. 2017, whose sum over
  ``(c1, c2)`` covers all pairs of languages, in the model's order (PARALLEL); and the other task of Kádár et al.;
* ``diversity``: the attention heads of each image and caption, against one another and those of the captions in each other
  language and the image that belong to it: equations 5 and 6 of Huang et al. 2019, by view (``images``, ``de``) or pair of views.

A new term is an entry of `terms_of`.

Letters in shapes: ``B`` rows, or true pairs, in the batch, ``K`` heads, ``H`` width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, combinations_with_replacement
from typing import Any

import torch
from torch import Tensor, nn

from schemas.errors import UsageError
from train.config.sections import LossConfig
from train.data.batches import CaptionBatch
from train.data.sampling import Batch
from train.models.retrieval_model import Encoded, ImageBatch, RetrievalModel
from train.models.similarity import l2_normalize


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
    true = scores.diagonal()
    same = row_images[:, None] == column_images[None]  # [B, B]
    of_rows = (margin - true[:, None] + scores).relu().masked_fill(same, 0)  # [B, B]
    of_columns = (margin - true[None] + scores).relu().masked_fill(same, 0)  # [B, B]
    if hinges == "sum" or not len(scores):
        return of_rows.sum() + of_columns.sum()
    return of_rows.max(dim=1).values.sum() + of_columns.max(dim=0).values.sum()


def diversity_loss(a: Tensor, b: Tensor, *, margin: float) -> Tensor:
    """Return the sum of hinges over the batch: how far different heads are from a distance of the margin.

    The heads are those of one view of the items twice, or of two views, such as an image and its caption. With s the cosine, the
    hinges are ``max(0, margin - (1 - s(a[p, k], b[p, r])))`` for the heads k and r of the row p, r not k.

    The equation has s in place of the distance 1 - s. As printed it would draw heads together, while the text is about "to
    increase the distance (up to a diversity margin)". Within one view both orders of two heads are counted, as the sum says.

    A head of zeros has no direction: its cosines are 0, and it has no gradient.

    Args:
        a: ``[B, K, H]``.
        b: ``[B, K, H]``; row p of both belongs to the same image.
        margin: alpha_D.

    Returns:
        A scalar; zero for a single head.
    """
    heads = a.shape[1]
    with torch.autocast(a.device.type, enabled=False):
        first, second = (l2_normalize(heads_of.flatten(0, 1)).unflatten(0, (-1, heads)) for heads_of in (a, b))
        hinges = (margin - 1 + first @ second.transpose(1, 2)).relu()  # [B, K, K]
    return hinges.masked_fill(torch.eye(heads, dtype=torch.bool, device=a.device), 0).sum()


GatherRows = Callable[[Encoded, int], Encoded]
"""From this process's rows and the number of rows in the batch to all rows."""


@dataclass(frozen=True)
class Inputs:
    """The inputs of the model for a batch.

    Attributes:
        task: ``c2i``, ``c2c`` or ``images``, see `train.data.sampling.Batch`.
        numbers: int64 ``[B]``, the image of each row in the whole batch.
        images: features of this process's rows; None for ``c2c``.
        captions: captions of this process's rows, one entry for each of ``languages``.
        languages: the language of each entry; None if it mixes several, which only a shared encoder reads.
    """

    task: str
    numbers: Tensor
    images: ImageBatch | None
    captions: tuple[CaptionBatch, ...]
    languages: tuple[str | None, ...]


@dataclass(frozen=True)
class Views:
    """A batch as the model encodes it. Row n of all views belongs to the same image.

    Attributes:
        numbers: int64 ``[B]``, the image of each row.
        images: the images, B of them; None if the batch has none.
        captions: captions by language, B each; of mixed languages where the name is None.
    """

    numbers: Tensor
    images: Encoded | None
    captions: tuple[tuple[str | None, Encoded], ...]


@dataclass(frozen=True)
class Term:
    """A part of the objective.

    Attributes:
        name: its name in the log.
        weight: factor of its losses in the objective.
        losses: from the batch and the hinges (``sum`` or ``max``) to pairs of a language, or languages, and a loss: a scalar, the
            sum over all queries, not their mean, as in the papers. The name is empty where languages are mixed; losses of one
            name are added up.
    """

    name: str
    weight: float
    losses: Callable[[Views, str], Iterator[tuple[str, Tensor]]]


def terms_of(loss: LossConfig, model: RetrievalModel) -> tuple[Term, ...]:
    """Return the terms that a configuration asks for; those of weight 0 are left out.

    Raises:
        UsageError: the heads of a model are to be kept apart that has none.
    """
    if loss.diversity_weight and model.heads < 2:
        raise UsageError(
            f"loss.diversity_weight is {loss.diversity_weight}, but this model ({type(model).__name__}) has {model.heads} head: "
            "leave it at 0, or choose a model of several heads, as [model] kind = 'mha-d' and num_heads = 3"
        )

    def rank(views: Views, a: Encoded, b: Encoded, hinges: str) -> Tensor:
        return ranking_loss(model.scores(a, b), views.numbers, views.numbers, margin=loss.margin, hinges=hinges)

    terms = (
        Term("c2c", loss.caption_weight, partial(_captions_and_captions, rank)),
        Term("c2i", 1.0, partial(_images_and_captions, rank)),
        Term("diversity", loss.diversity_weight, partial(_heads, model.heads, loss.diversity_margin)),
    )
    return tuple(term for term in terms if term.weight)


_Rank = Callable[[Views, Encoded, Encoded, str], Tensor]


def _images_and_captions(rank: _Rank, views: Views, hinges: str) -> Iterator[tuple[str, Tensor]]:
    if views.images is not None:
        for language, captions in views.captions:
            yield language or "", rank(views, views.images, captions, hinges)


def _captions_and_captions(rank: _Rank, views: Views, hinges: str) -> Iterator[tuple[str, Tensor]]:
    for (one, first), (other, second) in combinations(views.captions, 2):
        yield "" if one is None or other is None else f"{one}-{other}", rank(views, first, second, hinges)


def _heads(number: int, margin: float, views: Views, hinges: str) -> Iterator[tuple[str, Tensor]]:
    images = [] if views.images is None else [("images", views.images)]
    heads = [(name, encoded.values.unflatten(1, (number, -1))) for name, encoded in (*images, *views.captions)]
    for (one, first), (other, second) in combinations_with_replacement(heads, 2):
        names = dict.fromkeys((one, other))  # One name for a view and itself.
        yield "" if None in names else "-".join(map(str, names)), diversity_loss(first, second, margin=margin)


def named_losses(terms: Sequence[Term], views: Views, hinges: str) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Return the objective of a batch, a scalar, and the losses that it is the weighted sum of, by name, such as ``c2i/en``."""
    named = [
        (f"{term.name}/{name}" if name else term.name, term.weight, value)
        for term in terms
        for name, value in term.losses(views, hinges)
    ]
    total = torch.stack([weight * value for _, weight, value in named]).sum()
    by_name: dict[str, Tensor] = {}
    for name, _, value in named:
        by_name[name] = by_name[name] + value.detach() if name in by_name else value.detach()
    return total, by_name


def per_query(batches: Iterable[tuple[Batch, Tensor, Mapping[str, Tensor]]]) -> tuple[float, dict[str, float]]:
    """Return the objective and the losses of batches as means over their queries, the rows in both directions.

    A loss is averaged over the batches that have it.
    """
    named = [
        (name, value, 2 * len(batch.images)) for batch, loss, terms in batches for name, value in {"": loss, **terms}.items()
    ]
    sums: dict[str, tuple[float, int]] = {}
    # All in one copy: a GPU is waited for once.
    for (name, _, more), value in zip(named, torch.stack([value for _, value, _ in named]).tolist(), strict=True):
        total, queries = sums.get(name, (0.0, 0))
        sums[name] = total + value, queries + more
    means = {name: total / queries for name, (total, queries) in sums.items()}
    return means.pop(""), means


class Objective(nn.Module):
    """The loss of a batch."""

    def __init__(self, model: RetrievalModel, terms: tuple[Term, ...], *, gather_rows: GatherRows) -> None:
        super().__init__()
        self.model = model
        self.terms = terms
        self.gather_rows = gather_rows
        self._compiled: Callable[..., tuple[Tensor, Mapping[str, Tensor]]] | None = None

    def forward(self, inputs: Inputs, hinges: str) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the loss, a scalar, and the losses that it is the weighted sum of, by name, such as ``c2i/en``."""
        read = [
            self.model.token_states(batch, self._name(language))
            for batch, language in zip(inputs.captions, inputs.languages, strict=True)
        ]
        return (self._compiled or self._losses)(inputs, read, hinges)

    def compile(self, *arguments: Any, **options: Any) -> None:
        """Compile everything but the reading of captions, which comes first, so that the rest can be one graph."""
        self._compiled = torch.compile(self._losses, *arguments, **options)

    def _losses(self, inputs: Inputs, read: Sequence[Any], hinges: str) -> tuple[Tensor, Mapping[str, Tensor]]:
        return named_losses(self.terms, self._views(inputs, read), hinges)

    def _views(self, inputs: Inputs, read: Sequence[Any]) -> Views:
        count = len(inputs.numbers)
        captions = tuple(
            (language, self.gather_rows(self.model.pool_states(one, self._name(language)), count))
            for one, language in zip(read, inputs.languages, strict=True)
        )
        images = None if inputs.images is None else self.gather_rows(self.model.encode_images(inputs.images), count)
        return Views(inputs.numbers, images, captions)

    def _name(self, language: str | None) -> str:
        """Return a language to read captions in: where several are mixed, any that the shared encoder reads."""
        return language or self.model.languages[0]
