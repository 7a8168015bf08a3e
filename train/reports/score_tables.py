"""The scores of a run as a table for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from train.evaluation.scoring import Score

__all__ = ["score_table"]


def score_table(scores: Sequence[Score], *, title: str) -> Table:
    """Return a table of recalls, with those of chance in brackets, and median ranks for each language, portion and split."""
    folds = f"; means over {scores[0].folds} folds of the images" if scores and scores[0].folds > 1 else ""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        caption=f"recalls in percent, in brackets those of chance; median: median rank{folds}",
        caption_justify="left",
        box=None,  # Borders and wide padding would break the lines of a terminal of 80 columns.
        padding=(0, 2, 0, 0),
        pad_edge=False,
    )
    for heading in ("captions", "queries"):
        table.add_column(heading, no_wrap=True)
    for heading in ("R@1", "R@5", "R@10", "median"):
        table.add_column(heading, justify="right", no_wrap=True)
    for score in scores:
        for name, direction in (("image", score.retrieval.image_to_text), ("text", score.retrieval.text_to_image)):
            chances = score.chance["image_to_text" if name == "image" else "text_to_image"]
            cells = [
                f"{recall:.1f} [dim]({chance:.1f})[/dim]" for recall, chance in zip(direction.recalls, chances, strict=True)
            ]
            captions = f"{score.language} {score.portion}" if name == "image" else f"[dim]{score.split}[/dim]"
            table.add_row(captions, f"{direction.queries:,} {name}s", *cells, str(direction.median_rank))
    return table
