"""The scores of a run as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from rich.markup import escape
from rich.table import Table

from train.evaluation.averaging import Average, averages
from train.evaluation.metrics import Retrieval
from train.evaluation.scoring import Score

__all__ = ["across_table", "average_table", "plain_table", "score_table"]

_CUTOFFS = ("R@1", "R@5", "R@10", "median")


def score_table(scores: Sequence[Score], *, title: str) -> Table:
    """Return a table of recalls, with those of chance in brackets, and median ranks for each language, portion and split."""
    folds = f"; means over {scores[0].folds} folds of the images" if scores and scores[0].folds > 1 else ""
    table = plain_table(title, f"recalls in percent, in brackets those of chance; median: median rank{folds}")
    for heading in ("captions", "queries"):
        table.add_column(heading, no_wrap=True)
    for heading in _CUTOFFS:
        table.add_column(heading, justify="right", no_wrap=True)
    for score in scores:
        for name, direction in (("image", score.retrieval.image_to_text), ("text", score.retrieval.text_to_image)):
            chances = score.chance["image_to_text" if name == "image" else "text_to_image"]
            cells = _cells(direction.recalls, chances)
            captions = escape(f"{score.language} {score.portion}") if name == "image" else f"[dim]{escape(score.split)}[/dim]"
            table.add_row(captions, f"{direction.queries:,} {name}s", *cells, str(direction.median_rank))
    return table


def average_table(scores: Sequence[Score]) -> Table | None:
    """Return a table of mean recalls and sums of recalls, also over the languages of a portion; None for a single score."""
    if len(scores) < 2:
        return None
    table = plain_table(None, "means of R@1, R@5 and R@10 in percent; mR: of all six; sum: of all six, 0 to 600")
    table.add_column("captions", no_wrap=True)
    for heading in ("image to text", "text to image", "mR", "sum"):
        table.add_column(heading, justify="right", no_wrap=True)
    means = {(average.split, average.portion): average for average in averages(scores)}
    for number, score in enumerate(scores):
        group, following = (score.split, score.portion), [(other.split, other.portion) for other in scores[number + 1 :]]
        retrieval = score.retrieval
        recalls = retrieval.image_to_text.recalls, retrieval.text_to_image.recalls
        _add_means(table, f"{escape(f'{score.portion} {score.language}')} [dim]{escape(score.split)}[/dim]", recalls, retrieval)
        if group in means and group not in following:
            average = means[group]
            name = f"{escape(score.portion)} [bold]mean[/bold] [dim]{escape(score.split)}[/dim]"
            _add_means(table, name, (average.image_to_text, average.text_to_image), average)
    return table


def across_table(scores: Sequence[Score]) -> Table | None:
    """Return a table of captions that are ranked among those of another language; None if none were."""
    if not any(score.across_languages for score in scores):
        return None
    table = plain_table("captions among captions of the same images", "right: any caption of the same image")
    for heading in ("captions", "queries"):
        table.add_column(heading, no_wrap=True)
    for heading in _CUTOFFS:
        table.add_column(heading, justify="right", no_wrap=True)
    group = None
    for score in scores:
        for language, found in score.across_languages.items():
            if group != (score.portion, score.split):
                group = score.portion, score.split
                table.add_row(*(f"[dim]{escape(name)}[/dim]" for name in group))
            direction = found.direction
            cells = _cells(direction.recalls, found.chance)
            table.add_row(
                escape(f"  {score.language} to {language}"), f"{direction.queries:,}", *cells, str(direction.median_rank)
            )
    return table


def plain_table(title: str | None, caption: str | None = None, *, gap: int = 2) -> Table:
    """Return a table without borders, whose columns are ``gap`` blanks apart."""
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        caption=caption,
        caption_justify="left",
        box=None,  # Borders and wide padding would break the lines of a terminal of 80 columns.
        padding=(0, gap, 0, 0),
        pad_edge=False,
    )


def _cells(recalls: Sequence[float], chances: Sequence[float]) -> list[str]:
    return [f"{recall:.1f} [dim]({chance:.1f})[/dim]" for recall, chance in zip(recalls, chances, strict=True)]


def _add_means(table: Table, name: str, recalls: Sequence[Sequence[float]], whole: Retrieval | Average) -> None:
    table.add_row(
        name,
        *(f"{mean(of_direction):.1f}" for of_direction in recalls),
        f"{whole.mean_recall:.1f}",
        f"{whole.sum_of_recalls:.1f}",
    )
