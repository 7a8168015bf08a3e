"""An extractor without a model, for tests of what surrounds extractors."""

import io
import os
import signal

import numpy as np
import torch
from PIL import Image

from extractors import Description, Extractor, ExtractorRequest
from pipelines.features.inference import LoadedExtractor, Tally, extract_rows
from pipelines.inputs.images.base import ImageRef
from schemas.features import FeatureSpec
from schemas.kinds import schema_of

SPEC = FeatureSpec("fake", (3,))


class ColourExtractor(Extractor):
    """The feature of an image is the red, green and blue of its first pixel."""

    def __init__(self, description=None):
        super().__init__(description or Description(SPEC, {"name": "fake"}))

    def preprocess(self, image):
        return torch.tensor(image.getpixel((0, 0)))

    def extract(self, batch):
        return batch.numpy().astype(np.float32)


def picture(*colour, size_wh=(2, 2)):
    """Return the bytes of an image of one colour."""
    file = io.BytesIO()
    Image.new("RGB", size_wh, colour).save(file, "PNG")
    return file.getvalue()


def extract_images(images, extractor=None, *, read=None, batch_size=4, threads=1, processes=None, **options):
    """Yield tables of features.

    Args:
        images: the bytes of images by id; with ``read``, which returns them, ids or references.
    """
    loaded = LoadedExtractor(extractor or ColourExtractor(), batch_size, threads, processes)
    refs = [ref if isinstance(ref, ImageRef) else ImageRef(ref, f"uri/{ref}") for ref in sorted(images)]
    options = {"schema": schema_of("features", loaded.extractor.spec), "tally": Tally(), **options}
    return extract_rows(refs, loaded, read=read or (lambda ref: images[ref.image_id]), **options)


def use_colours(monkeypatch):
    """Put it in place of all extractors. That reaches no worker process: use one worker."""
    monkeypatch.setattr(ExtractorRequest, "describe", lambda request: ColourExtractor().description)
    monkeypatch.setattr(ExtractorRequest, "load", lambda request, device: ColourExtractor())


def colours():
    """Put it in place of all extractors until this process ends."""
    ExtractorRequest.describe = lambda request: ColourExtractor().description
    ExtractorRequest.load = lambda request, device: ColourExtractor()


def colours_until_a_shard():
    """Put it in place of all extractors, and kill this process when it publishes a shard."""
    from schemas.writing.attempts import Attempt

    colours()
    Attempt.publish = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
