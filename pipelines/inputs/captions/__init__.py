"""Readers of raw captions: Multi30K, Karpathy's splits, COCO, VSE++'s and SCAN's files, and tables."""

from pipelines.inputs.captions.base import (
    CAPTION_COLUMNS,
    COMPARABLE,
    EVERYTHING,
    TRANSLATION,
    CaptionSource,
    Part,
    RawCaption,
    Selection,
)
from pipelines.inputs.captions.opening import FORMATS, open_source
from pipelines.inputs.captions.table import TABLE_COLUMNS

__all__ = [
    "CAPTION_COLUMNS",
    "COMPARABLE",
    "EVERYTHING",
    "FORMATS",
    "TABLE_COLUMNS",
    "TRANSLATION",
    "CaptionSource",
    "Part",
    "RawCaption",
    "Selection",
    "open_source",
]
