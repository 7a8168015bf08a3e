import numpy as np
import pytest
import torch
import torchvision

from extractors.regions.suppression import best_surviving_scores, keep_best
from tests.extractors.regions.reference_detector import best_scores, nms


def random_case(generator, *, boxes, classes):
    """Draw boxes and scores, sometimes on a grid and from few levels, so that overlaps and scores tie."""
    step = generator.choice([0, 4, 16])
    corners = generator.uniform(0, 120, (boxes, 2, 2))
    corners = np.round(corners / step) * step if step else corners
    found = np.concatenate((corners.min(axis=1), corners.max(axis=1)), axis=1).astype(np.float32)
    levels = generator.choice([0, 2, 5])
    scores = generator.random((boxes, classes), dtype=np.float32)
    return found, (np.round(scores * levels) / levels).astype(np.float32) if levels else scores


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_all_classes_at_once_equal_one_after_the_other(seed):
    generator = np.random.default_rng(seed)
    for _ in range(250):
        boxes, scores = random_case(generator, boxes=int(generator.integers(1, 40)), classes=int(generator.integers(1, 5)))
        threshold = float(generator.choice([0.3, 0.5, 0.7, 1 / 3]))
        expected = np.zeros(len(boxes), np.float32)
        for number in range(scores.shape[1]):
            kept = nms(boxes, scores[:, number], threshold)
            expected[kept] = np.maximum(expected[kept], scores[kept, number])
        found = best_surviving_scores(torch.from_numpy(boxes), torch.from_numpy(scores), threshold)
        np.testing.assert_array_equal(found.numpy(), expected)


@pytest.mark.parametrize("seed", range(4))
def test_blocks_equal_one_after_the_other(seed):
    generator = np.random.default_rng(100 + seed)
    for _ in range(20):
        boxes, scores = random_case(generator, boxes=int(generator.integers(1, 500)), classes=1)
        most = int(generator.integers(1, 60))
        order = np.argsort(-scores[:, 0], kind="stable")
        expected = nms(boxes, scores[:, 0], 0.7)[:most]
        kept = keep_best(torch.from_numpy(boxes[order]), 0.7, most)
        assert order[kept.numpy()].tolist() == expected


def test_a_whole_detectors_worth_of_boxes_and_classes():
    generator = np.random.default_rng(5)
    boxes, scores = random_case(generator, boxes=300, classes=100)
    found = best_surviving_scores(torch.from_numpy(boxes), torch.from_numpy(scores), 0.3)
    background = np.zeros((300, 1), np.float32)
    np.testing.assert_array_equal(found.numpy(), best_scores(boxes, np.concatenate((background, scores), axis=1)))


def test_an_overlap_of_exactly_the_threshold_suppresses():
    boxes = torch.tensor([[0.0, 0, 9, 9], [0, 0, 9, 4]])  # 10 by 10 and 10 by 5 pixels: half
    scores = torch.tensor([[0.9], [0.8]])
    just_over = float(np.nextafter(np.float32(0.5), np.float32(1)))
    assert best_surviving_scores(boxes, scores, 0.5).tolist() == [pytest.approx(0.9), 0]
    assert best_surviving_scores(boxes, scores, just_over).tolist() == pytest.approx([0.9, 0.8])
    assert keep_best(boxes, 0.5, 9).tolist() == [0]
    assert keep_best(boxes, just_over, 9).tolist() == [0, 1]
    # The threshold is a float32: 0.7 as a float64 is a little more.
    boxes = torch.tensor([[0.0, 0, 9, 9], [0, 0, 9, 6]])
    assert keep_best(boxes, 0.7, 9).tolist() == [0]


def test_of_equal_scores_the_earlier_box_goes_first():
    boxes = torch.tensor([[0.0, 0, 9, 9], [0, 0, 9, 8], [50, 50, 60, 60]])
    assert best_surviving_scores(boxes, torch.full((3, 1), 0.5), 0.3).tolist() == [0.5, 0, 0.5]


def test_without_ties_it_is_torchvisions():
    generator = np.random.default_rng(7)
    corners = generator.uniform(0, 300, (400, 2, 2))
    boxes = torch.from_numpy(np.concatenate((corners.min(axis=1), corners.max(axis=1)), axis=1).astype(np.float32))
    expected = torchvision.ops.nms(boxes + torch.tensor([0, 0, 1, 1]), torch.arange(400, 0, -1.0), 0.7)
    assert keep_best(boxes, 0.7, 400).tolist() == expected.tolist()


@pytest.mark.parametrize(("boxes", "classes"), [(0, 3), (3, 0), (0, 0)])
def test_nothing_to_suppress(boxes, classes):
    found = best_surviving_scores(torch.zeros(boxes, 4), torch.zeros(boxes, classes), 0.3)
    assert found.tolist() == [0] * boxes
    assert keep_best(torch.zeros(0, 4), 0.7, 300).tolist() == []


def test_number_of_bits_at_the_edge_of_a_word():
    for count in (61, 62, 63, 124, 125):
        boxes = torch.arange(count)[:, None] * 100.0 + torch.tensor([0.0, 0, 9, 9])
        boxes[-1] = boxes[0]
        scores = torch.linspace(1, 0.5, count)[:, None]
        assert best_surviving_scores(boxes, scores, 0.3).tolist() == [*scores[:-1, 0].tolist(), 0]
