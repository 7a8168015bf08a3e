from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
import torchvision
from torch import Tensor, fx, nn
from torch.nn import functional as F  # noqa: N812

from extractors.computing import fusion
from extractors.computing.fusion import fuse_onednn, infer_shapes, trace_and_fold

SHAPE = (2, 8, 9, 7)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


WIDE = ((0.5, 2), (-1, 1), (-1, 1), (0.2, 3))
"""Least and most of the numbers of a norm: its weight and bias, and the mean and variance that it has seen."""


def with_statistics(model: nn.Module, ranges: tuple[tuple[float, float], ...] = WIDE) -> nn.Module:
    """Give every norm numbers of its own: those of a new one fold away whatever is done with them."""
    generator = seeded(1)
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            numbers = (norm.weight, norm.bias, norm.running_mean, norm.running_var)
            for values, (least, most) in zip(numbers, ranges, strict=True):
                values.data.uniform_(least, most, generator=generator)
    return model.eval().requires_grad_(False)


def images(shape: tuple[int, ...] = SHAPE) -> Tensor:
    return torch.randn(shape, generator=seeded()).contiguous(memory_format=torch.channels_last)


def fused(model: nn.Module, shape: tuple[int, ...] = SHAPE) -> torch.fx.GraphModule:
    return with_merged_layers(trace_and_fold(model).to(memory_format=torch.channels_last), shape)


def with_merged_layers(graph: torch.fx.GraphModule, shape: tuple[int, ...] = SHAPE) -> torch.fx.GraphModule:
    return fuse_onednn(graph, infer_shapes(graph, shape, next(graph.parameters()).dtype))


def counts(model: nn.Module) -> dict[str, int]:
    kinds = [type(layer).__name__ for layer in model.modules()]
    return {kind: kinds.count(kind) for kind in ("Conv2d", "BatchNorm2d", "ReLU", "FusedConv2d")}


def assert_close(found: Tensor, expected: Tensor, tolerance: float = 1e-6) -> None:
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()


def assert_fused_alike(model: nn.Module) -> torch.fx.GraphModule:
    """Fuse a model, and check that its results stay; return what was made of it."""
    model = with_statistics(model)
    with torch.inference_mode():
        expected = model(images())
        merged = fused(model)
        assert_close(merged(images()), expected)
    return merged


class Residual(nn.Module):
    """A block whose sum, and what reads it, is chosen."""

    def __init__(self, add, *, later: bool = False, inner: bool = True, own: bool = False) -> None:
        super().__init__()
        self.before, self.conv, self.norm, self.relu = (
            nn.Conv2d(8, 8, 1),
            nn.Conv2d(8, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
        )
        self._add, self._later, self._inner, self._own = add, later, inner, own

    def forward(self, values: Tensor) -> Tensor:
        aside = self.before(values) if self._inner else values
        found = self.relu(self._add(self.norm(self.conv(aside if self._own else values)), aside))
        return found + aside if self._later else found


def in_place(left: Tensor, right: Tensor) -> Tensor:
    left += right
    return left


@pytest.mark.parametrize("add", [lambda left, right: left + right, lambda left, right: right + left, in_place, torch.add])
def test_fuse_onednn_residual_block_is_two_operations(add):
    merged = assert_fused_alike(Residual(add))
    assert counts(merged) == {"Conv2d": 0, "BatchNorm2d": 0, "ReLU": 0, "FusedConv2d": 2}
    assert [node.op for node in merged.graph.nodes] == ["placeholder", "call_module", "call_module", "output"]


@pytest.mark.parametrize("more", [{"later": True}, {"inner": False}, {"own": True}])
def test_fuse_onednn_residual_with_later_readers_is_not_overwritten(more):
    model = with_statistics(Residual(torch.add, **more))
    values, kept = images(), images()
    with torch.inference_mode():
        expected = model(values)
        assert_close(fused(model)(values), expected)
    assert torch.equal(values, kept)


class Spread(nn.Module):
    """A sum of a map and of a single pixel of another."""

    def __init__(self, channels: int, hw: tuple[int, int]) -> None:
        super().__init__()
        self.whole, self.conv, self.relu = nn.Conv2d(channels, 3, hw), nn.Conv2d(channels, 3, 1), nn.ReLU()

    def forward(self, values: Tensor) -> Tensor:
        return self.relu(self.conv(values) + self.whole(values))


@pytest.mark.parametrize(
    "model",
    [
        Residual(lambda left, right: left + 2),
        Residual(lambda left, right: torch.add(left, right, alpha=2)),
        Residual(torch.mul),
        Spread(8, (9, 7)),
    ],
)
def test_fuse_onednn_other_sums_are_unchanged(model):
    assert_fused_alike(model)


class Norms(nn.Module):
    """A convolution and two norms, whose order is chosen."""

    def __init__(self, compute) -> None:
        super().__init__()
        self.conv, self.first, self.second = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.BatchNorm2d(8)
        self._compute = compute

    def forward(self, values: Tensor) -> Tensor:
        return self._compute(self, values)


@pytest.mark.parametrize(
    "compute",
    [
        lambda own, values: own.second(found := own.conv(own.first(values))) * found,
        lambda own, values: own.second(own.conv(own.first(own.conv(values)))),
    ],
    ids=["convolution with another reader", "convolution used twice"],
)
def test_fold_norms_without_own_convolution_remain(compute):
    assert counts(assert_fused_alike(Norms(compute)))["BatchNorm2d"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "resnet50", "vgg11_bn"])
