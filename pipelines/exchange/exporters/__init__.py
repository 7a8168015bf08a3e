"""Writers of the layouts that existing code bases read. Plain Python, no Beam."""

from pipelines.exchange.exporters.arrays import export_arrays, export_mulisera
from pipelines.exchange.exporters.captions import Choice
from pipelines.exchange.exporters.scan import export_scan
from pipelines.exchange.exporters.staging import Staging
from pipelines.exchange.exporters.tsv import export_tsv
from pipelines.exchange.exporters.webdataset import export_webdataset

__all__ = [
    "Choice",
    "Staging",
    "export_arrays",
    "export_mulisera",
    "export_scan",
    "export_tsv",
    "export_webdataset",
]
