from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torchvision

from extractors.regions import boxes as boxes_module
from extractors.regions.boxes import (
    anchor_grid,
    apply_deltas,
    best_scores_after_nms,
    cell_anchors,
    clip,
    first_true,
    iou,
    is_larger,
    nms,
)
from tests.extractors.regions import reference_detector
from tests.extractors.regions.reference_detector import best_scores
from tests.fake_gpu import fake_gpu

LEGACY = [
    *((-38, -16, 53, 31), (-84, -40, 99, 55), (-176, -88, 191, 103), (-360, -184, 375, 199)),
    *((-24, -24, 39, 39), (-56, -56, 71, 71), (-120, -120, 135, 135), (-248, -248, 263, 263)),
    *((-14, -36, 29, 51), (-36, -80, 51, 95), (-80, -168, 95, 183), (-168, -344, 183, 359)),
]
"""Anchors as Caffe's code computes them, a line for each ratio."""


def random_boxes(generator, count, *, most=200.0, step=None):
    corners = generator.uniform(0, most, (count, 2, 2))
    if step:
        corners = np.round(corners / step) * step
    return torch.from_numpy(np.concatenate((corners.min(axis=1), corners.max(axis=1)), axis=1).astype(np.float32))


def test_cell_anchors_equal_caffe():
    assert cell_anchors().tolist() == [list(map(float, anchor)) for anchor in LEGACY]
    assert cell_anchors().dtype == torch.float32


def test_anchor_grid_order_is_row_column_anchor():
    grid = anchor_grid(cell_anchors(), rows=2, columns=3)
    expected = [
        [left + 16 * x, top + 16 * y, right + 16 * x, bottom + 16 * y]
        for y in range(2)
        for x in range(3)
        for left, top, right, bottom in LEGACY
    ]
    assert grid.tolist() == expected


def test_apply_deltas_equals_formula_in_float64():
    generator = np.random.default_rng(0)
    anchors, deltas = random_boxes(generator, 200), torch.from_numpy(generator.normal(size=(200, 4)).astype(np.float32))
    for (left, top, right, bottom), (dx, dy, dw, dh), found in zip(
        anchors.tolist(), deltas.tolist(), apply_deltas(anchors, deltas).tolist(), strict=True
    ):
        wide, tall = right - left + 1, bottom - top + 1
        x, y = left + wide / 2 + dx * wide, top + tall / 2 + dy * tall
        expected = (
            x - math.exp(dw) * wide / 2,
            y - math.exp(dh) * tall / 2,
            x + math.exp(dw) * wide / 2,
            y + math.exp(dh) * tall / 2,
        )
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-3)


def test_apply_deltas_limits_growth():
    (found,) = apply_deltas(torch.tensor([[0.0, 0.0, 15.0, 15.0]]), torch.tensor([[0.0, 0.0, 50.0, 4.0]])).tolist()
    assert found[2] - found[0] == pytest.approx(1000, rel=1e-5)
    assert found[3] - found[1] == pytest.approx(16 * math.exp(4), rel=1e-5)


def test_clip_limits_to_outermost_pixels():
    boxes = torch.tensor([[-5.0, -6.0, 700.0, 800.0], [700.0, 800.0, 900.0, 900.0], [1.5, 2.5, 3.5, 4.5]])
    assert clip(boxes, width=600, height=500).tolist() == [[0, 0, 599, 499], [599, 499, 599, 499], [1.5, 2.5, 3.5, 4.5]]


def test_is_larger_side_of_exactly_the_limit_is_false():
    boxes = torch.tensor([[0.0, 0, 15, 30], [0, 0, 15.001, 30], [0, 0, 30, 15], [9, 9, 9, 40], [9, 9, 40, 8]])
    assert is_larger(boxes, 16).tolist() == [False, True, False, False, False]
    assert is_larger(boxes, -100).tolist() == [True, True, True, False, False]  # corners in order, whatever the side


@pytest.mark.parametrize("step", [None, 8.0])
def test_iou_equals_float32_loops(step):
    generator = np.random.default_rng(1)
    boxes, others = random_boxes(generator, 60, step=step), random_boxes(generator, 50, step=step)
    found = iou(boxes, others).numpy()
    one, zero = np.float32(1), np.float32(0)
    for i, a in enumerate(boxes.numpy()):
        for j, b in enumerate(others.numpy()):
            shared = max(zero, min(a[2], b[2]) - max(a[0], b[0]) + one) * max(zero, min(a[3], b[3]) - max(a[1], b[1]) + one)
            area, other = (a[2] - a[0] + one) * (a[3] - a[1] + one), (b[2] - b[0] + one) * (b[3] - b[1] + one)
            assert found[i, j] == shared / (area + other - shared)


