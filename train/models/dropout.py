"""Dropout whose masks are part of a model's state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Dropout(nn.Module):
    """Zeros in place of some numbers while training; the others grow, so that their mean stays what it is.

    The seed of the next mask is drawn with the initial weights, grows by one with each mask, and stands in checkpoints, as
    ``next_seed``: a training that goes on from one draws the masks that it would have drawn. It is a number of the host, whatever
    the device of the model, so that nobody waits for a GPU to read it.

    Args:
        ratio: the share of the numbers that become zeros, 0 to less than 1; without one there is no state.
    """

    def __init__(self, ratio: float) -> None:
        super().__init__()
        self.ratio = ratio
        self.next_seed = torch.randint(2**31, ()) if ratio else None

    def forward(self, values: Tensor) -> Tensor:
        """Return values, some of them zeros in training mode."""
        if self.next_seed is None or not self.training:
            return values
        draw = _draw_as_one if torch.compiler.is_compiling() else _draw
        return values * draw(values.detach(), self.next_seed, self.ratio) / (1 - self.ratio)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.next_seed is not None:
            destination[f"{prefix}next_seed"] = self.next_seed.clone()

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, metadata: Any, strict: bool, missing: list[str], *rest: Any
    ) -> None:
        name = f"{prefix}next_seed"
        if self.next_seed is not None and name not in state_dict:
            missing.append(name)
        elif self.next_seed is not None:
            self.next_seed = state_dict[name].to("cpu", torch.int64, copy=True)
            state_dict = {other: value for other, value in state_dict.items() if other != name}
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, *rest)


def _draw(values: Tensor, next_seed: Tensor, ratio: float) -> Tensor:
    """Draw which values are kept, a bool for each, and let the seed grow by one."""
    generator = torch.Generator(values.device).manual_seed(int(next_seed))
    next_seed += 1
    return torch.rand(values.shape, generator=generator, device=values.device) >= ratio


@torch.library.custom_op("imagepivot::draw", mutates_args={"next_seed"})
def _draw_as_one(values: Tensor, next_seed: Tensor, ratio: float) -> Tensor:
    """Do the same as one operation: a compiled graph would end at a generator."""
    return _draw(values, next_seed, ratio)


@_draw_as_one.register_fake
def _(values: Tensor, next_seed: Tensor, ratio: float) -> Tensor:
    return values.new_empty(values.shape, dtype=torch.bool)
