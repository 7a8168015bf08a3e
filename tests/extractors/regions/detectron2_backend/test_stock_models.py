import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import extractors
from extractors import ExtractorRequest
from extractors.options import RegionOptions
from schemas.errors import InputError
from tests.extractors.regions import reference_detector
from tests.threads import threads_of_torch

pytest.importorskip("detectron2", reason="needs detectron2: extractors.catalogue says how to install it")

from detectron2.config import get_cfg
from detectron2.engine import DefaultPredictor
from detectron2.modeling import build_model

from tests.extractors.regions.detectron2_backend.test_extractor import noise

# A ResNet C4 with few channels, so that a forward pass takes milliseconds.
BASE = """
VERSION: 2
MODEL:
  RESNETS: {DEPTH: 50, STEM_OUT_CHANNELS: 8, WIDTH_PER_GROUP: 8, RES2_OUT_CHANNELS: 16}
  ROI_HEADS: {NAME: Res5ROIHeads, NUM_CLASSES: 20}
  RPN: {PRE_NMS_TOPK_TEST: 500, POST_NMS_TOPK_TEST: 60}
  ANCHOR_GENERATOR: {SIZES: [[16, 32, 64]]}
"""
CONFIG = """
_BASE_: base.yaml
MODEL:
  WEIGHTS: elsewhere.pth
  PIXEL_MEAN: [100.0, 110.0, 120.0]
  PIXEL_STD: [50.0, 60.0, 70.0]
INPUT: {FORMAT: %s, MIN_SIZE_TEST: 90, MAX_SIZE_TEST: 150}
OUTPUT_DIR: /somewhere
"""
KEPT = RegionOptions(min_regions=4, max_regions=20)


@pytest.fixture(params=["BGR", "RGB"])
def config(request, tmp_path) -> Path:
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "mine.yaml").write_text(CONFIG % request.param)
    return tmp_path / "mine.yaml"


@pytest.fixture
def checkpoint(config) -> Path:
    """A checkpoint as detectron2's trainer writes it; classes differ from region to region."""
    cfg = get_cfg()
    cfg.merge_from_file(str(config))
    cfg.MODEL.DEVICE = "cpu"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        state = build_model(cfg).state_dict()
    for key, value in state.items():
        if key.endswith(".conv3.norm.weight"):
            value *= 0.2
    scores = state["roi_heads.box_predictor.cls_score.weight"]
    scores[:] = (scores - scores.mean(dim=1, keepdim=True)) * 100
    state["roi_heads.box_predictor.cls_score.bias"][4] = -2  # else it would be the class of every region
    path = config.with_name("model_final.pth")
    torch.save({"model": state, "optimizer": {"state": {}}, "iteration": 7}, path)
    return path


def name(config: Path, weights: Path | str) -> str:
    return f"detectron2:{config}+{weights}"


def predicted(config: Path, checkpoint: Path, image: Image.Image) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return proposals in pixels of the image, features and class probabilities (background first) of detectron2's predictor."""
    cfg = get_cfg()
    cfg.merge_from_file(str(config))
    cfg.MODEL.DEVICE, cfg.MODEL.WEIGHTS = "cpu", str(checkpoint)
    predictor = DefaultPredictor(cfg)
    seen = {}
    model = predictor.model
    model.proposal_generator.register_forward_hook(lambda _, inputs, found: seen.update(proposals=found[0][0]))
    head = model.roi_heads.box_predictor
    head.register_forward_hook(lambda _, inputs, found: seen.update(features=inputs[0], scores=found[0]))
    predictor(np.array(image)[:, :, ::-1])
    proposals = seen["proposals"]
    height, width = proposals.image_size
    boxes = proposals.proposal_boxes.tensor.numpy() * np.tile([image.width / width, image.height / height], 2)
    classes = seen["scores"].softmax(1).numpy()
    return boxes, seen["features"].numpy(), np.concatenate([classes[:, -1:], classes[:, :-1]], axis=1)


@pytest.mark.parametrize("size", [(200, 120), (71, 100), (40, 400)])
def test_extract_equals_detectron2_predictor(config, checkpoint, size):
    image = noise(*size)
    boxes, features, classes = predicted(config, checkpoint, image)
    rows = reference_detector.choose(boxes, classes, KEPT.min_regions, KEPT.max_regions, KEPT.score_threshold)
    extractor = extractors.load_extractor(name(config, checkpoint), regions=KEPT)
    found = extractor.extract_columns(extractor.collate([extractor.preprocess(image)]))
    count = found["num_regions"][0]
    assert (found["width"][0], found["height"][0], count) == (*size, len(rows))
    assert 4 <= count <= 20
    np.testing.assert_allclose(found["boxes"][0, :count], boxes[rows], atol=1e-3)
    np.testing.assert_allclose(found["features"][0, :count], features[rows], rtol=1e-4, atol=1e-4 * features.max())
    assert found["class_ids"][0, :count].tolist() == (classes[rows, 1:].argmax(axis=1) + 1).tolist()
    np.testing.assert_allclose(found["class_scores"][0, :count], classes[rows, 1:].max(axis=1), atol=1e-5)
    assert len(set(found["class_ids"][0, :count])) > 1
    assert not found["attribute_ids"].any()
    assert not found["attribute_scores"].any()
    assert not found["features"][0, count:].any()
    assert found["features"].shape == (1, 20, 128)


