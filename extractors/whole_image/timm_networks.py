"""Networks of timm up to their pooling: folded norms, and grids of features."""

from copy import copy
from typing import Any

from timm.layers import BatchNormAct2d, get_notrace_functions, is_notrace_module
from torch import Tensor, fx, nn

from extractors.computing.fusion import NO_OPS, fold_norms, trace

# Errors of timm's networks when traced with placeholders instead of tensors.
_UNTRACEABLE = (ValueError, TypeError, RuntimeError, AttributeError, LookupError, NameError, AssertionError)


def fold_timm_norms(model: nn.Module) -> fx.GraphModule | None:
    """Trace a model and fold its norms, which also changes it; None if impossible."""
    try:
        graph = trace(model, _Tracer(autowrap_functions=tuple(get_notrace_functions())))
    except _UNTRACEABLE:
        return None
    _split_norm_activations(graph)
    return graph if fold_norms(graph) else None


class _Tracer(fx.Tracer):
    """Tracer with the layers as leaves that timm excludes from tracing."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return is_notrace_module(type(m)) or super().is_leaf_module(m, module_qualified_name)


def _split_norm_activations(graph: fx.GraphModule) -> None:
    """Split norms with an activation."""
    layers = dict(graph.named_modules())
    for node in list(graph.graph.nodes):
        layer: Any = layers.get(str(node.target)) if node.op == "call_module" else None
        if type(layer) is BatchNormAct2d:
            activation = layer.act
            node.target = f"{node.name}_norm"
            norm = copy(layer)
            norm.__class__, norm._modules = nn.BatchNorm2d, {}
            graph.add_submodule(node.target, norm)
            if type(activation) not in NO_OPS:
                graph.add_submodule(f"{node.name}_act", activation)
                with graph.graph.inserting_after(node):
                    active = graph.graph.call_module(f"{node.name}_act")
                node.replace_all_uses_with(active)
                active.args = (node,)


class MapModel(nn.Module):
    """timm model up to its pooling: from ``[B, 3, H, W]`` to feature maps or tokens."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, values: Tensor) -> Tensor:
        """Run the model."""
        return self.model.forward_features(values)


class UnpooledModel(nn.Module):
    """timm model, with its (optimized) `MapModel`, from ``[B, 3, H, W]`` to a grid."""

    def __init__(self, model: Any, network: nn.Module, grid_hw: tuple[int, int]) -> None:
        super().__init__()
        self._network = network
        self._cells = grid_hw[0] * grid_hw[1]
        self._output_fmt, self._width = getattr(model, "output_fmt", None), model.num_features

    def forward(self, values: Tensor) -> Tensor:
        """Return ``[B, cells, D]`` in row-major order."""
        features: Tensor = self._network(values)
        if features.ndim == 3:
            return features[:, features.shape[1] - self._cells :]  # [B, T, D]; prefix tokens come first
        if not _channels_last(self._output_fmt, self._width, features):
            features = features.permute(0, 2, 3, 1)
        return features.flatten(1, 2)


def grid_hw(model: Any, features: Any) -> tuple[int, int] | None:
    """Return rows and columns of the output of a timm model's ``forward_features``.

    None if the output is no grid, or the order of its tokens is unknown, e.g. in Hiera, which merges tokens.
    """
    if not isinstance(features, Tensor) or model.num_features not in features.shape[1:]:
        return None
    if features.ndim == 4:
        is_last = _channels_last(getattr(model, "output_fmt", None), model.num_features, features)
        height, width = features.shape[1:3] if is_last else features.shape[2:]
        return height, width
    patches = getattr(model, "patch_embed", None) or getattr(model, "stem", None)
    grid = getattr(patches, "grid_size", None)
    if features.ndim != 3 or grid is None or grid[0] * grid[1] + getattr(model, "num_prefix_tokens", 0) != features.shape[1]:
        return None
    return grid[0], grid[1]


def _channels_last(output_fmt: str | None, width: int, maps: Tensor) -> bool:
    return output_fmt == "NHWC" or maps.shape[1] != width
