"""Extractors in other Beam pipelines: a ``ModelHandler`` and a transform.

Both decode, batch and handle failures as ``imagepivot features``. A batch of Beam is large, so that decoding
runs ahead of the model's batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import apache_beam as beam
from apache_beam.ml.inference.base import KeyedModelHandler, ModelHandler, RunInference

from extractors import ExtractorRequest
from pipelines.features.inference import Tally, extract_rows
from pipelines.features.shard_worker import ExtractorPool, load_pool
from pipelines.inputs.images.base import ImageRef
from pipelines.jobs import FeaturesJob
from schemas.dataset import dicts_of_rows
from schemas.errors import UsageError
from schemas.kinds import schema_of

_IMAGES = 256  # Images in a batch of Beam, without a batch size of the model.
_MODEL_BATCHES = 4  # Batches of the model in a batch of Beam, with one.
FAILURES_TAG = "failures"


class ExtractorHandler(ModelHandler[bytes, Any, ExtractorPool]):
    """Beam's ``ModelHandler`` of an extractor: image bytes to features.

    A prediction is an array, or for regions a dict of arrays by column. The prediction of a failed image is its failure row, a dict
    with the key ``reason``, whose ``key`` is empty. Values and failure rows equal those of `extract_features`.

    Examples:
        >>> from apache_beam.ml.inference.base import KeyedModelHandler, RunInference
        >>> handler = imagepivot.ExtractorHandler(imagepivot.ExtractorRequest("resnet50-pool", weights="random:0"), device="cpu")
        >>> with beam.Pipeline() as pipeline:
        ...     images = pipeline | beam.Create([("img-00", Path("photos/img-00.jpg").read_bytes())])
        ...     features = images | RunInference(KeyedModelHandler(handler))
    """

    def __init__(self, request: ExtractorRequest, *, device: str = "auto", batch_size: int | None = None) -> None:
        self._job = FeaturesJob("", "", request.located(), batch_size=batch_size, device=device)
        images = _MODEL_BATCHES * batch_size if batch_size else _IMAGES
        super().__init__(min_batch_size=images, max_batch_size=images)

    def load_model(self) -> ExtractorPool:
        """Load the extractor once per process."""
        return load_pool(self._job)

    def run_inference(
        self, batch: Sequence[bytes], model: ExtractorPool, inference_args: dict[str, Any] | None = None
    ) -> list[Any]:
        """Return the features or the failure row of each image, in order."""
        refs, tally, predictions = [ImageRef(str(index), "") for index in range(len(batch))], Tally(), dict[str, Any]()
        with model.extractor() as loaded:
            description = loaded.extractor.description
            schema = schema_of(description.kind, description.spec)
            for table in extract_rows(refs, loaded, read=partial(_image_bytes, batch), schema=schema, tally=tally):
                for row in dicts_of_rows(table, description.spec):
                    index = row.pop("image_id")
                    predictions[index] = row["feature"] if description.kind == "features" else row
        predictions.update((failure["key"], {**failure, "key": ""}) for failure in tally.failures)
        return [predictions[ref.image_id] for ref in refs]

    def get_num_bytes(self, batch: Sequence[bytes]) -> int:
        """Return the bytes of the images."""
        return sum(map(len, batch))


@dataclass(eq=False)
class Extract(beam.PTransform):
    """Pairs (image id, image bytes) to pairs (image id, features), with failures.

    The result has two parts: ``features`` as `ExtractorHandler` computes, and ``failures`` with rows of that kind.

    Attributes:
        device: ``cpu``, ``cuda``, ``cuda:N`` or ``auto``.
        batch_size: images per batch of the model; None for the extractor's.

    Examples:
        >>> request = imagepivot.ExtractorRequest("resnet50-pool", weights="random:0")
        >>> with beam.Pipeline() as pipeline:
        ...     images = pipeline | beam.Create([("img-00", Path("photos/img-00.jpg").read_bytes()), ("img-01", b"")])
        ...     features, failures = images | imagepivot.Extract(request, device="cpu")
        ...     _ = failures | beam.Map(lambda row: print(row["key"], row["reason"]))
        img-01 empty
    """

    request: ExtractorRequest
    device: str = "auto"
    batch_size: int | None = None

    def expand(self, images: beam.PCollection) -> beam.pvalue.DoOutputsTuple:
        """Run Beam's ``RunInference``, and separate failures."""
        handler = ExtractorHandler(self.request, device=self.device, batch_size=self.batch_size)
        predictions = images | "Infer" >> RunInference(KeyedModelHandler(handler))
        return predictions | "Separate" >> beam.FlatMapTuple(_separate).with_outputs(FAILURES_TAG, main="features")


def _separate(image_id: str, prediction: Any) -> Iterator[Any]:
    if isinstance(prediction, dict) and "reason" in prediction:
        yield beam.pvalue.TaggedOutput(FAILURES_TAG, {**prediction, "key": image_id})
    else:
        yield image_id, prediction


def _image_bytes(batch: Sequence[bytes], ref: ImageRef) -> bytes:
    data = batch[int(ref.image_id)]
    if not isinstance(data, bytes):
        raise UsageError(
            f"an element holds a {type(data).__name__}, expected the bytes of an image file: read it first, "
            "e.g. with apache_beam.io.fileio.ReadMatches"
        )
    return data