@pytest.fixture(params=["cpu", "cuda"])
def device(request):
    """Both ways: that of a CPU, and that of a GPU on a fake one."""
    if request.param == "cpu":
        yield torch.device("cpu")
        return
    with fake_gpu():
        yield torch.device("cuda", 0)


def keep(boxes, threshold, most, device):
    """Suppress the boxes of one image, all of which are usable; returns the positions of those kept."""
    boxes = boxes[None].to(device)
    positions, counts = nms(boxes, torch.ones_like(boxes[:, :, 0], dtype=torch.bool), threshold, most)
    return positions.cpu()[0, : int(counts)].tolist()


def best(boxes, scores, threshold, device):
    """Suppress the boxes of one image by class."""
    return best_scores_after_nms(boxes[None].to(device), scores[None].to(device), threshold).cpu()[0]


def random_case(generator, *, boxes, classes):
    """Draw boxes and scores, sometimes on a grid and from few levels, so that overlaps and scores tie."""
    step = generator.choice([0, 4, 16])
    found = random_boxes(generator, boxes, most=120, step=step).numpy()
    levels = generator.choice([0, 2, 5])
    scores = generator.random((boxes, classes), dtype=np.float32)
    return found, (np.round(scores * levels) / levels).astype(np.float32) if levels else scores


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_best_scores_after_nms_equals_sequential_nms(device, seed):
    generator = np.random.default_rng(seed)
    for _ in range(250 if device.type == "cpu" else 80):
        boxes, scores = random_case(generator, boxes=int(generator.integers(1, 40)), classes=int(generator.integers(1, 5)))
        threshold = float(generator.choice([0.3, 0.5, 0.7, 1 / 3]))
        expected = np.zeros(len(boxes), np.float32)
        for number in range(scores.shape[1]):
            kept = reference_detector.nms(boxes, scores[:, number], threshold)
            expected[kept] = np.maximum(expected[kept], scores[kept, number])
        found = best(torch.from_numpy(boxes), torch.from_numpy(scores), threshold, device)
        np.testing.assert_array_equal(found.numpy(), expected)


@pytest.mark.parametrize("seed", range(4))
def test_nms_blocks_equal_sequential_nms(device, seed, monkeypatch):
    monkeypatch.setitem(boxes_module._BLOCK, "cuda", 150)
    generator = np.random.default_rng(100 + seed)
    for _ in range(20 if device.type == "cpu" else 4):
        boxes, scores = random_case(generator, boxes=int(generator.integers(1, 500)), classes=1)
        most = int(generator.integers(1, 60))
        order = np.argsort(-scores[:, 0], kind="stable")
        expected = reference_detector.nms(boxes, scores[:, 0], 0.7)[:most]
        kept = keep(torch.from_numpy(boxes[order]), 0.7, most, device)
        assert order[kept].tolist() == expected


def test_nms_images_of_a_batch_are_independent(device, monkeypatch):
    """Images of different numbers of boxes, padded with boxes that would cover others if they counted."""
    monkeypatch.setitem(boxes_module._BLOCK, "cuda", 40)
    generator = np.random.default_rng(6)
    sizes = (100, 30, 0, 1, 77)
    boxes, scores = torch.zeros(5, 100, 4), torch.full((5, 100, 7), -1.0)
    boxes[:, :] = torch.tensor([0.0, 0, 120, 120])
    for i, size in enumerate(sizes):
        drawn = random_case(generator, boxes=size, classes=7)
        boxes[i, :size], scores[i, :size] = map(torch.from_numpy, drawn)
    usable = scores[:, :, 0] >= 0
    positions, counts = (found.cpu() for found in nms(boxes.to(device), usable.to(device), 0.5, 25))
    surviving = best_scores_after_nms(boxes.to(device), scores.to(device), 0.3).cpu()
    assert (surviving[~usable] <= 0).all()
    for i, size in enumerate(sizes):
        assert positions[i, : counts[i]].tolist() == keep(boxes[i, :size], 0.5, 25, torch.device("cpu"))
        assert torch.equal(surviving[i, :size], best(boxes[i, :size], scores[i, :size], 0.3, torch.device("cpu")))


