from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from extractors.options import RegionOptions
from extractors.regions import selection
from extractors.regions.selection import Detections, columns, gather_regions
from schemas.features import FeatureSpec
from schemas.kinds import schema_of
from tests.extractors.regions import reference_detector
from tests.extractors.regions.test_boxes import random_boxes
from tests.fake_gpu import fake_gpu

SPEC = FeatureSpec("test", (5, 3))


def apart(count):
    """Boxes that do not touch, so that each keeps its best score."""
    return torch.arange(count)[:, None] * 100.0 + torch.tensor([0.0, 0, 9, 9])


def probabilities(best, labels, classes=6):
    found = torch.zeros(len(best), 1 + classes)
    found[torch.arange(len(best)), torch.tensor(labels, dtype=torch.int64)] = torch.tensor(best)
    found[:, 0] = 1 - found.sum(dim=1)
    return found


def select_indices(boxes, classes, options):
    """Choose the regions of one image, on a CPU and on a fake GPU; returns their positions."""
    usable = torch.ones(1, len(boxes), dtype=torch.bool)
    found = Detections(boxes[None], usable, boxes[None], classes[None], classes[None])
    positions, (number,) = selection.select_indices(found, options)
    with fake_gpu():
        on_gpu = Detections(*(values.to("cuda") for values in vars(found).values()))
        there, (number_there,) = (values.cpu() for values in selection.select_indices(on_gpu, options))
    assert there[0, :number_there].tolist() == positions[0, :number].tolist()
    return positions[0, :number]


def together(*images):
    """Put proposals of several images into one, those of fewer padded with rows that would be chosen first if they counted."""
    most = max(len(image.boxes) for image in images)

    def padded(name):
        return [F.pad(getattr(image, name), (0, 0, 0, most - len(image.boxes)), value=1) for image in images]

    usable = [torch.arange(most) < len(image.boxes) for image in images]
    boxes, features, classes, attributes = (
        torch.stack(padded(name)) for name in ("boxes", "features", "classes", "attributes")
    )
    return Detections(boxes, torch.stack(usable), features, classes, attributes)


def columns_of(images, options, spec):
    return columns([(640, 480)] * len(images), gather_regions(together(*images), options), spec)


@pytest.mark.parametrize(
    ("best", "options", "expected"),
    [
        ([0.3, 0.1, 0.9, 0.2, 0.5], RegionOptions(2, 4), [0, 2, 3, 4]),  # 0.2 reaches the threshold.
        ([0.3, 0.1, 0.9, 0.19, 0.5], RegionOptions(4, 5), [2, 4, 0, 3]),
        ([0.3, 0.1, 0.9, 0.19, 0.5], RegionOptions(1, 2, score_threshold=0.5), [2, 4]),
        ([0.5, 0.5, 0.5, 0.5], RegionOptions(2, 2), [0, 1]),
    ],
)
def test_select_indices_keeps_order_within_limits_and_ranks_beyond(best, options, expected):
    classes = probabilities(best, [*range(1, len(best) + 1)])
    assert select_indices(apart(len(best)), classes, options).tolist() == expected


@pytest.mark.parametrize("seed", range(20))
def test_select_indices_equals_reference(seed):
    generator = np.random.default_rng(seed)
    boxes = random_boxes(generator, 40, most=100)
    classes = torch.from_numpy(generator.normal(size=(40, 30)).astype(np.float32) * 2).softmax(dim=1)
    for least, most in ((3, 30), (30, 40), (2, 5), (36, 36)):
        found = select_indices(boxes, classes, RegionOptions(least, most))
        assert found.tolist() == reference_detector.choose(boxes.numpy(), classes.numpy(), least, most, 0.2).tolist()


def detections(count):
    classes = probabilities([0.9 - 0.1 * i for i in range(count)], [1 + i for i in range(count)])
    attributes = torch.tensor([[0.7, 0.1, 0.2]]).expand(count, -1)
    features = torch.full((count, 3), 2.0) + torch.arange(count)[:, None]
    return Detections(apart(count), torch.ones(count, dtype=torch.bool), features, classes, attributes)


def test_columns_have_schema_names_and_zero_padding():
    found = columns_of([detections(2), detections(0)], RegionOptions(1, 5), SPEC)
    assert [*found] == [name for name in schema_of("regions", SPEC).names if name != "image_id"]
    assert found["num_regions"].tolist() == [2, 0]
    assert (found["width"].tolist(), found["height"].tolist()) == ([640, 640], [480, 480])
    assert found["boxes"].shape == (2, 5, 4)
    assert found["boxes"][0, :2].tolist() == apart(2).tolist()
    assert found["features"][0].tolist() == [[2, 2, 2], [3, 3, 3], [0, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert found["class_ids"][0].tolist() == [1, 2, 0, 0, 0]
    assert found["class_scores"][0].tolist() == pytest.approx([0.9, 0.8, 0, 0, 0])
    assert found["attribute_ids"][0].tolist() == [2, 2, 0, 0, 0]  # none, of 0.7, does not count
    assert found["attribute_scores"][0].tolist() == pytest.approx([0.2, 0.2, 0, 0, 0])
    assert not any(values[1].any() for name, values in found.items() if name not in ("width", "height"))


def test_columns_without_attribute_have_id_0():
    classes, attributes = probabilities([0.5, 0.6], [1, 2]), torch.tensor([[1.0, 0, 0], [0.2, 0.1, 0.7]])
    image = replace(detections(2), classes=classes, attributes=attributes)
    found = columns_of([image], RegionOptions(1, 5), SPEC)
    assert found["attribute_ids"].tolist() == [[0, 2, 0, 0, 0]]
    assert found["class_ids"].tolist() == [[1, 2, 0, 0, 0]]


def test_columns_float16_rounds_features_only():
    image = detections(2)
    thirds = replace(image, features=image.features / 3)
    whole, half = (columns_of([thirds], RegionOptions(1, 5), replace(SPEC, dtype=dtype)) for dtype in ("float32", "float16"))
    assert half["features"].tobytes() == whole["features"].astype(np.float16).tobytes()
    assert all(half[name].tobytes() == whole[name].tobytes() for name in whole if name != "features")


def test_columns_images_of_a_batch_are_independent():
    generator = np.random.default_rng(8)
    images = []
    for count in (40, 7, 0, 23):
        boxes = random_boxes(generator, count, most=100)
        classes, attributes = (torch.from_numpy(generator.random((count, width), dtype=np.float32)) for width in (30, 5))
        images.append(Detections(boxes, torch.ones(count, dtype=torch.bool), torch.rand(count, 3), classes, attributes))
    for options in (RegionOptions(3, 30, 0.9), RegionOptions(5, 5), RegionOptions(30, 40)):
        spec = replace(SPEC, shape=(options.max_regions, 3))
        alone = [columns_of([image], options, spec) for image in images]
        for name, values in columns_of(images, options, spec).items():
            assert values.tobytes() == b"".join(found[name].tobytes() for found in alone)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("options", [RegionOptions(1, 5), RegionOptions(1, 5, score_threshold=0.85), RegionOptions(2, 2)])
def test_gather_regions_nonfinite_proposal_marks_image(value, options):
    bad = detections(3)
    bad.features[2, 1] = value
    classes = bad.classes.clone()
    classes[2] = torch.nan  # as a softmax over its scores
    found = columns_of([detections(2), replace(bad, classes=classes)], options, SPEC)
    assert np.isfinite(found["features"][0]).all()
    assert np.count_nonzero(~np.isfinite(found["features"][1])) == 1
