from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from extractors.computing import winograd
from extractors.computing.fused_conv2d import FusedConv2d
from extractors.computing.fusion import fuse_onednn, infer_shapes, replace_with_winograd, trace
from extractors.computing.winograd import GroupedWinogradConv2d, WinogradConv2d, winograd_tile
from tests.extractors.computing.test_fusion import images


def convolution(inputs: int, outputs: int, *, bias: bool = True, **options) -> nn.Conv2d:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Conv2d(inputs, outputs, 3, bias=bias, **{"padding": 1} | options).requires_grad_(False)


def exactly(conv: nn.Conv2d, values: Tensor) -> Tensor:
    bias = None if conv.bias is None else conv.bias.double()
    return F.conv2d(values.double(), conv.weight.double(), bias, padding=1)


def grouped(conv: nn.Conv2d, side: int, *, relu: bool) -> GroupedWinogradConv2d:
    """Return the convolution as it is compiled."""
    return GroupedWinogradConv2d(conv, side, None, relu=relu)


def grouped_and_laid_out(conv: nn.Conv2d, side: int, *, relu: bool) -> GroupedWinogradConv2d:
    """Return the convolution with weights laid out for a map of other sides than those of the tests."""
    return GroupedWinogradConv2d(conv, side, (1, conv.in_channels, 20, 20), relu=relu)


KINDS = [WinogradConv2d, grouped, grouped_and_laid_out]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("side", [2, 3, 4])
@pytest.mark.parametrize("shape", [(2, 9, 7, 7), (1, 64, 14, 14), (3, 5, 1, 13), (1, 8, 6, 4)])
def test_winograd_conv2d_equals_convolution(shape, side, relu, bias, kind):
    conv, values = convolution(shape[1], 11, bias=bias), images(shape)
    expected = exactly(conv, values)
    expected = expected.relu() if relu else expected
    with torch.inference_mode():
        found = kind(conv, side, relu=relu)(values)
    assert found.shape == expected.shape
    assert (found - expected).abs().max() < 5e-6 * expected.abs().max()
    assert torch.equal(values, images(shape))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_winograd_conv2d_several_strips_equal_convolution(kind):
    conv, values = convolution(64, 64), images((1, 64, 190, 66))  # 4 MB of inputs of tiles are 24 of the 48 rows of tiles.
    with torch.inference_mode():
        found = kind(conv, 4, relu=False)(values)
    expected = exactly(conv, values)
    assert (found - expected).abs().amax(dim=(0, 1, 3)).max() < 5e-6 * expected.abs().max()


AMD = {"avx512_f": True, "cpu_name": "AMD EPYC"}
INTEL = {"avx512_f": True, "cpu_name": "Intel Xeon Platinum"}


@pytest.fixture
def processor(monkeypatch):
    """Returns what lets torch see another processor."""

    def named(capabilities: dict[str, object]) -> None:
        winograd.prefers_onednn.cache_clear()
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)

    yield named
    winograd.prefers_onednn.cache_clear()


@pytest.mark.parametrize(
    ("capabilities", "channels", "shape", "side"),
    [
        (INTEL, (64, 64), (1, 64, 224, 224), 4),
        (INTEL, (64, 64), (2, 64, 14, 14), 4),
        (INTEL, (64, 64), (1, 64, 14, 14), 2),
        (INTEL, (64, 64), (1, 64, 7, 7), None),
        (INTEL, (32, 64), (1, 32, 56, 56), None),
        (INTEL, (64, 63), (1, 64, 56, 56), None),
        (AMD, (64, 128), (2, 64, 56, 56), None),
        (AMD, (128, 128), (2, 128, 56, 56), 4),
        (AMD, (128, 128), (2, 128, 7, 7), None),
    ],
)
def test_winograd_tile_depends_on_processor_channels_and_number_of_tiles(capabilities, channels, shape, side, processor):
    """On an AMD EPYC with AVX-512, products of MKL reach 60 GFLOP/s a core where convolutions of oneDNN reach 110."""
    processor(capabilities)
    assert winograd_tile(convolution(*channels), shape) == side


@pytest.mark.parametrize(
    "other",
    [
        {"stride": 2},
        {"padding": 0},
        {"dilation": 2, "padding": 2},
        {"groups": 64},
        {"padding_mode": "reflect"},
        {"dtype": torch.bfloat16},
    ],
    ids=str,
)
def test_winograd_tile_unsupported_convolution_is_none(other, processor):
    processor(INTEL)
    assert winograd_tile(convolution(64, 64, **other), (1, 64, 56, 56)) is None


class Block(nn.Module):
    """Two convolutions with ReLUs, of which the second has a sum in between, and one that looks at single pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = convolution(128, 128), convolution(128, 128), nn.Conv2d(128, 8, 1)

    def forward(self, values: Tensor) -> Tensor:
        return self.last(F.relu(self.second(F.relu(self.first(values))) + values))


@pytest.mark.parametrize(("capabilities", "kind"), [(INTEL, WinogradConv2d), (AMD, GroupedWinogradConv2d)])
def test_replace_with_winograd_network_equals_float64(capabilities, kind, processor):
    processor(capabilities)
    block, shape = Block().eval().requires_grad_(False), (2, 128, 28, 28)
    with torch.inference_mode():
        expected = block.double()(images(shape).double())
        graph = trace(block.float()).to(memory_format=torch.channels_last)
        shapes = infer_shapes(graph, shape, torch.float32)
        replace_with_winograd(graph, shapes, compile=False)
        fuse_onednn(graph, shapes)
        values = images(shape)
        found = graph(values)
    assert (found - expected).abs().max() < 1e-6 * expected.abs().max()
    assert [type(layer) for layer in graph.children()].count(kind) == 2
    assert [type(layer) for layer in graph.children()].count(FusedConv2d) == 1
    assert torch.equal(values, images(shape))
