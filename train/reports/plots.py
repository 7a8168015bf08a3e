"""Plots of measured and published rows, textual similarity and compared runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from schemas.drawing import Axes, Figure, Line2D, own_style
from schemas.errors import UsageError
from schemas.storage.folder import Folder, file_at
from train.evaluation.sts import StsResult
from train.reports.comparison import SUM, ComparedRow, Comparison
from train.reports.reproduce_report import PaperReport, Section
from train.runs.curves import (
    GREY,
    SMALL,
    TINY,
    draw_chance,
    draw_series,
    is_smoothed,
    mark_empty,
    new_figure,
    plain,
    save,
    style_of,
)

_COLOURS = {"image_to_text": "tab:blue", "text_to_image": "tab:orange"}
_MEASURE = "recall_at_10"


@own_style()
def plot_report(report: PaperReport, path: Path) -> None:
    """Draw a panel for each table: dots are measured, rings are published."""
    heights = [len(section.lines) + 2 for section in report.sections]
    figure = Figure(figsize=(8, 0.28 * sum(heights) + 0.6), layout="constrained")
    panels = figure.subplots(len(report.sections), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for section, panel in zip(report.sections, panels, strict=True):
        _draw_section(section, panel)
    panels[-1].set_xlabel("R@10, percent: ● measured, ○ published, × chance\nblue: image to text, orange: text to image")
    figure.suptitle(f"{report.paper}: measured beside published")
    save(figure, Folder(str(path.parent)), path.name, dpi=150)


def _draw_section(section: Section, panel: Axes) -> None:
    panel.set_title(section.title, loc="left", fontsize="medium")
    panel.set_yticks(range(len(section.lines)), [f"{line.row.name}, {line.row.language}" for line in section.lines])
    panel.set_ylim(len(section.lines) - 0.4, -0.6)
    panel.grid(axis="x", alpha=0.3)
    for height, line in enumerate(section.lines):
        for direction, colour in _COLOURS.items():
            cell = line.cells[direction, _MEASURE]
            if cell.published is not None:
                panel.plot(cell.published, height, marker="o", mfc="none", color=colour)
            if cell.chance is not None:
                panel.plot(cell.chance, height, marker="x", markersize=4, color=colour)
            if cell.mean is not None and (direction, _MEASURE) in section.columns:
                panel.errorbar(cell.mean, height, xerr=cell.deviation or 0.0, marker="o", color=colour, capsize=2)


_TITLE, _LABEL = 17, 32  # Maximum characters above a panel and along its height.


@own_style()
def plot_sts(result: StsResult, output: str) -> str:
    """Draw ``sts.png`` into a folder, by system (rows) and data set (columns).

    Returns:
        Location of the picture.

    Raises:
        DatasetError: the picture cannot be written.
    """
    across = len(result.data)
    figure, panels = new_figure(
        len(result.systems), across, width=max(3.6, 2.4 * across), height=2.3, sharex="col", sharey="row"
    )
    for row, system in enumerate(result.systems):
        style = style_of(row)
        for column, pairs in enumerate(result.data):
            panel, pearson = panels[row * across + column], system.correlations[column].pearson
            dots: dict[str, Any] = {"s": 7, "color": style.color, "marker": style.marker, "alpha": 0.35, "linewidths": 0}
            panel.scatter(pairs.scores, system.similarities[column], **dots)
            text = "r undefined" if pearson is None else f"r = {pearson / 100:.3f}"
            panel.set_title(f"n = {len(pairs):,}, {text}", loc="right", fontsize=TINY, color=GREY)
            if row == 0:
                panel.set_title(plain(_cut(pairs.name, _TITLE)), loc="left", fontsize=SMALL)
        panels[row * across].set_ylabel(f"{plain(_cut(system.name, _LABEL))}\ncosine")
    for panel in panels[-across:]:
        panel.set_xlabel("gold score")
    folder = Folder(output)
    save(figure, folder, "sts.png")
    return folder.path_of("sts.png")


def _cut(text: str, length: int) -> str:
    """Shorten a text at its beginning, since paths differ at their ends."""
    return text if len(text) <= length else f"…{text[1 - length :]}"


FORMATS = (".png", ".pdf", ".svg")

_NAME = "comparison.png"
_LINES_OF_A_PANEL = 12


def picture_place(output: str | os.PathLike[str]) -> tuple[Folder, str]:
    """Return folder and name of the picture, from its path or a folder.

    Raises:
        UsageError: the format is unknown.
    """
    location = os.fspath(output)
    suffix = os.path.splitext(location)[1]  # noqa: PTH122 -- may be in a bucket
    if not suffix:
        return Folder(location.rstrip("/") or "/"), _NAME
    if suffix not in FORMATS:
        raise UsageError(f"--output is {location!r}, expected a folder, or a file that ends in {', '.join(FORMATS)}")
    return file_at(location)


@own_style()
def plot_comparison(comparison: Comparison, output: str | os.PathLike[str]) -> str:
    """Draw losses and validation recalls of runs.

    Runs that differ only in their seeds share a style. The output is the path of a ``.png``, ``.pdf`` or ``.svg``, or a folder for
    ``comparison.png``.

    Returns:
        Location of the picture.

    Raises:
        UsageError: the format is unknown.
        DatasetError: the picture cannot be written.
    """
    folder, name = picture_place(output)
    galleries = comparison.galleries
    count = 1 + max(1, len(galleries))
    figure, panels = new_figure((count + 1) // 2, 2)
    losses, recalls = panels[0], dict(zip(galleries, panels[1:], strict=False))
    rows: dict[ComparedRow, int] = {}
    for run in comparison.runs:
        row = comparison.row_of(run)
        index = rows.setdefault(row, len(rows))
        style = style_of(index)
        thin: dict[str, Any] = {"linewidth": 0.9, "alpha": 0.8} if len(row.runs) > 1 else {}
        draw_series(losses, *run.history.series("step", "loss"), style, smooth=True, offset=index, **thin)
        for gallery, panel in recalls.items():
            if gallery in run.measured:
                series = run.history.series("evaluation", gallery.language, "sum_of_recalls")
                draw_series(panel, *series, style, offset=index, **thin)
                if not series.values:  # An evaluation has no curve.
                    panel.axhline(run.measured[gallery].scores[SUM], color=style.color, ls=style.linestyle, lw=1.2)
    smoothed = any(is_smoothed(run.history.series("step", "loss").values) for run in comparison.runs)
    losses.set_ylabel("loss per query" + (" (running mean)" if smoothed else ""))
    for gallery, panel in recalls.items():
        panel.set_ylabel(plain(f"sum of recalls, {gallery.language}\n{', '.join(gallery.portions)} {gallery.split}".rstrip()))
        if chance := comparison.chance(gallery):
            draw_chance(panel, [chance[SUM]], f"{chance[SUM]:.1f}")
    last = max(run.history.last_step for run in comparison.runs)
    for panel in panels[:count]:
        panel.set(xlabel="step", xlim=(0, 1.02 * max(last, 1)), ylim=(0, None))
        mark_empty(panel)
    handles = [
        Line2D([], [], **style_of(index)._asdict(), markersize=4, linewidth=1.2, label=plain(row.label))
        for row, index in rows.items()
    ]
    columns = max(1, min(6, 110 // (max(len(row.label) for row in rows) + 8)))
    if count < len(panels) and len(handles) <= _LINES_OF_A_PANEL:
        panels[-1].set_axis_off()
        panels[-1].legend(handles=handles, loc="center left", fontsize=SMALL, frameon=False)
    else:
        for panel in panels[count:]:
            panel.set_visible(False)
        figure.legend(handles=handles, loc="outside lower center", ncols=columns, fontsize=TINY, frameon=False)
    save(figure, folder, name)
    return folder.path_of(name)
