from dataclasses import replace

import numpy as np
import pytest
import torch

from extractors.regions.selection import Detections, columns, select
from extractors.settings import RegionOptions
from schemas.features import FeatureSpec
from schemas.kinds import regions_schema
from tests.extractors.regions.reference_detector import choose

SPEC = FeatureSpec("test", (5, 3))


def apart(count):
    """Boxes that do not touch, so that each keeps its best score."""
    return torch.arange(count)[:, None] * 100.0 + torch.tensor([0.0, 0, 9, 9])


def probabilities(best, labels, classes=6):
    found = torch.zeros(len(best), 1 + classes)
    found[torch.arange(len(best)), torch.tensor(labels, dtype=torch.int64)] = torch.tensor(best)
    found[:, 0] = 1 - found.sum(dim=1)
    return found


def test_within_the_limits_regions_stay_in_the_order_of_the_proposals():
    classes = probabilities([0.3, 0.1, 0.9, 0.2, 0.5], [1, 2, 3, 4, 5])
    assert select(apart(5), classes, RegionOptions(2, 4)).tolist() == [0, 2, 3, 4]  # 0.2 reaches the threshold
    assert select(apart(5), classes, RegionOptions(4, 4)).tolist() == [0, 2, 3, 4]


def test_too_few_and_too_many_are_taken_by_score():
    classes = probabilities([0.3, 0.1, 0.9, 0.19, 0.5], [1, 2, 3, 4, 5])
    assert select(apart(5), classes, RegionOptions(4, 5)).tolist() == [2, 4, 0, 3]
    assert select(apart(5), classes, RegionOptions(1, 2)).tolist() == [2, 4]
    assert select(apart(5), classes, RegionOptions(1, 2, score_threshold=0.5)).tolist() == [2, 4]


def test_of_equal_scores_the_earlier_proposal_wins():
    classes = probabilities([0.5, 0.5, 0.5, 0.5], [1, 2, 3, 4])
    assert select(apart(4), classes, RegionOptions(2, 2)).tolist() == [0, 1]


def test_a_box_counts_by_the_best_class_that_keeps_it():
    boxes = torch.tensor([[0.0, 0, 9, 9], [0, 0, 9, 8], [100, 100, 109, 109]])
    classes = torch.tensor([[0.1, 0.8, 0.1], [0.2, 0.7, 0.15], [0.3, 0.3, 0.4]])
    # The second is covered in class 1, and counts by class 2, where it is above the first.
    assert select(boxes, classes, RegionOptions(2, 2)).tolist() == [0, 2]
    assert select(boxes, classes, RegionOptions(1, 3, score_threshold=0.15)).tolist() == [0, 1, 2]


@pytest.mark.parametrize("seed", range(20))
def test_equals_the_reference(seed):
    generator = np.random.default_rng(seed)
    corners = generator.uniform(0, 100, (40, 2, 2))
    boxes = np.concatenate((corners.min(axis=1), corners.max(axis=1)), axis=1).astype(np.float32)
    classes = torch.from_numpy(generator.normal(size=(40, 30)).astype(np.float32) * 2).softmax(dim=1)
    for least, most in ((3, 30), (30, 40), (2, 5), (36, 36)):
        found = select(torch.from_numpy(boxes), classes, RegionOptions(least, most))
        assert found.tolist() == choose(boxes, classes.numpy(), least, most, 0.2).tolist()


def detections(count):
    classes = probabilities([0.9 - 0.1 * i for i in range(count)], [1 + i for i in range(count)])
    attributes = torch.tensor([[0.7, 0.1, 0.2]]).expand(count, -1)
    return Detections(640, 480, apart(count), torch.full((count, 3), 2.0) + torch.arange(count)[:, None], classes, attributes)


def test_columns_are_those_of_the_schema_and_zero_behind_the_regions():
    found = columns([detections(2), detections(0)], RegionOptions(1, 5), SPEC)
    assert [*found] == [name for name in regions_schema(SPEC).names if name != "image_id"]
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


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_types_are_those_of_the_schema(dtype):
    spec = replace(SPEC, dtype=dtype)
    schema = regions_schema(spec)
    for name, values in columns([detections(3)], RegionOptions(1, 5), spec).items():
        field = schema.field(name).type
        assert values.dtype == (field.value_type if hasattr(field, "value_type") else field).to_pandas_dtype()


def test_no_images_make_empty_columns():
    found = columns([], RegionOptions(), FeatureSpec("test", (36, 3)))
    assert found["features"].shape == (0, 36, 3)
    assert all(len(values) == 0 for values in found.values())


def test_an_attribute_that_no_weights_know_is_none():
    classes, attributes = probabilities([0.5, 0.6], [1, 2]), torch.tensor([[1.0, 0, 0], [0.2, 0.1, 0.7]])
    image = Detections(200, 20, apart(2), torch.ones(2, 3), classes, attributes)
    found = columns([image], RegionOptions(1, 5), SPEC)
    assert found["attribute_ids"].tolist() == [[0, 2, 0, 0, 0]]
    assert found["class_ids"].tolist() == [[1, 2, 0, 0, 0]]


def test_features_are_rounded_and_nothing_else():
    image = detections(2)
    thirds = replace(image, features=image.features / 3)
    whole, half = (columns([thirds], RegionOptions(1, 5), replace(SPEC, dtype=dtype)) for dtype in ("float32", "float16"))
    assert half["features"].tobytes() == whole["features"].astype(np.float16).tobytes()
    assert all(half[name].tobytes() == whole[name].tobytes() for name in whole if name != "features")


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("options", [RegionOptions(1, 5), RegionOptions(1, 5, score_threshold=0.85), RegionOptions(2, 2)])
def test_a_proposal_that_is_not_finite_spoils_its_image(value, options):
    """As 16 bits overflow: whatever else would have been chosen, the proposal might have been, and nothing is stored."""
    bad = detections(3)
    bad.features[2, 1] = value
    classes = bad.classes.clone()
    classes[2] = torch.nan  # as a softmax over its scores
    found = columns([detections(2), replace(bad, classes=classes)], options, SPEC)
    assert np.isfinite(found["features"][0]).all()
    assert np.count_nonzero(~np.isfinite(found["features"][1])) == 1
