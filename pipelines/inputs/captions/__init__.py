"""Readers of raw captions: Multi30K, Karpathy's splits, COCO, and tables. Plain Python, no Beam."""

from pipelines.inputs.captions.base import (
    COMPARABLE,
    EVERYTHING,
    FORMATS,
    TABLE_COLUMNS,
    TRANSLATION,
    CaptionSource,
    Part,
    RawCaption,
    Selection,
    open_source,
    parse_columns,
)

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
    "parse_columns",
]
