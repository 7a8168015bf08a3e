"""Dropout whose masks are part of a model's state."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["Dropout"]


class Dropout(nn.Module):
    """Zeros in place of some numbers while training; the others grow, so that their mean stays what it is.

    The seed of the next mask is a buffer. It is drawn with the initial weights, grows by one with each mask, and stands in
    checkpoints: a training that goes on from one draws the masks that it would have drawn.

    Args:
        ratio: the share of the numbers that become zeros, 0 to less than 1; without one there is no state.
    """

    def __init__(self, ratio: float) -> None:
        super().__init__()
        self.ratio = ratio
        self.next_seed: Tensor | None
        self.register_buffer("next_seed", torch.randint(2**31, ()) if ratio else None)

    @torch.compiler.disable  # Generators cannot be compiled.
    def forward(self, values: Tensor) -> Tensor:
        """Return values, some of them zeros in training mode."""
        if self.next_seed is None or not self.training:
            return values
        generator = torch.Generator(values.device).manual_seed(int(self.next_seed))
        self.next_seed += 1
        kept = torch.rand(values.shape, generator=generator, device=values.device) >= self.ratio
        return values * kept / (1 - self.ratio)
