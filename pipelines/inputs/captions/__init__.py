"""Readers of raw captions: Multi30K, Karpathy's splits, COCO, VSE++'s and SCAN's files, and tables."""

from pipelines.inputs.captions.base import (
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
