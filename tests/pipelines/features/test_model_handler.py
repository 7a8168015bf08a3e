"""Extractors in pipelines of others: the values and failures of a dataset, for elements and for batches of any size."""

from dataclasses import replace

import apache_beam as beam
import numpy as np
import pytest

from extractors import ExtractorRequest
from pipelines.features.extraction import extract_features
from pipelines.features.model_handler import Extract, ExtractorHandler
from pipelines.jobs import FeaturesJob
from pipelines.running.execution import Execution
from schemas.dataset import open_dataset
from schemas.kinds import FAILURE_REASONS
from tests.beam import RUNNER, SEEN, see
from tests.fake_extractors import picture, use_colours

REQUEST = ExtractorRequest("resnet50-pool")
IMAGES = {f"i{number}": picture(20 * number, 3, 250) for number in range(7)}
BROKEN = {"a": b"", "i3b": b"no image", "z": picture(1, 2, 3)[:60]}  # First, in the middle, and last.


@pytest.fixture(autouse=True)
def seen():
    SEEN.clear()


def dataset_of(tmp_path, request, images):
    (tmp_path / "photos").mkdir()
    for image_id, data in images.items():
        (tmp_path / "photos" / f"{image_id}.png").write_bytes(data)
    job = FeaturesJob(str(tmp_path / "photos"), str(tmp_path / "features"), request, device="cpu")
    extract_features(job, Execution(workers=1))
    return open_dataset(tmp_path / "features")


def check_equal(dataset, features, failures):
    assert {name: value.dtype for name, value in features.items()} == dict.fromkeys(dataset.image_ids(), np.float32)
    for row in dataset:
        np.testing.assert_array_equal(features[row["image_id"]], row["feature"])
    expected = [{**row, "uri": ""} for row in dataset.failures().to_pylist()]
    assert sorted(failures, key=str) == sorted(expected, key=str)
    assert {row["reason"] for row in failures} <= {*FAILURE_REASONS}


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [None, 1, 3])
def test_extract_has_values_and_failures_of_features(batch_size, tmp_path, monkeypatch):
    use_colours(monkeypatch)
    dataset = dataset_of(tmp_path, REQUEST, IMAGES | BROKEN)
    with beam.Pipeline(runner=RUNNER) as pipeline:
        images = pipeline | beam.Create([*(IMAGES | BROKEN).items()], reshuffle=False)
        features, failures = images | Extract(REQUEST, device="cpu", batch_size=batch_size)
        _ = (features, failures) | beam.Flatten() | beam.Map(see)
    found = dict(pair for pair in SEEN if isinstance(pair, tuple))
    assert len(found) == len(IMAGES)
    check_equal(dataset, found, [row for row in SEEN if isinstance(row, dict)])


@pytest.mark.cluster
@pytest.mark.parametrize("request_", [REQUEST, replace(REQUEST, dtype="float16")], ids=["float32", "float16"])
def test_network_has_the_values_of_features(request_, tmp_path):
    request = replace(request_, weights="random:0")
    dataset = dataset_of(tmp_path, request, IMAGES)
    handler = ExtractorHandler(request, device="cpu", batch_size=2)
    predictions = handler.run_inference([*IMAGES.values()], handler.load_model())
    for image_id, prediction in zip(IMAGES, predictions, strict=True):
        assert prediction.dtype == request.dtype
        np.testing.assert_array_equal(prediction, dataset.get(image_id)["feature"])


@pytest.mark.cluster
def test_regions_are_the_columns_of_their_row(tmp_path):
    request = ExtractorRequest("faster-rcnn-36", weights="random:0")
    image = {"i": picture(90, 20, 30, size_wh=(60, 40))}
    row = dataset_of(tmp_path, request, image).get("i")
    handler = ExtractorHandler(request, device="cpu")
    prediction, failure = handler.run_inference([image["i"], b""], handler.load_model())
    assert prediction.keys() == row.keys() - {"image_id"}
    for name, value in prediction.items():
        np.testing.assert_array_equal(value, row[name])
    assert (failure["stage"], failure["reason"]) == ("decode", "empty")


def test_predictions_are_in_order_and_a_failure_takes_no_neighbour_along(monkeypatch):
    use_colours(monkeypatch)
    handler = ExtractorHandler(REQUEST, device="cpu", batch_size=2)
    colours = [(number, 0, 0) for number in range(24)]
    batch = [b"" if number % 5 == 0 else picture(*colour) for number, colour in enumerate(colours)]
    predictions = handler.run_inference(batch, handler.load_model())
    reasons = [prediction["reason"] if isinstance(prediction, dict) else tuple(prediction) for prediction in predictions]
    assert reasons == ["empty" if number % 5 == 0 else colour for number, colour in enumerate(colours)]
