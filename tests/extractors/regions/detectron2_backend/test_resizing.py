"""detectron2's models on stand-ins for detectron2: images are resized by `preprocess`, which runs beside the model."""

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
    *("", ".config", ".data", ".data.transforms", ".modeling", ".modeling.anchor_generator", ".modeling.backbone"),
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


class ResizeShortestEdge:
    """The size that detectron2's documentation promises."""

    @staticmethod
    def get_output_shape(height, width, shortest, longest):
        scale = min(shortest / min(height, width), longest / max(height, width))
        return int(height * scale + 0.5), int(width * scale + 0.5)


class ResizeTransform:
    """Resizes 8-bit images with Pillow, which gives memory that must not be written to."""

    resized = 0

    def __init__(self, height, width, rows, columns, filter_):
        self.hw, self.wh, self.filter = (height, width), (columns, rows), filter_

    def apply_image(self, image):
        assert image.shape[:2] == self.hw
        ResizeTransform.resized += 1
        return np.asarray(Image.fromarray(image).resize(self.wh, self.filter))


@pytest.fixture
def backend(monkeypatch):
    """Return what imports a module of the backend; afterwards it is as if nobody had."""
    for name in [name for name in sys.modules if name.startswith(("detectron2", f"{BACKEND}."))]:
        monkeypatch.delitem(sys.modules, name)
    for name in MODULES:
        monkeypatch.setitem(sys.modules, f"detectron2{name}", StandIn(f"detectron2{name}"))
    transforms = sys.modules["detectron2.data.transforms"]
    transforms.ResizeShortestEdge, transforms.ResizeTransform = ResizeShortestEdge, ResizeTransform
    monkeypatch.setattr(ResizeTransform, "resized", 0)
    yield lambda name: import_module(f"{BACKEND}.{name}")
    for name in [name for name in sys.modules if name.startswith(f"{BACKEND}.")]:
        del sys.modules[name]


class Model(nn.Module):
    """A detector without proposals, which keeps its input."""

    def __init__(self):
        super().__init__()
        self.roi_heads = nn.ModuleDict({"res5": nn.Conv2d(3, 8, 1)})
        self.roi_heads.res5 = self.roi_heads["res5"]
        self.inputs = []

    def preprocess_image(self, inputs):
        (values,) = inputs
        return SimpleNamespace(tensor=(values["image"][None] - 100) / 50)

    def backbone(self, values):
        self.inputs.append(values)
        return {"res4": values}


def noise(width, height):
    return Image.fromarray(np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8))


def stock_network(backend, order):
    network = backend("networks").StockNetwork(Model(), SimpleNamespace(MIN_SIZE_TEST=90, MAX_SIZE_TEST=150, FORMAT=order))
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


@pytest.mark.parametrize("order", ["RGB", "BGR"])
@pytest.mark.parametrize("size", SIZES)
def test_preprocess_resizes_once(backend, size, order):
    network, image = stock_network(backend, order), noise(*size)
    extractor = load(backend, network)
    preprocessed = extractor.preprocess(image)
    rows, columns = ResizeShortestEdge.get_output_shape(image.height, image.width, 90, 150)
    expected = np.asarray(image.resize((columns, rows), Image.Resampling.BILINEAR))
    assert np.array_equal(preprocessed.pixels.permute(1, 2, 0).numpy(), expected)
    assert preprocessed.pixels.dtype == torch.uint8
    assert ResizeTransform.resized == 1
    found = extractor.extract_columns(extractor.collate([preprocessed]))
    assert ResizeTransform.resized == 1
    (values,) = network.model.inputs
    channels = expected if order == "RGB" else expected[:, :, ::-1]
    assert np.array_equal(values[0].permute(1, 2, 0).numpy(), (channels.astype(np.float32) - 100) / 50)
    assert network.sizes == [size]
    assert (found["width"][0], found["height"][0], found["num_regions"][0]) == (*size, 0)
    assert extractor.extract([]).shape == (0, 6, 8)


def test_extract_columns_images_keep_their_sizes(backend):
    network = stock_network(backend, "BGR")
    extractor = load(backend, network)
    found = extractor.extract_columns([extractor.preprocess(noise(*size)) for size in SIZES])
    assert network.sizes == SIZES == list(zip(found["width"], found["height"], strict=True))
    assert extractor.extract([]).shape == (0, 6, 8)


def test_preprocess_too_thin_image_raises_before_resizing(backend):
    extractor = load(backend, stock_network(backend, "BGR"))
    with pytest.raises(extractors.DecodeError, match="too thin"):
        extractor.preprocess(noise(1, 400))
    assert ResizeTransform.resized == 0
