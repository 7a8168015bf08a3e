"""Readers of raw captions."""

from pipelines.inputs.captions.base import CAPTION_COLUMNS, EVERYTHING, CaptionSource, Part, RawCaption, Selection
from pipelines.inputs.captions.opening import open_source

__all__ = ["CAPTION_COLUMNS", "EVERYTHING", "CaptionSource", "Part", "RawCaption", "Selection", "open_source"]
