"""Fewer passes over memory: norms folded into convolutions, and on a CPU additions and ReLUs computed by the convolution itself.

A batch norm in evaluation only scales and shifts, so its numbers go into the weights of the convolution before it. On a CPU,
oneDNN also adds a second map and cuts off what is negative while it writes the result, and wants the weights in a layout of its
own, which torch would make again in each forward: with the few images of one forward that costs as much as the norms. Here it
is made once. These are the operations that ``torch.compile`` chooses, without a compiler.

Features move by about 5e-7 of the largest value where norms are folded; merging alone keeps the bits of most convolutions, and
of all 3×3 ones that were tried.

Letters in shapes: ``B`` images of one forward, ``C`` channels, ``H`` and ``W`` pixels.
"""

from __future__ import annotations

import operator
from collections import Counter
from copy import deepcopy
from itertools import chain
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from extractors.computing.compiling import compiled

__all__ = ["fold_norm", "made_ready", "merge_layers", "traced_and_folded"]

_ADDITIONS = (operator.add, operator.iadd, torch.add)


def traced_and_folded(model: nn.Module) -> fx.GraphModule:
    """Return a network, traced, with each batch norm folded into the convolution before it; the model is changed, too.

    Args:
        model: in evaluation, on the CPU, in float32. Its forward must not depend on values.
    """
    graph = fx.symbolic_trace(model)
    layers = dict(graph.named_modules())
    calls = Counter(node.target for node in graph.graph.nodes)
    for node in list(graph.graph.nodes):
        norm, before = _layer(node, layers), node.args[0] if node.args else None
        if isinstance(norm, nn.BatchNorm2d) and isinstance(before, fx.Node) and len(before.users) == 1:
            conv = _layer(before, layers)
            if type(conv) is nn.Conv2d and calls[before.target] == 1:
                fold_norm(conv, norm)
                node.replace_all_uses_with(before)
                graph.graph.erase_node(node)
    graph.delete_all_unused_submodules()
    graph.recompile()
    return graph


def fold_norm(conv: nn.Conv2d, norm: Any) -> None:
    """Fold a batch norm, frozen or not, into the convolution before it, in place: in float64, rounded once."""
    exact: list[Any] = [
        None if tensor is None else tensor.to(torch.float64)
        for tensor in (conv.weight, conv.bias, norm.running_mean, norm.running_var, norm.weight, norm.bias)
    ]
    weight, bias, mean, variance, scale, shift = exact
    folded = fuse_conv_bn_weights(weight, bias, mean, variance, norm.eps, scale, shift)
    conv.weight, conv.bias = (nn.Parameter(values.to(conv.weight.dtype), requires_grad=False) for values in folded)


def made_ready(
    graph: fx.GraphModule,
    shape: tuple[int, ...],
    device: torch.device,
    *,
    compile: bool,  # noqa: A002
) -> nn.Module:
    """Return a network for its forwards on a device: compiled if that is asked for, or else on a CPU with merged layers.

    Args:
        graph: from `traced_and_folded`, cast already.
        shape: ``[B, C, H, W]`` of the input of every forward on a CPU.
        device: where it will run.
        compile: see `extractors.computing.compiling.compiled`.

    Raises:
        UsageError: likewise.
    """
    graph = graph.to(device).to(memory_format=torch.channels_last)
    if device.type == "cpu" and not compile:
        graph = merge_layers(graph, shape)
    return compiled(graph, device, enabled=compile)


