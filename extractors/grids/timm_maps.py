"""What a model of timm would pool: its map or its tokens, one vector for each cell of a grid over the input.

It is the output of timm's ``forward_features``, "the unpooled features": of convolutional and hierarchical networks a map, of
transformers the tokens of the patches, after the final norm where the model has it before the pooling. Class, distillation and
register tokens are left out. Cells go row by row from the top, and from left to right in a row.

Letters in shapes: ``B`` images, ``H`` and ``W`` cells, ``D`` width of a vector, ``T`` tokens.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class MapModel(nn.Module):
    """A model of timm up to its pooling, from its input ``[B, 3, ...]`` to its map or its tokens."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, values: Tensor) -> Tensor:
        """Run the model."""
        return self.model.forward_features(values)


class UnpooledModel(nn.Module):
    """What `MapModel` makes, as vectors of a grid.

    Args:
        model: the model of timm.
        network: a `MapModel` of it, or what was made of one.
        grid_hw: rows and columns of its grid, from `grid_hw`.
    """

    def __init__(self, model: Any, network: nn.Module, grid_hw: tuple[int, int]) -> None:
        super().__init__()
        self._network = network
        self._cells = grid_hw[0] * grid_hw[1]
        self._output_fmt, self._width = _output_fmt(model), model.num_features

    def forward(self, values: Tensor) -> Tensor:
        """Run the model: its input ``[B, 3, ...]`` to ``[B, H * W, D]``."""
        found: Tensor = self._network(values)
        if found.ndim == 3:
            return found[:, found.shape[1] - self._cells :]  # [B, T, D]; tokens of no patch come first
        if not _channels_last(self._output_fmt, self._width, found):
            found = found.permute(0, 2, 3, 1)
        return found.flatten(1, 2)


def grid_hw(model: Any, found: Any) -> tuple[int, int] | None:
    """Return rows and columns of the grid of a model's unpooled features.

    Args:
        model: a model of timm.
        found: what its ``forward_features`` returns.

    Returns:
        Rows and columns; None if the features are not such a grid, or nothing says in which order their tokens are.
    """
    if not isinstance(found, Tensor) or model.num_features not in found.shape[1:]:
        return None
    if found.ndim == 4:
        height, width = found.shape[1:3] if _channels_last(_output_fmt(model), model.num_features, found) else found.shape[2:]
        return height, width
    # Where tokens are merged on the way, as in Hiera, their order is the model's own.
    patches = getattr(model, "patch_embed", None) or getattr(model, "stem", None)
    grid = getattr(patches, "grid_size", None)
    if found.ndim != 3 or grid is None or grid[0] * grid[1] + getattr(model, "num_prefix_tokens", 0) != found.shape[1]:
        return None
    return grid[0], grid[1]


def _output_fmt(model: Any) -> str | None:
    return getattr(model, "output_fmt", None)


def _channels_last(output_fmt: str | None, width: int, found: Tensor) -> bool:
    """Return whether a map is ``[B, H, W, D]``: models say so, or the width tells."""
    return output_fmt == "NHWC" or found.shape[1] != width
