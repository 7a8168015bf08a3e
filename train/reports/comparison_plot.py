"""Picture of ``imagepivot compare``: losses and validation recalls."""

from __future__ import annotations

import os
from typing import Any

from schemas.drawing.charts import SMALL, TINY, draw_series, is_smoothed, mark_empty, new_figure, plain, save, style_of
from schemas.drawing.style import Line2D, own_style
from schemas.errors import UsageError
from schemas.storage.folder import Folder, file_at
from schemas.storage.locations import short_names
from train.reports.compared_runs import SUM
from train.reports.comparison import ComparedRow, Comparison
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
