"""Losses, and the training objective: a weighted sum of named terms.

* ``c2i``: images against their captions, in each language of the batch: equation 1 of Gella et al. 2017 (PIVOT), and the task of
  that name in Kádár et al. 2018, figure 2;
* ``c2c``: captions against captions, once for every two languages of the batch: equation 2 of Gella et al. 2017 (PARALLEL), and
  the other task of Kádár et al. Scores are S(c1, c2) with c1 of the language that ``data.portions`` names first, and never
  S(c2, c1): the order similarity puts c1 in the place of the image;
* ``diversity``: the attention heads of each image and caption against each other, within a view (``images``, ``de``) and between
  views of the same image: equations 5 and 6 of Huang et al. 2019.

A new term is an entry of `terms_of`.

Shapes: ``B`` rows, or true pairs, in the batch, ``K`` heads, ``H`` width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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

MARGIN_TOLERANCE = 0.02
"""Maximum relative distance from the margin of the mean loss of a collapsed model."""
GatherRows = Callable[[Encoded, int], Encoded]
"""Function from this process's rows and the number of rows in the batch to all rows."""


def ranking_loss(scores: Tensor, images: Tensor, *, margin: float, hinges: str = "sum") -> Tensor:
    """Return the triplet ranking loss in both directions, summed over queries.

    With s(r, c) the score of row r and column c, and the true pairs on the diagonal, the hinges are
    ``max(0, margin - s(r, r) + s(r, c))`` for the negatives c of each row and ``max(0, margin - s(c, c) + s(r, c))`` for the
    negatives r of each column. ``"sum"`` adds all hinges (Kiros et al. 2015; Gella et al. 2017, equation 1); ``"max"`` only the
    largest per row and column (Faghri et al. 2018, VSE++; Kádár et al. 2018, equation 1).

    Items of the same image are not negatives. A hinge at exactly zero has no gradient; of several largest hinges, the first has.

    Args:
        scores: ``[B, B]``, higher is more similar.
        images: integers ``[B]``, the image of each row, and of the column with its index.
        margin: margin in the unit of the scores.
        hinges: ``"sum"`` or ``"max"``.

    Returns:
        A scalar; zero without negatives.
    """
    positives = scores.diagonal()
    same = images[:, None] == images[None]  # [B, B]
    row_hinges = (margin - positives[:, None] + scores).relu().masked_fill(same, 0)  # [B, B]
    column_hinges = (margin - positives[None] + scores).relu().masked_fill(same, 0)  # [B, B]
    if hinges == "sum" or not len(scores):
        return row_hinges.sum() + column_hinges.sum()
    return row_hinges.max(dim=1).values.sum() + column_hinges.max(dim=0).values.sum()


def diversity_loss(a: Tensor, b: Tensor, *, margin: float) -> Tensor:
    """Return the diversity loss of attention heads, summed over the batch.

    ``a`` and ``b``, ``[B, K, H]``, are two views of the same images, or the same view twice. ``margin`` is alpha_D. With s the
    cosine, the hinges are ``max(0, margin - (1 - s(a[p, k], b[p, r])))`` for the heads k and r of row p, r not k.

    The equation in the paper has s in place of the distance 1 - s, which would pull heads together. Its text says "to increase
    the distance (up to a diversity margin)". Within one view, both orders of two heads count, as in the paper's sum.

    The cosine with a head of zeros is 0, without gradient.

    Returns:
        A scalar; zero for a single head.
    """
    heads = a.shape[1]
    with torch.autocast(a.device.type, enabled=False):
        first, second = (l2_normalize(view.flatten(0, 1)).unflatten(0, (-1, heads)) for view in (a, b))
        hinges = (margin - 1 + first @ second.transpose(1, 2)).relu()  # [B, K, K]
    return hinges.masked_fill(torch.eye(heads, dtype=torch.bool, device=a.device), 0).sum()


@dataclass(frozen=True)
class Inputs:
    """Inputs of the model for a batch.

    Attributes:
        numbers: int64 ``[B]``, the image of each row in the whole batch.
        images: features of this process's rows; None for ``c2c``.
        captions: captions of this process's rows, by entry of ``languages``.
        languages: language of each entry of captions; None for mixed languages, for shared encoders only.
    """

    numbers: Tensor
    images: ImageBatch | None
    captions: tuple[CaptionBatch, ...]
    languages: tuple[str | None, ...]


@dataclass(frozen=True)
class Views:
    """An encoded batch. Row n of all views belongs to the same image.

    Attributes:
        numbers: int64 ``[B]``, the image of each row.
        images: B encoded images, or None.
        captions: language, None if mixed, and B encoded captions of each view.
    """

    numbers: Tensor
    images: Encoded | None
    captions: tuple[tuple[str | None, Encoded], ...]


@dataclass(frozen=True)
class Term:
    """A term of the objective.

    Attributes:
        losses: function from the batch and the hinges (``sum`` or ``max``) to losses by name of a view or pair of views, empty for
            mixed languages. A loss is a scalar, the sum over all queries, as in the papers. Losses of one name are added.
    """

    name: str
    weight: float
    losses: Callable[[Views, str], Iterator[tuple[str, Tensor]]]


