from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from extractors.regions.boxes import apply_deltas, cell_anchors, is_larger

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
