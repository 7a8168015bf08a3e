import numpy as np
import pytest
import torch
from torchvision.ops import FrozenBatchNorm2d

from extractors.regions.bottom_up.network import (
    Backbone,
    RegionProposals,
    build_detector,
    fold_frozen_norms,
    pool_regions,
    suppress,
)
from tests.extractors.regions import reference_detector


@pytest.fixture(scope="module")
def detector():
    torch.manual_seed(3)
    return build_detector().eval().requires_grad_(False)


def proposals(rpn, maps, width, height, scale):
    """Return the proposals of one image, [P, 4]."""
    boxes, are_kept = suppress(*rpn.propose(maps, width, height, torch.tensor([scale])))
    return boxes[0, : int(are_kept.sum())]


@pytest.mark.parametrize(
    ("height", "width", "rows", "columns"),
    # Half, rounded up; half of that, rounded up without padding; then twice half, rounded up.
    [(74, 33, 5, 2), (66, 33, 4, 2), (10, 1000, 1, 63), (33, 49, 2, 3), (35, 16, 3, 1), (75, 101, 5, 7)],
)
def test_backbone_equals_reference(detector, height, width, rows, columns):
    image = torch.randn(1, 3, height, width) * 50
    with torch.inference_mode():
        expected = reference_detector.backbone(detector.state_dict(), image)
        found = detector.backbone(image)
    assert found.shape == (1, 1024, rows, columns)
    assert expected.std() > 0.01
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.max()))


@pytest.mark.slow
def test_fold_frozen_norms_is_close_to_unfolded(detector):
    torch.manual_seed(4)
    backbone = Backbone().eval().requires_grad_(False)
    backbone.load_state_dict(detector.backbone.state_dict())
    for name, buffer in backbone.named_buffers():
        if "running_var" in name:
            buffer.uniform_(0.5, 2)
        elif "running_mean" in name:
            buffer.normal_()
    image = torch.randn(1, 3, 64, 80) * 50
    with torch.inference_mode():
        expected = backbone(image)
        fold_frozen_norms(backbone)
        found = backbone(image)
    assert not any(isinstance(module, FrozenBatchNorm2d) for module in backbone.modules())
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5 * float(expected.max()))


def test_pool_regions_equals_reference():
    generator = np.random.default_rng(0)
    maps = torch.randn(2, 5, 20, 30)
    corners = generator.uniform(0, 1, (60, 2, 2)) * (479, 319)
    corners[:20] = np.round(corners[:20] / 8) * 8  # halves of a cell, where rounding matters
    boxes = np.concatenate((corners.min(axis=1), corners.max(axis=1)), axis=1).astype(np.float32)
    found = pool_regions(maps, torch.from_numpy(boxes).view(2, 30, 4))
    for number, (box, pooled) in enumerate(zip(boxes, found, strict=True)):
        assert torch.equal(pooled, reference_detector.roi_pool(maps[number // 30], box))


def test_propose_equals_reference(detector):
    torch.manual_seed(5)
    maps = torch.randn(1, 1024, 8, 13).relu_()
    state = detector.state_dict()
    with torch.inference_mode():
        expected = reference_detector.propose(state, maps, 199, 121, 0.5)
        found = proposals(detector.rpn, maps, 199, 121, 0.5).numpy()
    assert len(found) == len(expected) > 50
    distances = np.abs(found[:, None] - expected).max(axis=2)
    assert distances.min(axis=1).max() < 1e-2
    assert sorted(distances.argmin(axis=1)) == list(range(len(expected)))


def test_propose_images_of_a_batch_are_independent(detector):
    torch.manual_seed(6)
    maps, scales = torch.randn(3, 1024, 6, 7).relu_(), torch.tensor([0.5, 3.0, 6.0])
    with torch.inference_mode():
        boxes, are_kept = suppress(*detector.rpn.propose(maps, 110, 95, scales))
        counts = are_kept.sum(dim=1).tolist()
        for i, (scale, count) in enumerate(zip(scales.tolist(), counts, strict=True)):
            alone = proposals(detector.rpn, maps[i : i + 1], 110, 95, scale)
            assert len(alone) == count
            torch.testing.assert_close(boxes[i, :count], alone, rtol=0, atol=1e-3)
    assert counts[0] > counts[1] > counts[2] == 0  # 6 * 16 pixels are more than the height


def test_propose_uses_anchors_of_checkpoint(detector):
    rpn = RegionProposals().eval().requires_grad_(False)
    rpn.load_state_dict(detector.rpn.state_dict() | {"anchors": torch.full((12, 4), 3.0) + torch.tensor([0.0, 0, 60, 40])})
    for layer in (rpn.deltas, rpn.scores):
        layer.weight.zero_()
    boxes = proposals(rpn, torch.zeros(1, 1024, 1, 1), 600, 600, 1.0)
    assert boxes.tolist() == [[3, 3, 64, 44]]  # decoded with zeros: one longer


def test_propose_small_boxes_are_dropped(detector):
    assert proposals(detector.rpn, torch.randn(1, 1024, 3, 3), 48, 48, 3.0).shape == (0, 4)
    assert proposals(detector.rpn, torch.randn(1, 1024, 3, 3), 49, 48, 3.0).shape == (0, 4)
    assert len(proposals(detector.rpn, torch.randn(1, 1024, 4, 4), 49, 49, 3.0)) > 0


def test_classify_equals_reference_and_attributes_depend_on_class(detector):
    features = torch.rand(6, 2048)
    state = detector.state_dict()
    with torch.inference_mode():
        classes, attributes = detector.head.classify(features)
        expected = reference_detector.classify(state, features)
    np.testing.assert_allclose(classes.numpy(), expected[0], rtol=0, atol=1e-6)
    np.testing.assert_allclose(attributes.numpy(), expected[1], rtol=0, atol=1e-6)
    detector.head.attribute_embedding.weight[int(classes[0].argmax())] += 1
    changed = detector.head.classify(features)[1]
    detector.head.load_state_dict({name.removeprefix("head."): state[name] for name in state if name.startswith("head.")})
    assert not torch.allclose(changed[0], attributes[0], atol=1e-3)
