"""Feature extractors for images and caption tokens; importing loads no torch."""

from extractors.base import Description as Description
from extractors.base import Extractor as Extractor
from extractors.catalogue import extractor_names as extractor_names
from extractors.catalogue import list_extractors as list_extractors
from extractors.images.decoding import DecodeError as DecodeError
from extractors.images.decoding import decode_image as decode_image
from extractors.options import RegionOptions as RegionOptions
from extractors.request import ExtractorRequest as ExtractorRequest
from extractors.request import load_extractor as load_extractor