def test_nms_long_chain_converges(device):
    """Each box covers the next one alone, so that every second one is kept, and whether one is hangs on all before it."""
    count = 61
    boxes = torch.arange(count)[:, None] * 4.0 + torch.tensor([0.0, 0, 9, 9])
    scores = torch.linspace(1, 0.5, count)[:, None]
    assert keep(boxes, 0.2, count, device) == [*range(0, count, 2)]
    expected = torch.where(torch.arange(count) % 2 == 0, scores[:, 0], 0)
    assert torch.equal(best(boxes, scores, 0.2, device), expected)


def test_first_true_positions_and_counts():
    chosen = torch.tensor([[0, 1, 0, 1, 1], [0, 0, 0, 0, 1], [0, 0, 0, 0, 0]], dtype=torch.bool)
    positions, counts = first_true(chosen, 2)
    assert (positions.shape, counts.tolist()) == ((3, 2), [2, 1, 0])
    assert [row[:count].tolist() for row, count in zip(positions, counts, strict=True)] == [[1, 3], [4], []]
    assert first_true(chosen, 9)[0].shape == (3, 5)


def test_best_scores_after_nms_300_boxes_100_classes_equals_reference(device):
    generator = np.random.default_rng(5)
    boxes, scores = random_case(generator, boxes=300, classes=100)
    found = best(torch.from_numpy(boxes), torch.from_numpy(scores), 0.3, device)
    background = np.zeros((300, 1), np.float32)
    np.testing.assert_array_equal(found.numpy(), best_scores(boxes, np.concatenate((background, scores), axis=1)))


def test_nms_overlap_of_exactly_the_threshold_suppresses(device):
    boxes = torch.tensor([[0.0, 0, 9, 9], [0, 0, 9, 4]])  # 10 by 10 and 10 by 5 pixels: half
    scores = torch.tensor([[0.9], [0.8]])
    just_over = float(np.nextafter(np.float32(0.5), np.float32(1)))
    assert best(boxes, scores, 0.5, device).tolist() == [pytest.approx(0.9), 0]
    assert best(boxes, scores, just_over, device).tolist() == pytest.approx([0.9, 0.8])
    assert keep(boxes, 0.5, 9, device) == [0]
    assert keep(boxes, just_over, 9, device) == [0, 1]
    # The threshold is a float32: 0.7 as a float64 is a little more.
    boxes = torch.tensor([[0.0, 0, 9, 9], [0, 0, 9, 6]])
    assert keep(boxes, 0.7, 9, device) == [0]


def test_nms_without_ties_equals_torchvision(device):
    boxes = random_boxes(np.random.default_rng(7), 400, most=300)
    expected = torchvision.ops.nms(boxes + torch.tensor([0, 0, 1, 1]), torch.arange(400, 0, -1.0), 0.7)
    assert keep(boxes, 0.7, 400, device) == expected.tolist()


def test_nms_empty_and_infinite_boxes(device):
    boxes = torch.tensor([[5.0, 5, 4, 9], [5, 5, 4, 9], [0, 0, 1e20, 1e20], [0, 0, 1e20, 1e20], [3, 3, 3, 3], [3, 3, 3, 3]])
    # No area is no overlap, and an infinite area no number: these cover nothing. A pixel covers itself.
    assert keep(boxes, 0.5, 9, device) == [0, 1, 2, 3, 4]
    assert best(boxes, torch.full((6, 1), 0.5), 0.5, device).tolist() == [0.5] * 5 + [0]


@pytest.mark.parametrize(("boxes", "classes"), [(0, 3), (3, 0), (0, 0)])
def test_nms_without_boxes_or_classes(device, boxes, classes):
    assert best(torch.zeros(boxes, 4), torch.zeros(boxes, classes), 0.3, device).tolist() == [0] * boxes
    assert keep(torch.zeros(0, 4), 0.7, 300, device) == []
    assert best_scores_after_nms(torch.zeros(0, boxes, 4), torch.zeros(0, boxes, classes), 0.3).shape == (0, boxes)
    assert nms(torch.zeros(0, 5, 4), torch.zeros(0, 5, dtype=torch.bool), 0.7, 3)[0].shape == (0, 3)


def test_best_scores_after_nms_box_counts_at_word_size(device):
    for count in (61, 62, 63, 124, 125):
        boxes = torch.arange(count)[:, None] * 100.0 + torch.tensor([0.0, 0, 9, 9])
        boxes[-1] = boxes[0]
        scores = torch.linspace(1, 0.5, count)[:, None]
        assert best(boxes, scores, 0.3, device).tolist() == [*scores[:-1, 0].tolist(), 0]
