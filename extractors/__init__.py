"""Images to arrays: decoding, preprocessing and the models. No Beam in here, and importing this loads no torch."""

from extractors.base import Description, Extractor
from extractors.catalogue import describe, load, names, spec
from extractors.images.decoding import MAX_PIXELS, REASONS, DecodeError, decode

__all__ = [
    "MAX_PIXELS",
    "REASONS",
    "DecodeError",
    "Description",
    "Extractor",
    "decode",
    "describe",
    "load",
    "names",
    "spec",
]
