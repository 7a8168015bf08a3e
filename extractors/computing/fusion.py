"""Graph optimization for inference (torch.fx): norm folding, operator fusion.

Batch norms are folded into the preceding convolution (`fold_norms`). Convolutions are then replaced by one of three back ends:

- oneDNN (CPU): fuses residual add and ReLU, with pre-packed weights (`fuse_onednn`),
- Winograd convolution (CPU): 3×3 convolutions where it is faster (`replace_with_winograd`),
- cuDNN (GPU): fuses residual add and ReLU (`fuse_cudnn`).

Shapes: ``B`` images of one forward, ``C`` channels, ``H`` and ``W`` pixels.
"""

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
NO_OPS = (nn.Identity, nn.Dropout, nn.Dropout2d)
"""Layers without effect in evaluation mode."""
_SHAPE_PRESERVING = (nn.ReLU, nn.BatchNorm2d, nn.Identity)


def trace_and_fold(model: nn.Module) -> fx.GraphModule:
    """Trace a network and fold its batch norms, which also changes the model.

    The model is in evaluation mode, on the CPU, in float32, without data-dependent control flow.
    """
    graph = trace(model)
    fold_norms(graph)
    return graph


def fold_norms(graph: fx.GraphModule) -> int:
    """Fold batch norms into the preceding convolutions in place; return their number."""
    layers = dict(graph.named_modules())
    calls = Counter(node.target for node in graph.graph.nodes)
    count = 0
    for node in list(graph.graph.nodes):
        norm, before = _module(node, layers), node.args[0] if node.args else None
        if isinstance(norm, nn.BatchNorm2d) and isinstance(before, fx.Node) and len(before.users) == 1:
            conv = _module(before, layers)
            if type(conv) is nn.Conv2d and calls[before.target] == 1:
                fold_norm(conv, norm)
                node.replace_all_uses_with(before)
                graph.graph.erase_node(node)
                count += 1
    recompile(graph)
    return count


def trace(model: nn.Module, tracer: fx.Tracer | None = None) -> fx.GraphModule:
    """Trace a network (no data-dependent control flow), and drop `NO_OPS`."""
    graph = fx.GraphModule(model, (tracer or fx.Tracer()).trace(model))
    layers = dict(graph.named_modules())
    for node in list(graph.graph.nodes):
        if type(_module(node, layers)) in NO_OPS:
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
    return recompile(graph)


def recompile(graph: fx.GraphModule) -> fx.GraphModule:
    """Recompile a changed graph without its unused layers, and return it."""
    graph.delete_all_unused_submodules()
    graph.recompile()
    return graph


def fold_norm(conv: nn.Conv2d, norm: Any) -> None:
    """Fold a (frozen) batch norm into a convolution in place, in float64."""
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
    """Return a network for a device: compiled if requested, else with fused layers.

    The graph is from `trace_and_fold` or `trace`, after casts. On a CPU every forward has the input ``shape``, ``[B, C, H, W]``.

    Raises:
        ImagepivotError: see `extractors.computing.fused_conv2d.disable_mismatching_layers`.
    """
    is_fused = device.type == "cuda" and not compile
    graph = fuse_cudnn(graph, shape) if is_fused else graph
    graph = graph.to(device).to(memory_format=torch.channels_last)
    if is_fused:
        disable_mismatching_layers(graph, (1, *shape[1:]), precision, device)
    if device.type == "cpu":
        shapes = infer_shapes(graph, shape, next(graph.parameters()).dtype)
        replace_with_winograd(graph, shapes, compile=compile)
        if not compile:
            fuse_onednn(graph, shapes)
    return compile_model(graph, device, enabled=compile)


def replace_with_winograd(graph: fx.GraphModule, shapes: dict[str, torch.Size], *, compile: bool) -> fx.GraphModule:  # noqa: A002
    """Replace 3×3 convolutions (with ReLU) by Winograd in place where it is faster.

    Args:
        graph: from `trace_and_fold`, after casts, on the CPU.
        shapes: from `infer_shapes`; updated. With other input shapes, features differ in their last bits.
        compile: whether the network will be compiled.
    """
    for group in _conv_groups(graph):
        values: Any = group.conv.args[0]
        layer = make_winograd(group.layer, shapes[values.name], relu=group.relu is not None, compile=compile)
        if layer is not None:
            group.replace(graph, layer, shapes)
    return recompile(graph)


def fuse_onednn(graph: fx.GraphModule, shapes: dict[str, torch.Size], dtype: torch.dtype | None = None) -> fx.GraphModule:
    """Fuse convolutions with residual add and ReLU, in place, if oneDNN supports it.

    Args:
        graph: from `trace_and_fold`, after casts, on the CPU.
        shapes: from `infer_shapes`; updated. Other input shapes may be slower.
        dtype: autocast dtype of the forward, for a network without casts; None without autocast.
    """
    for group in _conv_groups(graph, shapes, overwrite=True):
        if not can_fuse_in(dtype or group.layer.weight.dtype):
            continue
        values: Any = group.conv.args[0]
        shape, relu = list(shapes[values.name]), group.relu is not None
        group.replace(graph, FusedConv2d(group.layer, shape, relu=relu, dtype=dtype), shapes)
    return recompile(graph)


