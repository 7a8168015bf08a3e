"""Models of timm whose batch norms are folded into their convolutions, see `extractors.computing.fusing`.

They are of all kinds. Of those that can be traced, what is folded are plain convolutions and batch norms, among them timm's own
norm that ends with an activation; the rest of the network is left alone. All others stay as they are.
"""

from __future__ import annotations

from copy import copy
from typing import Any

from timm.layers import BatchNormAct2d, get_notrace_functions, is_notrace_module
from torch import fx, nn

from extractors.computing.fusing import fold_norms, tidied

# What the code of hundreds of networks raises where it meets a placeholder instead of a tensor.
_UNTRACEABLE = (ValueError, TypeError, RuntimeError, AttributeError, LookupError, NameError, AssertionError)
_NOTHING = (nn.Identity, nn.Dropout, nn.Dropout2d)


def traced_and_folded(model: nn.Module) -> fx.GraphModule | None:
    """Return a model, traced, with batch norms folded; None if it cannot be traced or has none. The model is changed, too.

    Args:
        model: in evaluation, on the device where it will run, in float32; on the meta device to find out whether it folds.
    """
    tracer = _Tracer(autowrap_functions=tuple(get_notrace_functions()))
    try:
        traced = tracer.trace(model)
    except _UNTRACEABLE:
        return None
    graph = fx.GraphModule(tracer.root, traced)
    _take_norms_apart(graph)
    return graph if fold_norms(graph) else None


class _Tracer(fx.Tracer):
    """Takes for one layer what timm says cannot be traced, such as norms with an activation."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return is_notrace_module(type(m)) or super().is_leaf_module(m, module_qualified_name)


def _take_norms_apart(graph: fx.GraphModule) -> None:
    """Make of each norm with an activation a norm and an activation, and drop what does nothing in evaluation."""
    layers = dict(graph.named_modules())
    for node in list(graph.graph.nodes):
        layer: Any = layers.get(str(node.target)) if node.op == "call_module" else None
        if type(layer) in _NOTHING:
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
        elif type(layer) is BatchNormAct2d:
            activation = layer.act
            node.target = f"{node.name}_norm"
            graph.add_submodule(node.target, _without_activation(layer))
            if type(activation) not in _NOTHING:
                graph.add_submodule(f"{node.name}_act", activation)
                with graph.graph.inserting_after(node):
                    active = graph.graph.call_module(f"{node.name}_act")
                node.replace_all_uses_with(active)
                active.args = (node,)
    tidied(graph)


def _without_activation(norm: BatchNormAct2d) -> nn.BatchNorm2d:
    """Return a norm of the same tensors that does nothing else."""
    plain = copy(norm)
    plain.__class__ = nn.BatchNorm2d
    plain._modules = {}
    return plain
