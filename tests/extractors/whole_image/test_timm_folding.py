from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

timm = pytest.importorskip("timm", reason="needs timm: pip install 'imagepivot[timm]'")

from timm.layers import BatchNormAct2d  # noqa: E402

import extractors  # noqa: E402
from extractors import ExtractorRequest  # noqa: E402
from extractors.computing.fused_conv2d import FusedConv2d  # noqa: E402
from extractors.computing.fusion import fuse_onednn, infer_shapes, optimize_for_inference  # noqa: E402
from extractors.computing.winograd import WinogradConv2d  # noqa: E402
from extractors.whole_image.timm_networks import MapModel, fold_timm_norms  # noqa: E402
from tests.extractors.computing import test_fusion  # noqa: E402
from tests.extractors.computing.test_fusion import seeded  # noqa: E402
from tests.extractors.whole_image import test_timm_models  # noqa: E402

CPU = torch.device("cpu")
SHAPE = (2, 3, 64, 64)


NARROW = ((0.8, 1.2), (-0.1, 0.1), (-0.1, 0.1), (0.8, 1.2))  # Of norms, since timm's networks are deep.


def with_statistics(model: nn.Module) -> nn.Module:
    return test_fusion.with_statistics(model, NARROW).to(memory_format=torch.channels_last)


def models_own(name: str) -> nn.Module:
    return with_statistics(test_timm_models.seeded(name))


def images(shape: tuple[int, ...] = SHAPE) -> Tensor:
    return torch.randn(shape, generator=seeded()).contiguous(memory_format=torch.channels_last)


def error(found: Tensor, exact: Tensor) -> float:
    assert found.shape == exact.shape
    return float((found - exact).abs().max() / exact.abs().max())


def assert_as_exact_as_timms_own(model: nn.Module) -> nn.Module:
    """Fuse a model, and compare both with float64; return what was made of it."""
    with torch.inference_mode():
        exact, own = deepcopy(model).double()(images().double()), model(images())
        graph = fold_timm_norms(model)
        assert graph is not None
        fused = optimize_for_inference(graph, SHAPE, CPU, precision="fp32", compile=False)
        assert error(fused(images()), exact) <= max(1e-6, 2 * error(own, exact))
    return fused


def count(model: nn.Module, kind: type[nn.Module]) -> int:
    return sum(isinstance(layer, kind) for layer in model.modules())


@pytest.mark.slow
@pytest.mark.parametrize("grid", [False, True], ids=["pooled", "grid"])
@pytest.mark.parametrize(
    ("name", "left"),
    [
        ("resnet18", 0),
        ("resnet50d", 0),
        ("efficientnet_b0", 0),
        ("mobilenetv3_small_050", 0),
        ("regnetx_002", 0),
        ("tf_mobilenetv3_small_minimal_100", 5),  # Convolutions that pad as TensorFlow does stay as they are.
        ("densenet121", 62),  # Half of the norms come before their convolution.
    ],
)
def test_fold_timm_norms_networks_are_folded_and_fused(name, left, grid):
    model = models_own(name)
    fused = assert_as_exact_as_timms_own(MapModel(model) if grid else model)
    assert count(fused, nn.BatchNorm2d) == left
    assert count(fused, FusedConv2d) + count(fused, WinogradConv2d) >= 20
    assert {type(layer) for layer in fused.modules()}.isdisjoint({nn.Identity, nn.Dropout, BatchNormAct2d})


@pytest.mark.slow
@pytest.mark.parametrize("grid", [False, True], ids=["pooled", "grid"])
@pytest.mark.parametrize("name", ["test_vit", "convnext_atto", "test_nfnet"])
def test_fold_timm_norms_without_batch_norms_is_none(name, grid):
    model = models_own(name)
    before = {key: values.clone() for key, values in model.state_dict().items()}
    assert fold_timm_norms(MapModel(model) if grid else model) is None
    assert all(torch.equal(values, before[key]) for key, values in model.state_dict().items())
    assert "norms" not in ExtractorRequest(f"timm:{name}", weights="random:0", unpooled=grid).describe().parameters


def loaded_in_bf16() -> nn.Module:
    return extractors.load_extractor("timm:test_resnet.r160_in1k", weights="random:0", precision="bf16")._network


def test_load_bf16_without_fusion_caches_casts(monkeypatch):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False, raising=False)
    model = loaded_in_bf16()
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d)]
    assert {layer.cast_weight.dtype for layer in layers} == {torch.bfloat16}
    assert (count(model, nn.BatchNorm2d), count(model, FusedConv2d)) == (0, 0)


merges_bf16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="needs a processor with instructions for bfloat16"
)


@pytest.mark.slow
@merges_bf16
@pytest.mark.parametrize("name", ["resnet18", "resnext50_32x4d", "seresnet50", "efficientnet_b0", "densenet121", "dla34"])
def test_fuse_onednn_bf16_is_as_exact_as_autocast(name):
    model = models_own(name)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        with torch.autocast("cpu", enabled=False):
            exact = deepcopy(model).double()(images().double())
        own = error(model(images()).float(), exact)
        graph = fold_timm_norms(model)
        assert graph is not None
        fuse_onednn(graph, infer_shapes(graph, SHAPE, torch.float32), torch.bfloat16)
        found = graph(images()).float()
    assert 0 < error(found, exact) < 1.5 * own
    assert count(graph, FusedConv2d) >= 20


class Branching(nn.Module):
    """A network that cannot be traced, because what it does depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)

    def forward(self, values: Tensor) -> Tensor:
        return self.norm(self.conv(values)) if values.sum() > 0 else values


def test_fold_timm_norms_untraceable_model_is_none():
    model = with_statistics(Branching())
    expected = model(images())
    assert fold_timm_norms(model) is None
    assert torch.equal(model(images()), expected)


class Twice(nn.Module):
    """A norm with an activation that is used twice, and one that is used once, by which the network folds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)
        self.third, self.shared, self.own = nn.Conv2d(8, 8, 3), BatchNormAct2d(8), BatchNormAct2d(8, apply_act=False)

    def forward(self, values: Tensor) -> Tensor:
        found = self.shared(self.first(values).sin())
        return self.own(self.third(self.shared(self.second(found).sin())))


def test_fold_timm_norms_shared_norm_keeps_activation():
    fused = assert_as_exact_as_timms_own(with_statistics(Twice()))
    assert count(fused, nn.BatchNorm2d) == 2
    assert count(fused, nn.ReLU) == 1