def test_extract_does_not_depend_on_threads_and_batch(config, checkpoint):
    extractor = extractors.load_extractor(name(config, checkpoint), regions=KEPT)
    batch = extractor.collate([extractor.preprocess(noise(*size)) for size in ((120, 90), (60, 150), (99, 99))])
    expected = extractor.extract_columns(batch)
    for threads in (1, 2):
        with threads_of_torch(threads):
            for i, pixels in enumerate(batch):
                found = extractor.extract_columns([pixels])
                assert all(found[column].tobytes() == expected[column][i : i + 1].tobytes() for column in expected), threads
    assert extractor.extract([]).shape == (0, 20, 128)


def test_load_pickle_of_arrays_equals_checkpoint(config, checkpoint, tmp_path):
    state = torch.load(checkpoint, weights_only=True)["model"]
    path = tmp_path / "zoo.pkl"
    path.write_bytes(pickle.dumps({"model": {k: v.numpy() for k, v in state.items()}, "__author__": "somebody"}, protocol=2))
    pixels = extractors.load_extractor(name(config, checkpoint), regions=KEPT).preprocess(noise(99, 77))
    found = [extractors.load_extractor(name(config, weights), regions=KEPT).extract([pixels]) for weights in (checkpoint, path)]
    assert found[0].tobytes() == found[1].tobytes()


def test_describe_depends_on_config_and_weights_only(config, checkpoint, tmp_path):
    description = ExtractorRequest(name(config, checkpoint)).describe()
    assert (description.kind, description.spec.name, description.spec.shape) == ("regions", "detectron2:mine-36", (36, 128))
    assert ExtractorRequest(name(config, checkpoint), regions=KEPT).describe().spec.name == "detectron2:mine-4-20"
    assert ExtractorRequest(name(config, checkpoint)).spec().shape == (36, 128)
    assert not description.parameters["untrained"]
    order = description.parameters["config"]["INPUT"]["FORMAT"]
    assert description.parameters["config"]["INPUT"] == {"FORMAT": order, "MIN_SIZE_TEST": 90, "MAX_SIZE_TEST": 150}
    text = json.dumps(description.parameters)
    assert not any(path in text for path in ("elsewhere", "somewhere", str(tmp_path)))
    assert extractors.load_extractor(name(config, checkpoint)).fingerprint == description.fingerprint
    moved = tmp_path / "a+b.d"
    moved.mkdir()
    for file in ("base.yaml", "mine.yaml", "model_final.pth"):
        (moved / file).write_bytes((tmp_path / file).read_bytes())
    request = ExtractorRequest(name(moved / "mine.yaml", moved / "model_final.pth"))
    assert request.describe().fingerprint == description.fingerprint
    (moved / "base.yaml").write_text(BASE.replace("PRE_NMS_TOPK_TEST: 500", "PRE_NMS_TOPK_TEST: 400"))
    assert request.describe().fingerprint != description.fingerprint
    assert ExtractorRequest(name(config, "random:5")).describe().parameters["untrained"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("MODEL: {BUA: {CAFFE: true}}", "not a detectron2 config.*BUA"),
        ("MODEL: {DEVICE: !!python/object/apply:os.getcwd []}", "not a detectron2 config.*ConstructorError"),
    ],
)
def test_spec_broken_config_raises(tmp_path, text, message):
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=f"(?s)the config file .*broken.yaml.* is {message}"):
        ExtractorRequest(name(path, "random:0")).spec()


def test_describe_weights_of_other_model_raise(config, checkpoint):
    content = torch.load(checkpoint, weights_only=True)
    del content["model"]["backbone.stem.conv1.weight"]
    torch.save(content, checkpoint)
    with pytest.raises(InputError, match=r"not this model's: 1 missing: backbone\.stem\.conv1\.weight"):
        ExtractorRequest(name(config, checkpoint)).describe()


def test_describe_checkpoint_with_other_anchors_raises(config, checkpoint):
    content = torch.load(checkpoint, weights_only=True)
    corners = [(s / r**0.5 / 2, s * r**0.5 / 2) for s in (16, 32, 64) for r in (0.5, 1, 2)]
    anchors = torch.tensor([(-x, -y, x, y) for x, y in corners])
    expected = ExtractorRequest(name(config, checkpoint)).describe()
    content["model"]["proposal_generator.anchor_generator.cell_anchors.0"] = anchors
    content["model"]["pixel_mean"] = torch.zeros(3, 1, 1)
    torch.save(content, checkpoint)
    found = ExtractorRequest(name(config, checkpoint)).describe()
    assert found.parameters | {"weights": None} == expected.parameters | {"weights": None}
    anchors *= 2
    torch.save(content, checkpoint)
    with pytest.raises(InputError, match=r"trained with anchors .*set MODEL\.ANCHOR_GENERATOR to its value in training"):
        ExtractorRequest(name(config, checkpoint)).describe()
