from __future__ import annotations

import numpy as np
import pytest
import torch
import torchvision

from extractors.regions import nms as nms_module
from extractors.regions.nms import best_scores_after_nms, nms
from tests.extractors.regions import reference_detector
from tests.extractors.regions.reference_detector import best_scores
from tests.extractors.regions.test_boxes import random_boxes
from tests.fake_gpu import fake_gpu


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
    monkeypatch.setitem(nms_module._BLOCK, "cuda", 150)
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
    monkeypatch.setitem(nms_module._BLOCK, "cuda", 40)
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
