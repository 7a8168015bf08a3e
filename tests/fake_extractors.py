"""An extractor without a model, for tests of what surrounds extractors."""

import os
import signal

import numpy as np
import torch

from extractors import Description, Extractor, ExtractorRequest
from schemas.features import FeatureSpec

SPEC = FeatureSpec("fake", (3,))


class ColourExtractor(Extractor):
    """The feature of an image is the red, green and blue of its first pixel."""

    def __init__(self, description=None):
        super().__init__(description or Description(SPEC, {"name": "fake"}))

    def preprocess(self, image):
        return torch.tensor(image.getpixel((0, 0)))

    def extract(self, batch):
        return batch.numpy().astype(np.float32)


def use_colours(monkeypatch):
    """Put it in place of all extractors. That reaches no worker process: use one worker."""
    monkeypatch.setattr("extractors.ExtractorRequest.describe", lambda request: ColourExtractor().description)
    monkeypatch.setattr("extractors.ExtractorRequest.load", lambda request, device: ColourExtractor())


def colours():
    """Put it in place of all extractors until this process ends."""
    ExtractorRequest.describe = lambda request: ColourExtractor().description
    ExtractorRequest.load = lambda request, device: ColourExtractor()


def colours_until_a_shard():
    """Put it in place of all extractors, and kill this process when it publishes a shard."""
    from schemas.writing.shard_writer import Attempt

    colours()
    Attempt.publish = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
