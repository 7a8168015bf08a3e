import numpy as np
import pytest
import torch
from PIL import Image

import extractors
from extractors import ExtractorRequest
from extractors.options import RegionOptions
from extractors.regions.bottom_up.network import build_detector
from extractors.regions.bottom_up.weights import detectron2_names
from tests.extractors.regions.test_faster_rcnn import check_agrees, used

pytest.importorskip("detectron2", reason="needs detectron2: extractors.catalogue says how to install it")

from extractors.regions.detectron2_backend.networks import CONFIG, read_model_config
from extractors.regions.detectron2_backend.networks import build_detectron2 as build_detectron2

NAME = "faster-rcnn-36"


def load(backend: str, weights: str = "random:0", **options):
    return extractors.load_extractor(NAME, weights=weights, regions=RegionOptions(backend=backend, **options))


@pytest.fixture(scope="module")
def backends():
    return load("detectron2"), load("torchvision")


def noise(width: int, height: int) -> Image.Image:
    coarse = np.random.default_rng(width).integers(0, 256, (height // 9 + 1, width // 9 + 1, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height))


def columns(extractor, *images: Image.Image) -> dict[str, np.ndarray]:
    return extractor.extract_columns(extractor.collate([extractor.preprocess(image) for image in images]))


def check_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Check that the regions of one image are the same, in any order."""
    for name in ("width", "height"):
        assert found[name].tolist() == expected[name].tolist()
    check_agrees(found, used(expected, 0), tolerance=1e-4)


def test_detectron2_names_are_those_of_milvlg():
    with torch.device("meta"):
        expected, found = build_detector().state_dict(), build_detectron2(read_model_config(CONFIG)).state_dict()
    renamed = {theirs: expected[ours] for ours, theirs in detectron2_names().items()}
    assert {name: tensor.shape for name, tensor in renamed.items()} == {name: tensor.shape for name, tensor in found.items()}
    assert len(renamed) == len(expected) - 1  # the anchors
    for ours, theirs in (
        ("backbone.conv1.weight", "backbone.stem.conv1.weight"),
        ("backbone.bn1.running_var", "backbone.stem.conv1.norm.running_var"),
        ("backbone.layer3.22.conv3.weight", "backbone.res4.22.conv3.weight"),
        ("backbone.layer1.0.downsample.1.bias", "backbone.res2.0.shortcut.norm.bias"),
        ("head.layer4.0.downsample.0.weight", "roi_heads.res5.0.shortcut.weight"),
        ("head.layer4.2.bn2.running_mean", "roi_heads.res5.2.conv2.norm.running_mean"),
        ("rpn.scores.bias", "proposal_generator.rpn_head.objectness_logits.bias"),
        ("head.attribute_embedding.weight", "roi_heads.box_predictor.cls_embed.weight"),
        ("head.attribute_hidden.bias", "roi_heads.box_predictor.attr_linear1.bias"),
    ):
        assert renamed[theirs] is expected[ours]


@pytest.mark.slow
def test_extract_thin_image_equals_torchvision_backend(backends):
    found, expected = (columns(extractor, noise(20, 500)) for extractor in backends)
    check_same(found, expected)
    assert (found["width"][0], found["height"][0]) == (20, 500)


@pytest.mark.slow
@pytest.mark.parametrize("photo", ["voc_000456.jpg", "china.jpg"])
def test_extract_photograph_equals_torchvision_backend(backends, photos, photo):
    image = extractors.decode_image((photos / "images" / photo).read_bytes())
    found, expected = (columns(extractor, image) for extractor in backends)
    assert expected["num_regions"][0] == 36
    check_same(found, expected)


@pytest.mark.slow
def test_extract_uses_anchors_of_weights(tmp_path):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        state = build_detector().state_dict()
    state["rpn.anchors"] = state["rpn.anchors"] * 0.7 + 3
    torch.save(state, tmp_path / "other.pth")
    image = noise(333, 31)
    found, expected = (columns(load(backend, str(tmp_path / "other.pth")), image) for backend in ("detectron2", "torchvision"))
    check_same(found, expected)
    usual = columns(load("torchvision"), image)
    assert usual["boxes"].tobytes() != expected["boxes"].tobytes()


@pytest.mark.slow
def test_describe_records_backend():
    found, expected = (
        ExtractorRequest(NAME, weights="random:0", regions=RegionOptions(backend=name)).describe()
        for name in ("detectron2", "torchvision")
    )
    assert found.parameters == expected.parameters | {"backend": "detectron2"}
    assert (found.spec, found.kind, found.batch_size) == (expected.spec, expected.kind, expected.batch_size)
    assert found.fingerprint != expected.fingerprint
