"""Layers that cuDNN fuses, on a fake GPU: what they compute, and what happens where cuDNN fails or errs."""

import logging
import operator
from copy import deepcopy

import pytest
import torch
import torchvision
from torch import nn

from extractors.base import warn_once
from extractors.computing import fused_conv2d
from extractors.computing.devices import cast_layers
from extractors.computing.fusion import fuse_cudnn, optimize_for_inference, trace_and_fold
from schemas.errors import ImagepivotError
from tests.extractors.computing.test_fusion import Spread, with_statistics
from tests.fake_gpu import fake_gpu

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
SHAPE = (1, 3, 64, 64)  # Torch's convolutions in bfloat16 are wrong on feature maps of 3×2 with AMX.
# Of ResNet18; its shortcuts have no ReLU.
FUSED = {"cudnn_convolution_relu": 9, "cudnn_convolution_add_relu": 8, "convolution": 3}
RELU, ADD_RELU = torch.cudnn_convolution_relu, torch.cudnn_convolution_add_relu


@pytest.fixture(autouse=True)
def _everything_is_told_anew():
    warn_once.cache_clear()


@pytest.fixture(scope="module")
def trunk():
    """ResNet18 up to its last map, with norms that do something."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return with_statistics(nn.Sequential(*list(torchvision.models.resnet18(weights=None).children())[:-2]))


def images(batch=2):
    return torch.randn(batch, *SHAPE[1:], generator=torch.Generator().manual_seed(2))


def ready(trunk, device, precision="fp32"):
    graph = trace_and_fold(trunk)
    cast_layers(graph, precision)
    return optimize_for_inference(graph, SHAPE, device, precision=precision, compile=False)


@pytest.fixture
def copies(trunk):
    """Return what copies the trunk: folding changes it."""
    return lambda: deepcopy(trunk)


def run(network, *batches):
    with torch.inference_mode():
        return [network(batch.to(GPU)).cpu() for batch in batches]


def plain(copies, batch):
    with torch.inference_mode():
        return copies()(batch)


def launches_of_layers(gpu):
    return {name: count for name, count in gpu.launches.items() if "convolution" in name or name in ("add_", "relu_", "add")}


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 3e-6), ("tf32", 3e-6), ("bf16", 0.05), ("fp16", 0.01)])
def test_fuse_cudnn_network_has_one_launch_per_layer(precision, tolerance, copies, caplog):
    expected = plain(copies, images())
    with fake_gpu() as gpu:
        network = ready(copies(), GPU, precision)
        gpu.reset()
        dtype = next(network.parameters()).dtype
        [found] = run(network, images().to(dtype))
        assert launches_of_layers(gpu) == FUSED
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()
    assert not caplog.messages


def no_engine(*arguments):
    raise RuntimeError("GET was unable to find an engine to execute this computation\nand more")


def unsupported(*arguments):
    raise NotImplementedError("Could not run 'aten::cudnn_convolution_relu' with arguments from the 'CUDA' backend")


def not_a_number(*arguments):
    return torch.full_like(RELU(*arguments), torch.nan)


def without_bias(values, weight, bias, *numbers):
    return RELU(values, weight, None, *numbers)


def in_tf32(values, weight, bias, *numbers):
    """Round the operands to 10 bits, as the tensor cores do."""
    values, weight = ((tensor.view(torch.int32) & -(2**13)).view(torch.float32) for tensor in (values, weight))
    return RELU(values, weight, bias, *numbers)


def drifting():
    calls = iter(range(1000))
    return lambda *arguments: RELU(*arguments) * (1 + 1e-6 * next(calls))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("relu", "reason"),
    [
        (no_engine, "GET was unable to find an engine to execute this computation)"),
        (unsupported, "Could not run"),
        (not_a_number, "its results differ from torch's"),
        (without_bias, "its results differ from torch's"),
        (in_tf32, "its results differ from torch's"),
        (drifting(), "two runs have different results"),
    ],
)
def test_cudnn_layers_with_errors_or_other_results_are_disabled(relu, reason, copies, monkeypatch, caplog):
    """Layers with an addition, which are as they should be, stay fused; what is wrong is told once."""
    expected = plain(copies, images())
    monkeypatch.setattr(torch, "cudnn_convolution_relu", relu)
    with fake_gpu() as gpu, caplog.at_level(logging.WARNING):
        network = ready(copies(), GPU)
        gpu.reset()
        [found] = run(network, images())
        assert launches_of_layers(gpu) == {"cudnn_convolution_add_relu": 8, "convolution": 12, "relu_": 9}
    assert (found - expected).abs().max() <= 3e-6 * expected.abs().max()
    [message] = caplog.messages
    assert reason in message


@pytest.mark.slow
def test_cudnn_missing_engine_for_a_shape_falls_back_to_torch(copies, monkeypatch, caplog):
    with fake_gpu() as gpu, caplog.at_level(logging.WARNING):
        network = ready(copies(), GPU)
        expected = run(network, images(), images(1))

        def not_of_two(values, *arguments):
            return no_engine() if len(values) == 2 else RELU(values, *arguments)

        monkeypatch.setattr(torch, "cudnn_convolution_relu", not_of_two)
        found = run(network, images(), images(1))
        gpu.reset()
        run(network, images(), images(1))
        assert gpu.launches["cudnn_convolution_relu"] == 9
        assert gpu.launches["relu_"] == 9
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() <= 1e-6 * other.abs().max()
    assert len(caplog.messages) == 1


@pytest.mark.slow
def test_cudnn_out_of_memory_is_raised(copies, monkeypatch):
    def full(*arguments):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    with fake_gpu():
        network = ready(copies(), GPU)
        monkeypatch.setattr(torch, "cudnn_convolution_relu", full)
        with pytest.raises(torch.cuda.OutOfMemoryError, match="CUDA out of memory"):
            run(network, images())
        with pytest.raises(ImagepivotError, match="too small for the model and one image"):
            ready(copies(), GPU)


class Block(nn.Module):
    """A sum whose other map, and what reads it later, is chosen."""

    def __init__(self, add, *, same: bool = False, later: bool = False, cut: bool = True) -> None:
        super().__init__()
        self.before, self.conv, self.relu = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 3, padding=1), nn.ReLU()
        self._add, self._same, self._later, self._cut = add, same, later, cut

    def forward(self, values):
        aside = self.before(values)
        found = self._add(self.conv(aside if self._same else values), aside)
        found = self.relu(found) if self._cut else found
        return found + aside if self._later else found


@pytest.mark.parametrize(
    ("add", "options", "is_fused"),
    [
        (operator.add, {}, True),
        (operator.iadd, {}, True),
        (lambda left, right: right + left, {}, True),
        (operator.add, {"later": True}, True),  # Nothing is overwritten.
        (operator.add, {"same": True}, False),
        (operator.add, {"cut": False}, False),
        (lambda left, right: torch.add(left, right, alpha=2), {}, False),
        (operator.mul, {}, False),
    ],
)
def test_fuse_cudnn_sums(add, options, is_fused):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        block = Block(add, **options).eval().requires_grad_(False)
    with torch.inference_mode():
        expected = block(images())
    with fake_gpu() as gpu:
        network = optimize_for_inference(trace_and_fold(block), SHAPE, GPU, precision="fp32", compile=False)
        gpu.reset()
        [found] = run(network, images())
        assert gpu.launches["cudnn_convolution_add_relu"] == is_fused
    assert (found - expected).abs().max() <= 1e-6 * expected.abs().max()


@pytest.mark.parametrize("is_other_first", [False, True])
def test_fuse_cudnn_in_place_residual_is_not_fused(is_other_first):
    graph = trace_and_fold(Block((lambda left, right: right + left) if is_other_first else operator.add, later=True))
    next(node for node in graph.graph.nodes if node.target is operator.add).target = operator.iadd
    layers = list(fuse_cudnn(graph, SHAPE).modules())
    assert any(isinstance(layer, fused_conv2d.CudnnFusedConv2d) for layer in layers) != is_other_first


def test_fuse_cudnn_broadcast_sum_is_not_fused():
    graph = fuse_cudnn(trace_and_fold(Spread(3, SHAPE[2:])), SHAPE)
    assert not any(isinstance(layer, fused_conv2d.CudnnFusedConv2d) for layer in graph.modules())
