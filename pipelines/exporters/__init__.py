"""Writers of the layouts that existing code bases read. Plain Python, no Beam."""

from pipelines.exporters.arrays import export_arrays, export_mulisera
from pipelines.exporters.captions import Choice
from pipelines.exporters.scan import export_scan
from pipelines.exporters.staging import Staging
from pipelines.exporters.tsv import export_tsv
from pipelines.exporters.webdataset import export_webdataset

__all__ = [
    "Choice",
    "Staging",
    "export_arrays",
    "export_mulisera",
    "export_scan",
    "export_tsv",
    "export_webdataset",
]
