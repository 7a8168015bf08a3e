"""Tables: the papers' published numbers beside those measured."""

from train.reports.published import PAPERS, Measures, PublishedRow, rows_of_paper
from train.reports.reproduce_report import Report, read_report
from train.reports.tables import score_table

__all__ = [
    "PAPERS",
    "Measures",
    "PublishedRow",
    "Report",
    "read_report",
    "rows_of_paper",
    "score_table",
]
