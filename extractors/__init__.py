"""Feature extractors for images and caption tokens; importing loads no torch."""

from extractors.base import Description, Extractor, RegionExtractor
from extractors.catalogue import CatalogueEntry, ExtractorModule, extractor_names, list_extractors
from extractors.images.decoding import MAX_PIXELS, REASONS, DecodeError, decode_image
from extractors.options import ExtractorOptions, RegionOptions
from extractors.request import ExtractorRequest, load_extractor

__all__ = [
    "MAX_PIXELS",
    "REASONS",
    "CatalogueEntry",
    "DecodeError",
    "Description",
    "Extractor",
    "ExtractorModule",
    "ExtractorOptions",
    "ExtractorRequest",
    "RegionExtractor",
    "RegionOptions",
    "decode_image",
    "extractor_names",
    "list_extractors",
    "load_extractor",
]
