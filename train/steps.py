"""Steps of a training: their losses, and the check that nothing in them has diverged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from train.data.sampling import Batch
from train.objectives.terms import per_query


@dataclass(frozen=True)
class Step:
    """A step of the optimizer.

    Attributes:
        batches: its batches.
        losses: the objective of each batch, and the losses that it is the weighted sum of, by name.
        norm: norm of the gradient before it was clipped.
    """

    batches: tuple[Batch, ...]
    losses: tuple[tuple[Tensor, Mapping[str, Tensor]], ...]
    norm: Tensor

    @property
    def loss(self) -> Tensor:
        """The objective, the sum over the batches."""
        return torch.stack([loss for loss, _ in self.losses]).sum()

    def per_query(self) -> tuple[float, dict[str, float]]:
        """Return objective and losses as means over their queries; the last batch of an epoch may be smaller."""
        return per_query((batch, *losses) for batch, losses in zip(self.batches, self.losses, strict=True))


def find_divergence(step: Step, state: Iterable[Tensor] = ()) -> str:
    """Return the value of a step that is not finite, in words; an empty string if all are.

    Args:
        step: the step.
        state: weights and state of the optimizer after it, which a step with a finite loss can spoil. A GPU is waited for once.
    """
    if not torch.isfinite(step.loss + step.norm):
        return f"the loss is {float(step.loss)} and the norm of its gradient {float(step.norm)}"
    finite = [values.isfinite().all().to(step.norm.device) for values in state]
    return "weights are not finite" if finite and not torch.stack(finite).all() else ""
