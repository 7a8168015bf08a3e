"""Readers of raw captions: Multi30K, Karpathy's splits, COCO, VSE++'s and SCAN's files, and tables."""

from pipelines.inputs.captions.base import CAPTION_COLUMNS, EVERYTHING, CaptionSource, Part, RawCaption, Selection
from pipelines.inputs.captions.opening import open_source

__all__ = ["CAPTION_COLUMNS", "EVERYTHING", "CaptionSource", "Part", "RawCaption", "Selection", "open_source"]
