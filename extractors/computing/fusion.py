"""Fewer passes over memory: norms folded into convolutions, and additions and ReLUs fused with them.

A batch norm in evaluation only scales and shifts, so its numbers go into the weights of the convolution before it. On a CPU,
oneDNN also adds a residual and applies the ReLU while it writes the result, and wants the weights in a layout of its own, which
torch would make again in each forward: with the few images of one forward that costs as much as the norms. Here it is made once.
These are the operations that ``torch.compile`` chooses, without a compiler. On a GPU cuDNN does the same, see
`extractors.computing.fused_conv2d`. Winograd convolutions, on a CPU, are in `extractors.computing.winograd`.

On a CPU, features move by about 5e-7 of the largest value where norms are folded; fusion alone keeps the bits of most
convolutions, and of all 3×3 ones that were tried.

Letters in shapes: ``B`` images of one forward, ``C`` channels, ``H`` and ``W`` pixels.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.fx.passes.shape_prop import ShapeProp, TensorMetadata
from torch.nn import functional as F  # noqa: N812
from torch.nn.modules.utils import _pair
from torch.nn.utils.fusion import fuse_conv_bn_weights

from extractors.computing.compile import compile_model
from extractors.computing.fused_conv2d import CudnnFusedConv2d, FusedConv2d, can_fuse_in, disable_mismatching_layers
from extractors.computing.winograd import make_winograd

_ADDITIONS = (operator.add, operator.iadd, torch.add)
_RELUS = (F.relu, torch.relu)
_SHAPE_PRESERVING = (nn.ReLU, nn.BatchNorm2d, nn.Identity)


def trace_and_fold(model: nn.Module) -> fx.GraphModule:
    """Return a network, traced, with each batch norm folded into the convolution before it; the model is changed, too.

    Args:
        model: in evaluation, on the CPU, in float32. Its forward must not depend on values.
    """
    graph = trace(model)
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
    recompile(graph)
    return count


def trace(model: nn.Module) -> fx.GraphModule:
    """Return a network, traced, without layers that do nothing. Its forward must not depend on values."""
    graph = fx.symbolic_trace(model)
    layers = dict(graph.named_modules())
    for node in list(graph.graph.nodes):
        if type(_layer(node, layers)) is nn.Identity:
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
    return recompile(graph)


def recompile(graph: fx.GraphModule) -> fx.GraphModule:
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


def optimize_for_inference(
    graph: fx.GraphModule,
    shape: tuple[int, ...],
    device: torch.device,
    *,
    precision: str,
    compile: bool,  # noqa: A002
) -> nn.Module:
    """Return a network for its forwards on a device: compiled if that is asked for, or else with merged layers.

    Args:
        graph: from `trace_and_fold`, or `trace`, cast already.
        shape: ``[B, C, H, W]`` of the input of every forward on a CPU.
        device: where it will run.
        precision: one of `extractors.computing.devices.PRECISIONS`.
        compile: see `extractors.computing.compile.compile_model`.

    Raises:
        UsageError: likewise.
        ImagepivotError: see `extractors.computing.fused_conv2d.disable_mismatching_layers`.
    """
    shape_of_one = (1, *shape[1:])
    is_fused = device.type == "cuda" and not compile
    graph = fuse_cudnn(graph, shape) if is_fused else graph
    graph = graph.to(device).to(memory_format=torch.channels_last)
    if is_fused:
        disable_mismatching_layers(graph, shape_of_one, precision, device)
    if device.type == "cpu":
        shapes = infer_shapes(graph, shape, next(graph.parameters()).dtype)
        replace_with_winograd(graph, shapes, compile=compile)
        if not compile:
            fuse_onednn(graph, shapes)
    return compile_model(graph, device, enabled=compile)


def replace_with_winograd(graph: fx.GraphModule, shapes: dict[str, torch.Size], *, compile: bool) -> fx.GraphModule:  # noqa: A002
    """Let 3×3 convolutions on a CPU, and the ReLUs behind them, be Winograd convolutions, in place, where that is faster.

    Args:
        graph: from `trace_and_fold`, cast already, on the CPU.
        shapes: from `infer_shapes`, of the input of every forward; gets those of the new layers. Inputs of other shapes give
            features that differ in their last bits.
        compile: whether the network will be compiled.
    """
    for group in _groups(graph):
        values: Any = group.conv.args[0]
        layer = make_winograd(group.layer, shapes[values.name], relu=group.relu is not None, compile=compile)
        if layer is not None:
            group.replace(graph, layer, shapes)
    return recompile(graph)


def fuse_onednn(graph: fx.GraphModule, shapes: dict[str, torch.Size], dtype: torch.dtype | None = None) -> fx.GraphModule:
    """Merge each convolution on a CPU with the addition and the ReLU behind it, in place, where oneDNN computes it.

    Args:
        graph: from `trace_and_fold`, cast already, on the CPU.
        shapes: from `infer_shapes`, of the input of every forward; gets those of the new layers. Inputs of other shapes give the
            same features, perhaps in more time.
        dtype: type of the block of autocast that the network will run in, to which nothing has been cast yet; None for no such
            block.
    """
    for group in _groups(graph, shapes, overwrite=True):
        if not can_fuse_in(dtype or group.layer.weight.dtype):
            continue
        values: Any = group.conv.args[0]
        shape, relu = list(shapes[values.name]), group.relu is not None
        group.replace(graph, FusedConv2d(group.layer, shape, relu=relu, dtype=dtype), shapes)
    return recompile(graph)


def fuse_cudnn(graph: fx.GraphModule, shape: tuple[int, ...]) -> fx.GraphModule:
    """Fuse each convolution with the following residual add and ReLU, in place, into one layer of cuDNN.

    Args:
        graph: from `trace_and_fold`, cast already; `extractors.computing.fused_conv2d.disable_mismatching_layers` has to follow.
        shape: ``[B, C, H, W]`` of an input. Others must have sums of maps of one size where this one has.
    """
    # Batch size 2: with one image, a broadcast tensor would look like a feature map.
    shapes = infer_shapes(graph, (2, *shape[1:]), next(graph.parameters()).dtype)
    for group in _groups(graph, shapes):
        if group.addition is not None and group.addition.target is operator.iadd and group.addition.args[0] is group.other:
            continue  # Later readers of the residual expect the sum.
        if group.relu is not None:
            group.replace(graph, CudnnFusedConv2d(group.layer), shapes)
    return recompile(graph)


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


def _groups(graph: fx.GraphModule, shapes: dict[str, torch.Size] | None = None, *, overwrite: bool = False) -> Iterator[_Group]:
    """Yield each convolution with the ReLU that follows it, and with inferred shapes also the residual add in between.

    Args:
        graph: the network.
        shapes: from `infer_shapes`; None to leave additions alone.
        overwrite: take only residuals whose memory the sum may take.
    """
    layers = dict(graph.named_modules())
    for node in list(graph.graph.nodes):
        conv = _layer(node, layers)
        if type(conv) is not nn.Conv2d or conv.padding_mode != "zeros" or isinstance(conv.padding, str):
            continue
        behind, addition = _only_user(node), None
        other = None if shapes is None or behind is None else _residual(behind, node, shapes)
        if other is not None and behind is not None and overwrite and not _can_overwrite(graph, other, behind):
            other = None
        if other is not None:
            addition, behind = behind, _only_user(behind)  # type: ignore[arg-type]
        is_relu = behind is not None and (isinstance(_layer(behind, layers), nn.ReLU) or behind.target in _RELUS)
        yield _Group(conv, node, addition, other, behind if is_relu else None)


def _layer(node: fx.Node, layers: dict[str, nn.Module]) -> nn.Module | None:
    return layers.get(str(node.target)) if node.op == "call_module" else None


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _residual(addition: fx.Node, conv: fx.Node, shapes: dict[str, torch.Size]) -> fx.Node | None:
    """Return the feature map that a node adds to a convolution; None if it does anything else."""
    others = [argument for argument in addition.args if argument is not conv]
    if addition.op != "call_function" or addition.target not in _ADDITIONS or addition.kwargs or len(addition.args) != 2:
        return None
    if len(others) != 1 or not isinstance(others[0], fx.Node):
        return None
    other = others[0]
    return other if other is not conv.args[0] and shapes.get(other.name) == shapes[conv.name] else None


def _can_overwrite(graph: fx.GraphModule, other: fx.Node, addition: fx.Node) -> bool:
    """Return whether a sum may take the memory of a residual: it has no later readers, and nothing shares its memory."""
    layers = dict(graph.named_modules())
    places = {node: place for place, node in enumerate(graph.graph.nodes)}
    # Not the input, which is the caller's, nor what may share its memory with something else.
    is_fresh = type(_layer(other, layers)) in (nn.Conv2d, FusedConv2d, nn.MaxPool2d)
    return is_fresh and all(places[user] <= places[addition] for user in other.users)


def infer_shapes(graph: fx.GraphModule, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, torch.Size]:
    """Return the shape of what each node makes, by the names of the nodes; nodes that make no tensor are left out.

    Of convolutions, poolings, ReLUs and sums they are calculated. For any other operation the network runs on the meta device, for
    which torch loads its compiler: seconds that a run over few images would wait for.

    Args:
        graph: a traced network of one input.
        shape: ``[B, C, H, W]`` of the input.
        dtype: of the input.
    """
    layers = dict(graph.named_modules())
    shapes: dict[str, torch.Size] = {}
    for node in graph.graph.nodes:
        if node.op == "output":
            continue
        inputs = [shapes[argument.name] for argument in node.args if isinstance(argument, fx.Node)]
        inferred = torch.Size(shape) if node.op == "placeholder" else _calculate(node, _layer(node, layers), inputs)
        if inferred is None:
            return _run_on_meta(graph, shape, dtype)
        shapes[node.name] = inferred
    return shapes


def _calculate(node: fx.Node, layer: Any, inputs: list[torch.Size]) -> torch.Size | None:
    """Return the shape of what a node makes of inputs; None for an operation that is none of those listed."""
    if node.op == "call_function" and node.target in (*_ADDITIONS, *_RELUS):
        return inputs[0] if len(set(inputs)) == 1 else None
    if not inputs:
        return None
    if type(layer) in _SHAPE_PRESERVING:
        return inputs[0]
    if type(layer) is nn.Conv2d and not isinstance(layer.padding, str):
        return torch.Size((inputs[0][0], layer.out_channels, *_output_hw(layer, inputs[0])))
    if type(layer) is nn.MaxPool2d and not layer.ceil_mode and not layer.return_indices:
        return torch.Size((*inputs[0][:2], *_output_hw(layer, inputs[0])))
    return None


def _output_hw(layer: Any, shape: torch.Size) -> tuple[int, ...]:
    """Return the rows and columns of a window's places: the formula in torch's pages on ``Conv2d`` and ``MaxPool2d``."""
    numbers = (_pair(value) for value in (layer.kernel_size, layer.stride, layer.padding, layer.dilation))
    return tuple(
        (side + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
        for side, kernel, stride, padding, dilation in zip(shape[2:], *numbers, strict=True)
    )


def _run_on_meta(graph: fx.GraphModule, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, torch.Size]:
    """Infer shapes by running a network without memory for values."""
    parameters = {id(tensor): tensor for tensor in chain(graph.parameters(), graph.buffers())}  # Not copied.
    copy = deepcopy(graph, parameters).to("meta")
    ShapeProp(copy).propagate(torch.empty(shape, dtype=dtype, device="meta"))
    made = {node.name: node.meta.get("tensor_meta") for node in copy.graph.nodes if node.op != "output"}
    return {name: tensor.shape for name, tensor in made.items() if isinstance(tensor, TensorMetadata)}
