"""Random weights, drawn as torchvision's constructors draw them: the same numbers for the same state of torch's generator."""

from __future__ import annotations

from torch import nn


def draw(model: nn.Module, *, linear_std: float | None = None) -> None:
    """Draw the weights of a network that has just been built, in place, in the order of its modules.

    A convolution's are normal (He et al. 2015, by the values that go out) and its biases zero. On the meta device nothing happens:
    there are no values, and torch would load its compiler for each draw.

    Args:
        model: of convolutions, batch norms, which stay as they are, and linear layers.
        linear_std: standard deviation of the weights of linear layers, whose biases are zero then; None to leave them as they are.
    """
    for layer in model.modules():
        if not isinstance(layer, (nn.Conv2d, nn.Linear)) or layer.weight.is_meta:
            continue
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
        elif linear_std is None:
            continue
        else:
            nn.init.normal_(layer.weight, 0, linear_std)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
