"""The ranks of single captions, see `train.reports.gold_ranks`, for a terminal, as Markdown and as JSON."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table
from rich.text import Text

from schemas.escapes import escape_text, to_json
from schemas.storage.folder import Folder
from train.reports.gold_published import GOLD_COLUMNS
from train.reports.gold_ranks import GoldRanks, RankedCaption, Tally

__all__ = ["gold_rank_markdown", "gold_rank_tables", "write_gold_ranks"]

_NAME = "gella2017-table-3"


def write_gold_ranks(ranks: GoldRanks, output: str) -> list[str]:
    """Write the ranks into a folder as ``gella2017-table-3.md`` and ``.json``, and return these names."""
    plain = to_json(ranks.to_dict(), indent=2) + "\n"
    contents = {f"{_NAME}.md": gold_rank_markdown(ranks), f"{_NAME}.json": plain}
    for name, content in contents.items():
        Folder(output).write(name, content.encode())
    return list(contents)


def gold_rank_markdown(ranks: GoldRanks) -> str:
    """Return the ranks as Markdown, published ones in brackets."""
    parts = ["# gella2017, table 3: ranks of the right image", "", *(f"- {note}" for note in _notes(ranks))]
    for title, captions in _sections(ranks):
        lines = [["image", "language", "caption", *GOLD_COLUMNS], ["---"] * 3 + ["---:"] * len(GOLD_COLUMNS)]
        for caption in captions:
            cells = [f"{caption.rank_text(name)}{_bracketed(caption, name)}" for name in GOLD_COLUMNS]
            lines.append([caption.image_id, caption.language, caption.text.replace("|", "\\|"), *cells])
        parts += ["", f"## {title}", "", *(_rows(lines) if captions else ["None."])]
    lines = [["language", "row", "captions", "median rank", "better than OE", "worse"], ["---"] * 2 + ["---:"] * 4]
    parts += ["", "## Table 3: all captions", "", *_rows([*lines, *map(_tally_texts, ranks.tallies)])]
    return escape_text("\n".join(parts), lines=True) + "\n"


def gold_rank_tables(ranks: GoldRanks) -> list[Table]:
    """Return the ranks as tables for a terminal of 80 columns."""
    tables = []
    for title, captions in _sections(ranks):
        table = _table(title, GOLD_COLUMNS)
        for caption in captions:
            table.add_row(Text(f"{caption.language}: {caption.text}"), *map(caption.rank_text, GOLD_COLUMNS))
            published = [str(caption.published[name]) for name in GOLD_COLUMNS] if caption.published else []
            label = f"  {'published, ' if published else ''}image {caption.image_id}"
            table.add_row(Text(label), *published, style="dim")
        if captions:
            tables.append(table)
    table = _table("Table 3: all captions", ("captions", "median", "better than OE", "worse"))
    for language, column, *texts in map(_tally_texts, ranks.tallies):
        table.add_row(f"{language} {column}", *texts)
    return [*tables, table]


def _sections(ranks: GoldRanks) -> list[tuple[str, tuple[RankedCaption, ...]]]:
    return [
        ("Table 3: the captions of the paper", ranks.published),
        ("Table 3: where PIVOT and PARALLEL gain most over OE, as the paper chooses", ranks.examples),
    ]


def _notes(ranks: GoldRanks) -> list[str]:
    runs = ", ".join(f"{preset} {count}" for preset, count in ranks.runs.items())
    return [
        f"Rank of the image of a caption among {ranks.images:,} test images, the published one in brackets; OE is the row of the "
        "caption's language alone.",
        f"Runs: {runs}. Of several, the median rank is shown, with the least and the greatest in square brackets.",
        "By the paper's rule, those images are chosen on which PIVOT and PARALLEL gain most over OE in both languages: they show "
        "the best, not the usual.",
    ]


def _bracketed(caption: RankedCaption, name: str) -> str:
    return f" ({caption.published[name]})" if caption.published else ""


def _tally_texts(tally: Tally) -> list[str]:
    shares = ["" if share is None else f"{share:.1f} %" for share in (tally.better, tally.worse)]
    return [tally.language, tally.column, f"{tally.captions:,}", f"{tally.median_rank:g}", *shares]


def _rows(lines: Iterable[Iterable[str]]) -> list[str]:
    return [f"| {' | '.join(line)} |" for line in lines]


def _table(title: str, columns: Iterable[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("rank of the right image" if columns is GOLD_COLUMNS else "")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table
