"""Tables: the papers' published numbers beside those measured."""

from train.reports.published import PAPERS, Measures, PublishedRow, rows_of_paper
from train.reports.reproduce import TablesJob, run_tables
from train.reports.score_tables import score_table
from train.reports.table_reports import Report, read_report

__all__ = [
    "PAPERS",
    "Measures",
    "PublishedRow",
    "Report",
    "TablesJob",
    "read_report",
    "rows_of_paper",
    "run_tables",
    "score_table",
]
