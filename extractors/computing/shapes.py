"""The shapes of what the nodes of a traced network make, without computing any of it.

Of convolutions, poolings, ReLUs and sums they are calculated. For any other operation the network runs on the meta device, for
which torch loads its compiler: seconds that a run over few images would wait for.

Letters in shapes: ``B`` images of one forward, ``C`` channels, ``H`` and ``W`` pixels.
"""

from __future__ import annotations

import operator
from copy import deepcopy
from itertools import chain
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F  # noqa: N812

_KEEPING = (nn.ReLU, nn.BatchNorm2d, nn.Identity)
_KEEPING_FUNCTIONS = (operator.add, operator.iadd, torch.add, F.relu, torch.relu)


def shapes_of(graph: fx.GraphModule, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, torch.Size]:
    """Return the shape of what each node makes, by the names of the nodes; nodes that make no tensor are left out.

    Args:
        graph: a traced network of one input.
        shape: ``[B, C, H, W]`` of the input.
        dtype: of the input.
    """
    found = _calculated(graph, shape)
    return _Interpreter.shapes_of(graph, shape, dtype) if found is None else found


def _calculated(graph: fx.GraphModule, shape: tuple[int, ...]) -> dict[str, torch.Size] | None:
    """Return the shapes by arithmetic; None if there is a node of which this module knows none."""
    layers = dict(graph.named_modules())
    shapes: dict[str, torch.Size] = {}
    for node in graph.graph.nodes:
        if node.op == "output":
            continue
        if node.op == "placeholder":
            made: torch.Size | None = torch.Size(shape)
        elif node.op == "call_module" and node.args and isinstance(node.args[0], fx.Node):
            made = _of_layer(layers[str(node.target)], shapes[node.args[0].name])
        else:
            made = _of_function(node, shapes)
        if made is None:
            return None
        shapes[node.name] = made
    return shapes


def _of_layer(layer: nn.Module, shape: torch.Size) -> torch.Size | None:
    if type(layer) in _KEEPING:
        return shape
    if type(layer) is nn.Conv2d and not isinstance(layer.padding, str):
        return torch.Size((shape[0], layer.out_channels, *_slid_over(layer, shape)))
    if type(layer) is nn.MaxPool2d and not layer.ceil_mode and not layer.return_indices:
        return torch.Size((*shape[:2], *_slid_over(layer, shape)))
    return None


def _slid_over(layer: Any, shape: torch.Size) -> tuple[int, ...]:
    """Return the rows and columns of a window's places: the formula in torch's pages on ``Conv2d`` and ``MaxPool2d``."""
    numbers = (_pair(value) for value in (layer.kernel_size, layer.stride, layer.padding, layer.dilation))
    return tuple(
        (side + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
        for side, kernel, stride, padding, dilation in zip(shape[2:], *numbers, strict=True)
    )


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else value


def _of_function(node: fx.Node, shapes: dict[str, torch.Size]) -> torch.Size | None:
    """Return the shape of a ReLU, or of a sum of maps of one size."""
    if node.op != "call_function" or node.target not in _KEEPING_FUNCTIONS:
        return None
    given = {shapes[argument.name] for argument in node.args if isinstance(argument, fx.Node)}
    return given.pop() if len(given) == 1 else None


class _Interpreter(fx.Interpreter):
    """Records the shape of what every node makes, without memory for values."""

    @classmethod
    def shapes_of(cls, graph: fx.GraphModule, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, torch.Size]:
        kept = {id(tensor): tensor for tensor in chain(graph.parameters(), graph.buffers())}
        run = cls(deepcopy(graph, kept).to("meta"))
        run.shapes = {}
        run.run(torch.empty(shape, dtype=dtype, device="meta"))
        return run.shapes

    shapes: dict[str, torch.Size]

    def run_node(self, n: fx.Node) -> Any:
        made = super().run_node(n)
        if isinstance(made, Tensor):
            self.shapes[n.name] = made.shape
        return made
