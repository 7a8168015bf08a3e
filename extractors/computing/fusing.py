"""Fewer passes over memory: norms folded into convolutions, and additions and ReLUs computed by the convolution itself.

A batch norm in evaluation only scales and shifts, so its numbers go into the weights of the convolution before it. On a CPU,
oneDNN also adds a second map and cuts off what is negative while it writes the result, and wants the weights in a layout of its
own, which torch would make again in each forward: with the few images of one forward that costs as much as the norms. Here it
is made once. These are the operations that ``torch.compile`` chooses, without a compiler. On a GPU cuDNN does the same, see
`extractors.computing.cudnn`. Convolutions that multiply less, on a CPU, stand in `extractors.computing.filtering`.

On a CPU, features move by about 5e-7 of the largest value where norms are folded; merging alone keeps the bits of most
convolutions, and of all 3×3 ones that were tried.

Letters in shapes: ``B`` images of one forward, ``C`` channels, ``H`` and ``W`` pixels.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils.fusion import fuse_conv_bn_weights

from extractors.computing.compiling import compiled
from extractors.computing.cudnn import CudnnConvolution, keep_what_agrees
from extractors.computing.filtering import filtered
from extractors.computing.onednn import MergedConvolution, is_merged_in
from extractors.computing.shapes import shapes_of

_ADDITIONS = (operator.add, operator.iadd, torch.add)
_RELUS = (F.relu, torch.relu)


def traced_and_folded(model: nn.Module) -> fx.GraphModule:
    """Return a network, traced, with each batch norm folded into the convolution before it; the model is changed, too.

    Args:
        model: in evaluation, on the CPU, in float32. Its forward must not depend on values.
    """
    graph = traced(model)
    fold_norms(graph)
    return graph


def fold_norms(graph: fx.GraphModule) -> int:
    """Fold each batch norm of a traced network into the convolution before it, in place, and return how many there were."""
    layers = dict(graph.named_modules())
    calls = Counter(node.target for node in graph.graph.nodes)
    count = 0
    for node in list(graph.graph.nodes):
        norm, before = _layer(node, layers), node.args[0] if node.args else None
        if isinstance(norm, nn.BatchNorm2d) and isinstance(before, fx.Node) and len(before.users) == 1:
            conv = _layer(before, layers)
            if type(conv) is nn.Conv2d and calls[before.target] == 1:
                fold_norm(conv, norm)
                node.replace_all_uses_with(before)
                graph.graph.erase_node(node)
                count += 1
    tidied(graph)
    return count


def traced(model: nn.Module) -> fx.GraphModule:
    """Return a network, traced, without layers that do nothing. Its forward must not depend on values."""
    graph = fx.symbolic_trace(model)
    layers = dict(graph.named_modules())
    for node in list(graph.graph.nodes):
        if type(_layer(node, layers)) is nn.Identity:
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
    return tidied(graph)


def tidied(graph: fx.GraphModule) -> fx.GraphModule:
    """Return a network whose nodes were changed, as it is to run: without the layers that no node calls any more."""
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
    precision: str,
    compile: bool,  # noqa: A002
) -> nn.Module:
    """Return a network for its forwards on a device: compiled if that is asked for, or else with merged layers.

    Args:
        graph: from `traced_and_folded`, or `traced`, cast already.
        shape: ``[B, C, H, W]`` of the input of every forward on a CPU.
        device: where it will run.
        precision: one of `extractors.computing.devices.PRECISIONS`.
        compile: see `extractors.computing.compiling.compiled`.

    Raises:
        UsageError: likewise.
        ImagepivotError: see `extractors.computing.cudnn.keep_what_agrees`.
    """
    shape_of_one = (1, *shape[1:])
    is_fused = device.type == "cuda" and not compile
    graph = fuse_layers(graph, shape) if is_fused else graph
    graph = graph.to(device).to(memory_format=torch.channels_last)
    if is_fused:
        keep_what_agrees(graph, shape_of_one, precision, device)
    if device.type == "cpu":
        shapes = shapes_of(graph, shape, next(graph.parameters()).dtype)
        filter_layers(graph, shapes, compile=compile)
        if not compile:
            merge_layers(graph, shapes)
    return compiled(graph, device, enabled=compile)


def filter_layers(graph: fx.GraphModule, shapes: dict[str, torch.Size], *, compile: bool) -> fx.GraphModule:  # noqa: A002
    """Let 3×3 convolutions on a CPU, and the ReLUs behind them, be done by minimal filtering, in place, where that is faster.

    Args:
        graph: from `traced_and_folded`, cast already, on the CPU.
        shapes: from `shapes_of`, of the input of every forward; gets those of the new layers. Inputs of other shapes give
            features that differ in their last bits.
        compile: whether the network will be compiled.
    """
    for group in _groups(graph, lambda addition, conv: None):
        values: Any = group.conv.args[0]
        layer = filtered(group.layer, shapes[values.name], relu=group.relu is not None, compile=compile)
        if layer is not None:
            group.replace(graph, layer, shapes)
    return tidied(graph)


def merge_layers(graph: fx.GraphModule, shapes: dict[str, torch.Size], dtype: torch.dtype | None = None) -> fx.GraphModule:
    """Merge each convolution on a CPU with the addition and the ReLU behind it, in place, where oneDNN computes it.

    Args:
        graph: from `traced_and_folded`, cast already, on the CPU.
        shapes: from `shapes_of`, of the input of every forward; gets those of the new layers. Inputs of other shapes give the
            same features, perhaps in more time.
        dtype: type of the block of autocast that the network will run in, to which nothing has been cast yet; None for no such
            block.
    """
    for group in _groups(graph, lambda addition, conv: _overwritable(graph, addition, conv, shapes)):
        if not is_merged_in(dtype or group.layer.weight.dtype):
            continue
        values: Any = group.conv.args[0]
        shape, relu = list(shapes[values.name]), group.relu is not None
        group.replace(graph, MergedConvolution(group.layer, shape, relu=relu, dtype=dtype), shapes)
    return tidied(graph)


def fuse_layers(graph: fx.GraphModule, shape: tuple[int, ...]) -> fx.GraphModule:
    """Fuse each convolution with the ReLU behind it, and the addition in between, in place, into one layer of cuDNN.

    Args:
        graph: from `traced_and_folded`, cast already; `extractors.computing.cudnn.keep_what_agrees` has to follow.
        shape: ``[B, C, H, W]`` of an input. Others must have sums of maps of one size where this one has.
    """
    # Of one image, what all images share would look like a map of it.
    shapes = shapes_of(graph, (2, *shape[1:]), next(graph.parameters()).dtype)
    for group in _groups(graph, lambda addition, conv: _addend(addition, conv, shapes)):
        if group.addition is not None and group.addition.target is operator.iadd and group.addition.args[0] is group.other:
            continue  # Whoever reads it afterwards expects the sum.
        if group.relu is not None:
            group.replace(graph, CudnnConvolution(group.layer), shapes)
    return tidied(graph)


class _Group(NamedTuple):
    """A convolution and what follows it.

    Attributes:
        layer: the convolution.
        conv: its node.
        addition: the node of a sum of its result and another map, if one follows.
        other: that map.
        relu: the node of a ReLU, if one follows.
    """

    layer: nn.Conv2d
    conv: fx.Node
    addition: fx.Node | None
    other: fx.Node | None
    relu: fx.Node | None

    def replace(self, graph: fx.GraphModule, layer: nn.Module, shapes: dict[str, torch.Size]) -> None:
        """Put one layer in place of all."""
        old = [node for node in (self.conv, self.addition, self.relu) if node is not None]
        name = f"{self.conv.name}_merged"
        graph.add_submodule(name, layer)
        with graph.graph.inserting_after(old[-1]):
            new = graph.graph.call_module(name, tuple(node for node in (self.conv.args[0], self.other) if node is not None))
        shapes[new.name] = shapes[self.conv.name]
        old[-1].replace_all_uses_with(new)
        for node in reversed(old):
            graph.graph.erase_node(node)


def _groups(graph: fx.GraphModule, find_other: Callable[[fx.Node, fx.Node], fx.Node | None]) -> Iterator[_Group]:
    """Yield each convolution with what follows it; ``find_other`` returns what is added to it, if that may be part of it."""
    layers = dict(graph.named_modules())
    for node in list(graph.graph.nodes):
        conv = _layer(node, layers)
        if type(conv) is not nn.Conv2d or conv.padding_mode != "zeros" or isinstance(conv.padding, str):
            continue
        behind, addition, other = _only_user(node), None, None
        if behind is not None and behind.op == "call_function" and behind.target in _ADDITIONS:
            other = find_other(behind, node)
        if other is not None:
            addition, behind = behind, _only_user(behind)  # type: ignore[arg-type]
        yield _Group(conv, node, addition, other, behind if behind is not None and _is_relu(behind, layers) else None)


def _layer(node: fx.Node, layers: dict[str, nn.Module]) -> nn.Module | None:
    return layers.get(str(node.target)) if node.op == "call_module" else None


def _is_relu(node: fx.Node, layers: dict[str, nn.Module]) -> bool:
    return isinstance(_layer(node, layers), nn.ReLU) or (node.op == "call_function" and node.target in _RELUS)


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _addend(addition: fx.Node, conv: fx.Node, shapes: dict[str, torch.Size]) -> fx.Node | None:
    """Return what is added to a convolution; None if the sum is not just that of two maps of one size."""
    others = [argument for argument in addition.args if argument is not conv]
    if len(addition.args) != 2 or len(others) != 1 or addition.kwargs or not isinstance(others[0], fx.Node):
        return None
    other = others[0]
    return other if other is not conv.args[0] and shapes.get(other.name) == shapes[conv.name] else None


def _overwritable(graph: fx.GraphModule, addition: fx.Node, conv: fx.Node, shapes: dict[str, torch.Size]) -> fx.Node | None:
    """Return what is added to a convolution, if the sum may take its place: it is as large, and nobody reads it afterwards."""
    other = _addend(addition, conv, shapes)
    if other is None:
        return None
    layers = dict(graph.named_modules())
    places = {node: place for place, node in enumerate(graph.graph.nodes)}
    # Not the input, which is the caller's, nor what may share its memory with something else.
    is_fresh = type(_layer(other, layers)) in (nn.Conv2d, MergedConvolution, nn.MaxPool2d)
    return other if is_fresh and all(places[user] <= places[addition] for user in other.users) else None