def test_fuse_onednn_torchvision_networks_are_fused_entirely(name):
    """All convolutions, norms, sums and ReLUs are merged. Against float64, torch's own layers are off by up to 1.3e-6 here."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        whole = torchvision.models.get_model(name, weights=None)
    trunk = whole.features if name.startswith("vgg") else nn.Sequential(*list(whole.children())[:-2])
    model, shape = with_statistics(trunk), (1, 3, 64, 64)
    expected_convolutions = sum(isinstance(layer, nn.Conv2d) for layer in model.modules())
    with torch.inference_mode():
        exact = deepcopy(model).double()
        merged = fused(model, shape)
        assert counts(merged) == {"Conv2d": 0, "BatchNorm2d": 0, "ReLU": 0, "FusedConv2d": expected_convolutions}
        for other in (shape, (3, 3, 96, 64)):
            assert_close(merged(images(other)), exact(images(other).double()), 3e-6)


def test_fuse_onednn_unsupported_dtype_is_unchanged(monkeypatch):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False, raising=False)
    model = trace_and_fold(with_statistics(Residual(torch.add))).to(torch.bfloat16)
    assert counts(with_merged_layers(model))["Conv2d"] == 2


def traced(model: nn.Module) -> fx.GraphModule:
    return fx.symbolic_trace(model.eval())


def computed(model: nn.Module, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Shapes of what each node really makes."""
    found: dict[str, tuple[int, ...]] = {}

    class Recorder(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Tensor:
            made = super().run_node(n)
            if isinstance(made, Tensor):
                found[n.name] = tuple(made.shape)
            return made

    Recorder(traced(model)).run(torch.zeros(shape))
    return {name: shape for name, shape in found.items() if name != "output"}


def refuse(*_arguments: object) -> None:
    raise AssertionError("ran on the meta device")


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, kernel_size=(3, 5), stride=(2, 1), padding=(0, 2), dilation=(1, 2))
        self.norm, self.relu, self.pool = nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1, dilation=2)

    def forward(self, values: Tensor) -> Tensor:
        maps = self.norm(self.conv(values))
        maps = torch.add(F.relu(maps), self.relu(maps))
        maps += maps
        return self.pool(maps + maps)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "is_known"),
    [
        pytest.param(Sums, True, id="sums"),
        pytest.param(lambda: torchvision.models.vgg11(weights=None).features, True, id="vgg11"),
        pytest.param(
            lambda: nn.Sequential(*list(torchvision.models.resnet18(weights=None).children())[:-2]), True, id="resnet18"
        ),
        pytest.param(lambda: nn.Sequential(nn.MaxPool2d(2, ceil_mode=True)), False, id="rounded up"),
        pytest.param(
            lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()), False, id="other layers"
        ),
    ],
)
def test_infer_shapes_equal_computed_and_known_layers_are_not_run(build: Callable[[], nn.Module], is_known, monkeypatch):
    network = build()
    if is_known:
        monkeypatch.setattr(fusion, "_run_on_meta", refuse)
    for shape in ((1, 3, 40, 33), (3, 3, 41, 38)):
        found = infer_shapes(traced(network), shape, torch.float32)
        assert {name: tuple(of) for name, of in found.items() if name != "output"} == computed(network, shape)
