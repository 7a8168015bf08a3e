"""Picture of ``imagepivot compare``: losses, validation recalls and scores."""

import os
from collections.abc import Mapping
from statistics import mean
from typing import Any

from schemas.drawing.charts import GREY, SMALL, TINY, draw_series, is_smoothed, mark_empty, new_figure, plain, save, style_of
from schemas.drawing.style import Axes, Line2D, own_style
from schemas.errors import UsageError
from schemas.escapes import short_names
from schemas.storage.folder import Folder, file_at
from train.chance import RECALLS
from train.reports.compared_runs import SCORES, SUM, RankedGallery
from train.reports.comparison import ARROWS, SHORT, ComparedRow, Comparison
from train.runs.curves import draw_chance

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
    """Draw losses, validation recalls, and scores with intervals, two columns wide.

    Runs that differ only in their seeds share a style and their mean scores. The output is the path of a
    ``.png``, ``.pdf`` or ``.svg``, or a folder for ``comparison.png``.

    Returns:
        Location of the picture.

    Raises:
        UsageError: the format is unknown.
        DatasetError: the picture cannot be written.
    """
    folder, name = picture_place(output)
    galleries = comparison.galleries
    logged = [run for run in comparison.runs if run.history.entries]
    evaluated = [gallery for gallery in galleries if any(gallery in run.measured for run in logged)]
    num_curves = 1 + len(evaluated) if logged or not galleries else 0
    count = num_curves + len(galleries)
    figure, panels = new_figure((count + 1) // 2, 2, height=2.1)
    losses, recalls = panels[0], dict(zip(evaluated, panels[1:], strict=False))
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
    for panel in panels[:num_curves]:
        panel.set(xlabel="step", xlim=(0, 1.02 * max(last, 1)), ylim=(0, None))
        mark_empty(panel)
    for gallery, panel in zip(galleries, panels[num_curves:], strict=False):
        _draw_scores(panel, comparison, gallery, rows)
    names = zip(rows, short_names([row.name for row in rows]), strict=True)
    labels = [row.label.replace(row.name, name) for row, name in names]
    handles = [
        Line2D([], [], **style_of(index)._asdict(), markersize=4, linewidth=1.2, label=plain(label))
        for index, label in enumerate(labels)
    ]
    columns = max(1, min(6, 110 // (max(map(len, labels)) + 8)))
    if count < len(panels) and len(handles) <= _LINES_OF_A_PANEL:
        panels[-1].set_axis_off()
        panels[-1].legend(handles=handles, loc="center left", fontsize=SMALL, frameon=False)
    else:
        for panel in panels[count:]:
            panel.set_visible(False)
        figure.legend(handles=handles, loc="outside lower center", ncols=columns, fontsize=TINY, frameon=False)
    save(figure, folder, name)
    return folder.path_of(name)


def _draw_scores(panel: Axes, comparison: Comparison, gallery: RankedGallery, rows: Mapping[ComparedRow, int]) -> None:
    """Draw the recalls of rows side by side, with intervals and lines of chance."""
    pairs = [pair for pair in SCORES if pair[1] in RECALLS]
    for place, pair in enumerate(pairs):
        if level := comparison.chance(gallery).get(pair):
            panel.hlines(level, place - 0.45, place + 0.45, color=GREY, linestyle=(0, (4, 3)), linewidth=0.6)
        intervals = comparison.intervals.get((gallery, pair[0]), {})
        for row, index in rows.items():
            if (score := row.scores(gallery, mean).get(pair)) is not None:
                ends = getattr(intervals.get(row), pair[1], None)
                errors = [[max(0.0, score - ends.low)], [max(0.0, ends.high - score)]] if ends else None
                style = style_of(index)._replace(linestyle="none")._asdict()
                x = place + 0.8 * ((index + 0.5) / len(rows) - 0.5)
                panel.errorbar(x, score, yerr=errors, markersize=3, elinewidth=0.8, capsize=1.5, **style)
    panel.set_xticks(range(len(pairs)), [f"{ARROWS[direction]}\n{SHORT[measure]}" for direction, measure in pairs])
    panel.set(xlim=(-0.5, len(pairs) - 0.5), ylim=(0, min(103.0, panel.get_ylim()[1])))
    panel.grid(visible=False, axis="x")
    panel.set_ylabel(plain(f"recall (%), {gallery.language}\n{', '.join(gallery.portions)} {gallery.split}".rstrip()))
    if any(comparison.intervals.get((gallery, direction)) for direction, _ in pairs):
        panel.set_title("bars: 95 % intervals", loc="right", fontsize=TINY, color=GREY)
