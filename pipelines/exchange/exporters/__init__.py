"""Writers of the layouts that existing code bases read.

A layout is a frozen dataclass with the options of one kind of files (`ExportLayout`) that writes a dataset to a `Staging`.
"""

from pipelines.exchange.exporters.base import ExportLayout
from pipelines.exchange.exporters.captions import CaptionChoice, read_captions
from pipelines.exchange.exporters.mulisera import MuliseraLayout
from pipelines.exchange.exporters.npy import NpyLayout
from pipelines.exchange.exporters.scan import ScanLayout
from pipelines.exchange.exporters.staging import Staging
from pipelines.exchange.exporters.tsv import TsvLayout
from pipelines.exchange.exporters.webdataset import WebdatasetLayout

__all__ = [
    "LAYOUTS",
    "CaptionChoice",
    "ExportLayout",
    "MuliseraLayout",
    "NpyLayout",
    "ScanLayout",
    "Staging",
    "TsvLayout",
    "WebdatasetLayout",
    "read_captions",
]

LAYOUTS = {layout.format: layout for layout in (ScanLayout, MuliseraLayout, TsvLayout, WebdatasetLayout, NpyLayout)}
"""The layouts by the names of their formats."""
