"""Extractors of whole images and tokens on a fake GPU: nothing mixes devices, and what a batch may cost is bounded.

The budgets are what is reached now: operations that start kernels, for a batch and for each image in it, and waits of the host.
Where one is exceeded, the message names the operations and lines.
"""

import numpy as np
import pytest
import torch
from torch import nn

from extractors import ExtractorRequest
from extractors.base import Description, Extractor
from extractors.images.preprocessing import Normalizer
from extractors.options import ExtractorOptions
from extractors.regions import faster_rcnn
from extractors.regions.bottom_up.preprocessing import send
from extractors.tokens.request import TextRequest
from extractors.weights.resolve import Weights
from extractors.whole_image import conv_grids, resnet50, timm_models, vgg19
from tests.fake_gpu import fake_gpu
from tests.tiny_bert import make_tiny_bert

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
# Launches of a batch whatever its size and of each image, in float32 and in 16 bits, where layers or values are cast.
DENSE = {
    "resnet50-pool": ((60, 62), 0),
    "vgg19-10crop": ((45, 46), 6),
    "vgg19-10crop-caffe": ((46, 47), 6),
    "vgg19-grid": ((26, 28), 0),
    "resnet152-grid": ((161, 163), 0),
    "timm:resnet18": ((27, 54), 0),
    "timm:vit_tiny_patch16_224": ((141, 166), 0),
}
QUICK = ("resnet50-pool", "vgg19-10crop-caffe", "vgg19-grid", "timm:resnet18")
SIDES_HW = {
    "vgg19-10crop": (256, 300),
    "vgg19-10crop-caffe": (256, 300),
    "vgg19-grid": (448, 448),
    "resnet152-grid": (448, 448),
}


def pixels(count, height, width):
    return torch.randint(0, 256, (count, 3, height, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def load(name, precision, device):
    """Load an extractor whose weights are zeros: neither drawn nor hashed, which takes seconds."""
    spec = ExtractorRequest(name).spec()
    with torch.device("meta"):
        if name.startswith("timm:"):
            module, model = timm_models, timm_models._create_model(spec.name.removeprefix("timm:"))
        elif name == "resnet50-pool":
            module, model = resnet50, resnet50.ARCHITECTURE.build()
        elif "10crop" in name:
            module, model = vgg19, vgg19.VARIANTS[name].architecture.build()
        else:
            module, model = conv_grids, conv_grids.ARCHITECTURES[name].build()
    weights = Weights({key: torch.zeros(value.shape, dtype=value.dtype) for key, value in model.state_dict().items()})
    weights.__dict__["sha256"] = "0" * 64
    return module.load(ExtractorOptions(spec, precision), weights, device)


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        pytest.param(name, precision, marks=[] if name in QUICK and precision in ("fp32", "bf16") else pytest.mark.slow)
        for name in DENSE
        for precision in ("fp32", "tf32", "bf16", "fp16")
    ],
)
def test_extract_launches_stay_within_budget(name, precision):
    (plain, cast), each = DENSE[name]
    with fake_gpu(hollow=True) as gpu:
        extractor = load(name, precision, GPU)
        for count in (1, 3):
            batch = pixels(count, *SIDES_HW.get(name, (224, 224)))
            gpu.reset()
            found = extractor.extract(extractor.collate(list(batch)))
            assert (found.shape, found.dtype) == ((count, *extractor.spec.shape), np.float32)
            assert gpu.launches.total() <= (cast if precision.endswith("16") else plain) + each * count, gpu.report()
            # The host waits for the features, and for nothing else.
            assert sum(gpu.waits.values()) == 1, gpu.report()
        gpu.reset()
        empty = extractor.extract(batch[:0])
        assert (empty.shape, empty.dtype) == ((0, *extractor.spec.shape), np.float32)
        assert not gpu.launches


def test_out_of_memory_halves_the_images(monkeypatch):
    sizes = []
    with fake_gpu(hollow=True):
        extractor = load("vgg19-10crop-caffe", "fp32", GPU)
        run = extractor._forward

        def run_out(images):
            sizes.append(len(images))
            if len(images) > 1:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory")
            return run(images)

        monkeypatch.setattr(extractor, "_forward", run_out)
        batch = extractor.collate(list(pixels(2, *SIDES_HW["vgg19-10crop-caffe"])))
        assert len(extractor.extract(batch)) == 2
    assert sizes == [2, 1, 1]


def normalized(device):
    levels = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(2, 3, -1, -1)
    return Normalizer(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225), device=device)(levels.to(device))


def mean_of_crops(device):
    extractor = vgg19.VGG19TenCrop.__new__(vgg19.VGG19TenCrop)  # Without the network, which is large.
    Extractor.__init__(extractor, Description(ExtractorRequest("vgg19-10crop").spec(), {}))
    extractor._connected, extractor._keep_crops = nn.Identity(), False
    return extractor._connect((torch.rand(2 * 10, 4096, generator=torch.Generator().manual_seed(0)) * 1000).to(device))


def scaled_boxes(device):
    boxes = torch.rand(1, 300, 4, generator=torch.Generator().manual_seed(0)) * 600
    image = send(torch.zeros(3, 333, 500, dtype=torch.uint8), device)
    return boxes.to(device) / faster_rcnn._scales([image])[:, None, None]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("compute", [normalized, mean_of_crops, scaled_boxes])
def test_divisions_equal_cpu(compute):
    """CUDA divides by a number of the host as it multiplies by its reciprocal, which gives other last bits."""
    assert torch.equal(compute(GPU).cpu(), compute(CPU))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "launches", "tolerance"), [("fp32", 33, 1e-5), ("tf32", 33, 1e-5), ("bf16", 68, 0.1), ("fp16", 68, 0.02)]
)
def test_tokens_stay_within_budget_and_equal_cpu(precision, launches, tolerance, tmp_path):
    request = TextRequest(str(make_tiny_bert(tmp_path / "bert")), precision=precision)
    captions = [["a", "dog"], ["a", "man"], ["ein", "hund", "running"]]
    on_cpu = TextRequest(request.model).load("cpu")
    expected = on_cpu.extract(on_cpu.read(captions)[0])
    with fake_gpu() as gpu:
        extractor = request.load("cuda")
        parts, _ = extractor.read(captions)
        gpu.reset()
        found = extractor.extract(parts)
        assert gpu.launches.total() <= 2 * launches, gpu.report()
        assert gpu.waits.total() == 2, gpu.report()
        assert extractor.extract([]) == []
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance)