def fuse_cudnn(graph: fx.GraphModule, shape: tuple[int, ...]) -> fx.GraphModule:
    """Fuse each convolution, residual add and ReLU in place into one cuDNN layer.

    Args:
        graph: from `trace_and_fold`, after casts; call `extractors.computing.fused_conv2d.disable_mismatching_layers` next.
        shape: ``[B, C, H, W]`` of an input. Other inputs must not be broadcast in other additions.
    """
    # Batch size 2: with one image, a broadcast tensor would look like a feature map.
    shapes = infer_shapes(graph, (2, *shape[1:]), next(graph.parameters()).dtype)
    for group in _conv_groups(graph, shapes):
        if group.addition is not None and group.addition.target is operator.iadd and group.addition.args[0] is group.residual:
            continue  # Later readers of the residual expect the sum.
        if group.relu is not None:
            group.replace(graph, CudnnFusedConv2d(group.layer), shapes)
    return recompile(graph)


class _ConvGroup(NamedTuple):
    """Convolution with the nodes of a residual add and a ReLU that follow it.

    ``residual`` is the feature map that ``addition`` adds.
    """

    layer: nn.Conv2d
    conv: fx.Node
    addition: fx.Node | None
    residual: fx.Node | None
    relu: fx.Node | None

    def replace(self, graph: fx.GraphModule, layer: nn.Module, shapes: dict[str, torch.Size]) -> None:
        """Replace the nodes of the group by one layer."""
        old = [node for node in (self.conv, self.addition, self.relu) if node is not None]
        name = f"{self.conv.name}_fused"
        graph.add_submodule(name, layer)
        with graph.graph.inserting_after(old[-1]):
            new = graph.graph.call_module(name, tuple(node for node in (self.conv.args[0], self.residual) if node is not None))
        shapes[new.name] = shapes[self.conv.name]
        old[-1].replace_all_uses_with(new)
        for node in reversed(old):
            graph.graph.erase_node(node)


def _conv_groups(
    graph: fx.GraphModule, shapes: dict[str, torch.Size] | None = None, *, overwrite: bool = False
) -> Iterator[_ConvGroup]:
    """Yield each convolution with its ReLU, and with shapes also the residual add.

    With ``overwrite``, residual adds are left out unless the sum may overwrite the residual.
    """
    layers = dict(graph.named_modules())
    for node in list(graph.graph.nodes):
        conv = _module(node, layers)
        if type(conv) is not nn.Conv2d or conv.padding_mode != "zeros" or isinstance(conv.padding, str):
            continue
        user, addition, residual = _only_user(node), None, None
        if shapes is not None and user is not None:
            added = _added_map(user, node, shapes)
            if added is not None and (not overwrite or _can_overwrite(graph, added, user)):
                residual, addition, user = added, user, _only_user(user)
        is_relu = user is not None and (isinstance(_module(user, layers), nn.ReLU) or user.target in _RELUS)
        yield _ConvGroup(conv, node, addition, residual, user if is_relu else None)


def _module(node: fx.Node, layers: dict[str, nn.Module]) -> nn.Module | None:
    return layers.get(str(node.target)) if node.op == "call_module" else None


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _added_map(node: fx.Node, conv: fx.Node, shapes: dict[str, torch.Size]) -> fx.Node | None:
    """Return the feature map that a node adds to a convolution; None for other nodes."""
    if node.op != "call_function" or node.target not in _ADDITIONS or node.kwargs or len(node.args) != 2:
        return None
    others = [argument for argument in node.args if argument is not conv]
    if len(others) != 1 or not isinstance(others[0], fx.Node) or others[0] is conv.args[0]:
        return None
    return others[0] if shapes.get(others[0].name) == shapes[conv.name] else None


def _can_overwrite(graph: fx.GraphModule, residual: fx.Node, addition: fx.Node) -> bool:
    """Return whether a residual is a new tensor that is not read after the sum."""
    layers = dict(graph.named_modules())
    order = {node: index for index, node in enumerate(graph.graph.nodes)}
    # The network's input and possible views are not new.
    is_new = type(_module(residual, layers)) in (nn.Conv2d, FusedConv2d, nn.MaxPool2d)
    return is_new and all(order[user] <= order[addition] for user in residual.users)


def infer_shapes(graph: fx.GraphModule, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, torch.Size]:
    """Infer the output shapes of nodes by name, without nodes that return no tensor.

    Shapes of convolutions, poolings, ReLUs and sums are calculated. For other operations the network runs on the meta device, which
    loads torch's compiler and takes seconds. The network has one input, ``[B, C, H, W]``.
    """
    layers = dict(graph.named_modules())
    shapes: dict[str, torch.Size] = {}
    for node in graph.graph.nodes:
        if node.op == "output":
            continue
        inputs = [shapes[argument.name] for argument in node.args if isinstance(argument, fx.Node)]
        inferred = torch.Size(shape) if node.op == "placeholder" else _calculate(node, _module(node, layers), inputs)
        if inferred is None:
            return _run_on_meta(graph, shape, dtype)
        shapes[node.name] = inferred
    return shapes


def _calculate(node: fx.Node, layer: Any, inputs: list[torch.Size]) -> torch.Size | None:
    """Return the output shape of a node; None for unsupported operations."""
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
    """Return the output sides by the formula of ``Conv2d`` and ``MaxPool2d``."""
    geometry = (_pair(value) for value in (layer.kernel_size, layer.stride, layer.padding, layer.dilation))
    return tuple(
        (side + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
        for side, kernel, stride, padding, dilation in zip(shape[2:], *geometry, strict=True)
    )


def _run_on_meta(graph: fx.GraphModule, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, torch.Size]:
    parameters = {id(tensor): tensor for tensor in chain(graph.parameters(), graph.buffers())}  # Not copied.
    copy = deepcopy(graph, parameters).to("meta")
    ShapeProp(copy).propagate(torch.empty(shape, dtype=dtype, device="meta"))
    outputs = {node.name: node.meta.get("tensor_meta") for node in copy.graph.nodes if node.op != "output"}
    return {name: tensor.shape for name, tensor in outputs.items() if isinstance(tensor, TensorMetadata)}
