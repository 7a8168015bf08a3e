"""The networks have the layers, names, random weights and values of torchvision's, which they stand for."""

from collections.abc import Callable

import pytest
import torch
import torchvision
from torch import Tensor, nn

from extractors.networks import VGG19, ResNet, resnet50, resnet152
from extractors.whole_image import resnet50 as resnet50_pool
from extractors.whole_image.conv_grids import ARCHITECTURES
from extractors.whole_image.vgg19 import VARIANTS


def built(build: Callable[..., nn.Module], seed: int = 3) -> tuple[nn.Module, Tensor]:
    """Return a network, and the state of torch's generator after its weights were drawn."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build().eval(), torch.random.get_rng_state()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "name"),
    [(resnet50, "resnet50"), pytest.param(resnet152, "resnet152", marks=pytest.mark.cluster), (VGG19, "vgg19")],
)
def test_networks_equal_torchvision(build, name):
    (ours, after), (theirs, expected) = built(build), built(getattr(torchvision.models, name))
    assert_equal(ours, theirs, (2, 3, 65, 50))
    assert torch.equal(after, expected)


def assert_equal(ours: nn.Module, theirs: nn.Module, shape: tuple[int, ...]) -> None:
    """Assert that two networks have the same names in the same order, the same values, and give the same bits."""
    found, expected = ours.state_dict(), theirs.state_dict()
    assert list(found) == list(expected)
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    assert [name for name, _ in ours.named_children()] == [name for name, _ in theirs.named_children() if name != "avgpool"]
    pixels = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    maps, last = (ours.trunk(), ours.fc) if isinstance(ours, ResNet) else (ours.features, ours.classifier)
    with torch.inference_mode():
        assert torch.equal(last(theirs.avgpool(maps(pixels)).flatten(1)), theirs(pixels))


@pytest.mark.parametrize(
    ("architecture", "theirs", "refused"),
    [
        (resnet50_pool.ARCHITECTURE, "ResNet50", {"11ad3fa6": "IMAGENET1K_V2"}),
        (ARCHITECTURES["resnet152-grid"], "ResNet152", {"f82ba261": "IMAGENET1K_V2"}),
        (ARCHITECTURES["vgg19-grid"], "VGG19", {"d01eb7cb": "Oxford's VGG19 weights"}),
        (VARIANTS["vgg19-10crop"].architecture, "VGG19", {"d01eb7cb": "Use the extractor vgg19-10crop-caffe with them"}),
    ],
    ids=["resnet50-pool", "resnet152-grid", "vgg19-grid", "vgg19-10crop"],
)
def test_default_weights_equal_torchvision(architecture, theirs, refused):
    weights = getattr(torchvision.models, f"{theirs}_Weights")
    assert (architecture.default.name, architecture.default.url) == (str(weights.IMAGENET1K_V1), weights.IMAGENET1K_V1.url)
    assert list(architecture.refused) == list(refused)
    for prefix, reason in refused.items():
        assert reason in architecture.refused[prefix]
        assert reason != "IMAGENET1K_V2" or f"-{prefix}.pth" in weights.IMAGENET1K_V2.url
