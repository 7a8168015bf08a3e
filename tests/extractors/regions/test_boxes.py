from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from extractors.regions.boxes import anchor_grid, apply_deltas, cell_anchors, clip, iou, is_larger

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


def test_apply_deltas_limits_growth():
    (found,) = apply_deltas(torch.tensor([[0.0, 0.0, 15.0, 15.0]]), torch.tensor([[0.0, 0.0, 50.0, 4.0]])).tolist()
    assert found[2] - found[0] == pytest.approx(1000, rel=1e-5)
    assert found[3] - found[1] == pytest.approx(16 * math.exp(4), rel=1e-5)


def test_is_larger_side_of_exactly_the_limit_is_false():
    boxes = torch.tensor([[0.0, 0, 15, 30], [0, 0, 15.001, 30], [0, 0, 30, 15], [9, 9, 9, 40], [9, 9, 40, 8]])
    assert is_larger(boxes, 16).tolist() == [False, True, False, False, False]
    assert is_larger(boxes, -100).tolist() == [True, True, True, False, False]  # corners in order, whatever the side


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


def test_clip_limits_to_outermost_pixels():
    boxes = torch.tensor([[-5.0, -6.0, 700.0, 800.0], [700.0, 800.0, 900.0, 900.0], [1.5, 2.5, 3.5, 4.5]])
    assert clip(boxes, width=600, height=500).tolist() == [[0, 0, 599, 499], [599, 499, 599, 499], [1.5, 2.5, 3.5, 4.5]]


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
