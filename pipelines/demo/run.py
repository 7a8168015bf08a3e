"""The end of ``imagepivot demo``: every dataset that its plan has made."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.rule import Rule

from pipelines.datasets.inspection import describe
from schemas.console.tables import render_tables
from schemas.dataset import open_dataset


def show_datasets(output: Path, *, console: Console) -> None:
    """Print the datasets in the folder of the demo, each with three rows."""
    for name in ("captions", "vocabulary", "encoded", "features", "regions"):
        console.print(Rule(name))
        render_tables(console, describe(open_dataset(output / name), rows=3))
        console.print()
