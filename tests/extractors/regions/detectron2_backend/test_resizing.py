"""The backend on stand-ins for detectron2: sizes of images, and resizing on the device."""

import sys
from importlib import import_module
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import extractors
from extractors.base import Description
from extractors.options import ExtractorOptions, RegionOptions
from schemas.features import FeatureSpec

BACKEND = "extractors.regions.detectron2_backend"
MODULES = (
    *("", ".config", ".modeling", ".modeling.anchor_generator", ".modeling.backbone"),
    *(".modeling.backbone.resnet", ".modeling.proposal_generator", ".modeling.proposal_generator.rpn", ".modeling.roi_heads"),
    *(".modeling.roi_heads.fast_rcnn", ".modeling.roi_heads.roi_heads", ".structures"),
)
SIZES = [(200, 120), (71, 100), (40, 400), (90, 90)]


class StandIn(ModuleType):
    """A module with every class that is asked for; registries return what is registered."""

    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        registry = SimpleNamespace(register=lambda: lambda registered: registered)
        found = registry if name.endswith("REGISTRY") else type(name, (), {})
        setattr(self, name, found)
        return found


@pytest.fixture
def backend(monkeypatch):
    """Return what imports a module of the backend; afterwards it is as if nobody had."""
    for name in [name for name in sys.modules if name.startswith(("detectron2", f"{BACKEND}."))]:
        monkeypatch.delitem(sys.modules, name)
    for name in MODULES:
        monkeypatch.setitem(sys.modules, f"detectron2{name}", StandIn(f"detectron2{name}"))
    yield lambda name: import_module(f"{BACKEND}.{name}")
    for name in [name for name in sys.modules if name.startswith(f"{BACKEND}.")]:
        del sys.modules[name]


class Model(nn.Module):
    """A detector without proposals."""

    def __init__(self):
        super().__init__()
        self.roi_heads = nn.ModuleDict({"res5": nn.Conv2d(3, 8, 1)})
        self.roi_heads.res5 = self.roi_heads["res5"]

    def backbone(self, values):
        return {"res4": values}


def noise(width, height):
    return Image.fromarray(np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8))


def network_without_proposals(backend):
    network = backend("networks").VisualGenomeNetwork(Model())
    network.sizes = []

    def propose(maps, width, height):
        network.sizes.append((width, height))
        return torch.zeros(0, 4)

    network.propose = propose
    network.classify = lambda features: (torch.zeros(0, 21), torch.zeros(0, 2))
    return network


def load(backend, network):
    settings = ExtractorOptions(FeatureSpec("stand-in", (6, 8)), "fp32", regions=RegionOptions(4, 6))
    description = Description(settings.spec, {}, kind="regions", classes=20)
    return backend("extractor").Detectron2Regions(description, settings, network, torch.device("cpu"))


def test_extract_columns_images_keep_their_sizes(backend):
    network = network_without_proposals(backend)
    extractor = load(backend, network)
    found = extractor.extract_columns([extractor.preprocess(noise(*size)) for size in SIZES])
    assert network.sizes == SIZES == list(zip(found["width"], found["height"], strict=True))
    assert extractor.extract([]).shape == (0, 6, 8)


def test_preprocess_too_thin_image_raises(backend):
    extractor = load(backend, network_without_proposals(backend))
    with pytest.raises(extractors.DecodeError, match="too thin"):
        extractor.preprocess(noise(1, 400))


def test_visual_genome_network_pixels_are_not_resized(backend):
    network, image = backend("networks").VisualGenomeNetwork(Model()), noise(50, 40)
    pixels = network.pixels(image)
    assert np.array_equal(pixels.permute(1, 2, 0).numpy(), np.asarray(image))
    assert network.prepare(pixels, torch.device("cpu")).shape == (1, 3, 600, 750)