def merge_layers(graph: fx.GraphModule, shape: tuple[int, ...]) -> fx.GraphModule:
    """Merge each convolution on a CPU with the addition and the ReLU behind it, in place, where oneDNN computes it.

    Args:
        graph: from `traced_and_folded`, cast already, on the CPU.
        shape: ``[B, C, H, W]`` of the input of every forward; others give the same features, perhaps in more time.
    """
    dtype = next(graph.parameters()).dtype
    if not _is_merged_in(dtype):
        return graph
    shapes = _Shapes.of(graph, shape, dtype)
    layers = dict(graph.named_modules())
    for node in list(graph.graph.nodes):
        conv = _layer(node, layers)
        if type(conv) is not nn.Conv2d or conv.padding_mode != "zeros" or isinstance(conv.padding, str):
            continue
        merged: list[Any] = [node]
        other: fx.Node | None = None
        values: Any = node.args[0]
        behind = _only_user(node)
        if behind is not None and behind.op == "call_function" and behind.target in _ADDITIONS:
            other = _overwritable(graph, behind, node, shapes)
            merged += [] if other is None else [behind]
        behind = _only_user(merged[-1])
        relu = behind is not None and isinstance(_layer(behind, layers), nn.ReLU)
        merged += [behind] if relu else []
        name = f"{node.name}_merged"
        graph.add_submodule(name, MergedConvolution(conv, list(shapes[values.name]), relu=relu))
        with graph.graph.inserting_after(merged[-1]):
            new = graph.graph.call_module(name, (values, *([] if other is None else [other])))
        shapes[new.name] = shapes[node.name]
        merged[-1].replace_all_uses_with(new)
        for old in reversed(merged):
            graph.graph.erase_node(old)
    graph.delete_all_unused_submodules()
    graph.recompile()
    return graph


class MergedConvolution(nn.Module):
    """A convolution by oneDNN with what follows it.

    Args:
        conv: the convolution, on the CPU.
        shape: ``[B, C, H, W]`` of its input, for which the layout of the weights is chosen.
        relu: whether a ReLU follows.
    """

    def __init__(self, conv: nn.Conv2d, shape: list[int], *, relu: bool) -> None:
        super().__init__()
        self._numbers = (list(conv.padding), list(conv.stride), list(conv.dilation), conv.groups)
        self._weight = torch.ops.mkldnn._reorder_convolution_weight(conv.weight.detach(), *self._numbers, shape)
        self._bias = None if conv.bias is None else conv.bias.detach()
        self._relu = relu

    def forward(self, values: Tensor, other: Tensor | None = None) -> Tensor:
        """Convolve ``[B, C, H, W]``; the result is added to ``other`` in place, if that is given."""
        layer = (values, self._weight, self._bias, *self._numbers)
        if other is None:
            return torch.ops.mkldnn._convolution_pointwise(*layer, "relu" if self._relu else "none", [], "")
        after = "relu" if self._relu else None
        return torch.ops.mkldnn._convolution_pointwise_.binary(other, *layer, "add", 1.0, after, [], "")


class _Shapes(fx.Interpreter):
    """Records the shape of what every node makes, without memory for values."""

    @classmethod
    def of(cls, graph: fx.GraphModule, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, torch.Size]:
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


def _is_merged_in(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    # Other processors would raise an error.
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _layer(node: fx.Node, layers: dict[str, nn.Module]) -> nn.Module | None:
    return layers.get(str(node.target)) if node.op == "call_module" else None


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _overwritable(graph: fx.GraphModule, addition: fx.Node, conv: fx.Node, shapes: dict[str, torch.Size]) -> fx.Node | None:
    """Return what is added to a convolution, if the sum may take its place: it is as large, and nobody reads it afterwards."""
    others: list[Any] = [argument for argument in addition.args if argument is not conv]
    if len(addition.args) != 2 or len(others) != 1 or addition.kwargs or not isinstance(others[0], fx.Node):
        return None
    other = others[0]
    layers = dict(graph.named_modules())
    places = {node: place for place, node in enumerate(graph.graph.nodes)}
    # Not the input, which is the caller's, nor what may share its memory with something else.
    is_fresh = type(_layer(other, layers)) in (nn.Conv2d, MergedConvolution, nn.MaxPool2d)
    is_last = other is not conv.args[0] and all(places[user] <= places[addition] for user in other.users)
    return other if is_fresh and is_last and shapes.get(other.name) == shapes[conv.name] else None
