"""Images to arrays: decoding, preprocessing and the models. Nothing in here uses Beam, and importing it loads no torch."""

from extractors.base import Description, Extractor, RegionExtractor
from extractors.catalogue import ExtractorModule, ExtractorRequest, describe, load, names, spec
from extractors.images.decoding import MAX_PIXELS, REASONS, DecodeError, decode
from extractors.settings import RegionOptions, Settings

__all__ = [
    "MAX_PIXELS",
    "REASONS",
    "DecodeError",
    "Description",
    "Extractor",
    "ExtractorModule",
    "ExtractorRequest",
    "RegionExtractor",
    "RegionOptions",
    "Settings",
    "decode",
    "describe",
    "load",
    "names",
    "spec",
]