def terms_of(loss: LossConfig, model: RetrievalModel) -> tuple[Term, ...]:
    """Return the terms of a configuration with a nonzero weight.

    Raises:
        UsageError: a diversity weight for a model without several heads.
    """
    if loss.diversity_weight and model.heads < 2:
        raise UsageError(
            f"loss.diversity_weight is {loss.diversity_weight}, but this model ({type(model).__name__}) has {model.heads} head: "
            "set it to 0, or choose a model with several heads, e.g. [model] kind = 'mha-d' with num_heads = 3"
        )

    def rank(views: Views, a: Encoded, b: Encoded, hinges: str) -> Tensor:
        return ranking_loss(model.scores(a, b), views.numbers, margin=loss.margin, hinges=hinges)

    def rank_captions(views: Views, hinges: str) -> Iterator[tuple[str, Tensor]]:
        for (language_a, a), (language_b, b) in combinations(views.captions, 2):
            yield "" if language_a is None or language_b is None else f"{language_a}-{language_b}", rank(views, a, b, hinges)

    def rank_images(views: Views, hinges: str) -> Iterator[tuple[str, Tensor]]:
        if views.images is not None:
            for language, captions in views.captions:
                yield language or "", rank(views, views.images, captions, hinges)

    def separate_heads(views: Views, hinges: str) -> Iterator[tuple[str, Tensor]]:
        images = [] if views.images is None else [("images", views.images)]
        heads = [(name, encoded.values.unflatten(1, (model.heads, -1))) for name, encoded in (*images, *views.captions)]
        for (name_a, a), (name_b, b) in combinations_with_replacement(heads, 2):
            names = dict.fromkeys((name_a, name_b))  # A single name for a view with itself.
            yield "" if None in names else "-".join(map(str, names)), diversity_loss(a, b, margin=loss.diversity_margin)

    terms = (
        Term("c2c", loss.caption_weight, rank_captions),
        Term("c2i", 1.0, rank_images),
        Term("diversity", loss.diversity_weight, separate_heads),
    )
    return tuple(term for term in terms if term.weight)


def named_losses(terms: Sequence[Term], views: Views, hinges: str) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Return the objective, a scalar, and unweighted losses by name, e.g. ``c2i/en``."""
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


@dataclass(frozen=True)
class LossSums:
    """Sums of losses over batches.

    Attributes:
        sums: sum of each loss and number of its queries, by name; the name of the objective is empty.
        tasks: tasks of the batches.
        languages: languages of the batches; None for mixed languages.
    """

    sums: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    tasks: tuple[str, ...] = ()
    languages: tuple[str | None, ...] = ()

    def add(self, batches: Sequence[tuple[Batch, Tensor, Mapping[str, Tensor]]]) -> LossSums:
        """Return the sums with those of more batches: objective and losses by name.

        Rows are queries in both directions. This synchronises with a GPU once.
        """
        if not batches:
            return self
        named = [(batch, name, value) for batch, loss, terms in batches for name, value in {"": loss, **terms}.items()]
        sums, tasks, languages = dict(self.sums), dict.fromkeys(self.tasks), dict.fromkeys(self.languages)
        for (batch, name, _), value in zip(named, torch.stack([value for *_, value in named]).tolist(), strict=True):
            total, queries = sums.get(name, (0.0, 0))
            sums[name] = total + value, queries + 2 * len(batch.images)
            tasks[batch.task] = None
            languages |= dict.fromkeys(batch.languages)
        return LossSums(sums, tuple(tasks), tuple(languages))

    def per_query(self) -> tuple[float, dict[str, float]]:
        """Return the objective and the losses as means over their queries."""
        means = {name: total / queries for name, (total, queries) in self.sums.items()}
        return means.pop(""), means


def is_at_margin(terms: Mapping[str, float], margin: float) -> bool:
    """Return whether all ranking losses of the hardest negatives equal the margin.

    This is the loss per query of a collapsed model: if all scores are equal, the largest hinge of each query is the margin.
    """
    ranking = [value for name, value in terms.items() if name.partition("/")[0] in ("c2i", "c2c")]
    return all(abs(value - margin) <= MARGIN_TOLERANCE * margin for value in ranking)


class Objective(nn.Module):
    """Objective of a batch, from the inputs of the model."""

    def __init__(self, model: RetrievalModel, terms: tuple[Term, ...], *, gather_rows: GatherRows) -> None:
        super().__init__()
        self.model = model
        self.terms = terms
        self.gather_rows = gather_rows
        self._compiled: Callable[..., tuple[Tensor, Mapping[str, Tensor]]] | None = None

    def forward(self, inputs: Inputs, hinges: str) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the objective, a scalar, and unweighted losses by name, e.g. ``c2i/en``."""
        states = [
            self.model.token_states(batch, self._encoder_language(language))
            for batch, language in zip(inputs.captions, inputs.languages, strict=True)
        ]
        return (self._compiled or self._losses)(inputs, states, hinges)

    def compile(self, *arguments: Any, **options: Any) -> None:
        """Compile the objective as one graph, except `RetrievalModel.token_states`."""
        self._compiled = torch.compile(self._losses, *arguments, **options)

    def _losses(self, inputs: Inputs, states: Sequence[Any], hinges: str) -> tuple[Tensor, Mapping[str, Tensor]]:
        count = len(inputs.numbers)
        captions = tuple(
            (language, self.gather_rows(self.model.pool_states(item, self._encoder_language(language)), count))
            for item, language in zip(states, inputs.languages, strict=True)
        )
        images = None if inputs.images is None else self.gather_rows(self.model.encode_images(inputs.images), count)
        return named_losses(self.terms, Views(inputs.numbers, images, captions), hinges)

    def _encoder_language(self, language: str | None) -> str:
        return language or self.model.languages[0]  # Mixed languages share an encoder.
