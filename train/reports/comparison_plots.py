"""Runs side by side as a picture: loss, and recalls on the validation split in each language, over their steps."""

from __future__ import annotations

import os
from typing import Any

from matplotlib.lines import Line2D

from schemas.errors import UsageError
from schemas.storage.folder import Folder
from train.reports.comparison import Comparison
from train.runs.plotting import SMALL, TINY, draw_series, is_smoothed, mark_empty, new_figure, plain, save, style_of

FORMATS = (".png", ".pdf", ".svg")

_NAME = "comparison.png"
_LINES_OF_A_PANEL = 12


def picture_place(output: str | os.PathLike[str]) -> tuple[Folder, str]:
    """Return folder and name of the picture, from its path or a folder.

    Raises:
        UsageError: the format is unknown.
    """
    location = os.fspath(output)
    folder, _, name = location.rstrip("/").rpartition("/")
    suffix = os.path.splitext(name)[1]  # noqa: PTH122 -- may be in a bucket
    if location.endswith("/") or not suffix:
        return Folder(location.rstrip("/") or "/"), _NAME
    if suffix not in FORMATS:
        raise UsageError(f"--output is {location!r}, expected a folder, or a file that ends in {', '.join(FORMATS)}")
    return Folder(folder or ("/" if location.startswith("/") else ".")), name


def plot_comparison(comparison: Comparison, output: str | os.PathLike[str]) -> str:
    """Draw runs side by side. Runs that differ in their seeds alone look alike.

    Args:
        comparison: the runs.
        output: path of the picture, ``.png``, ``.pdf`` or ``.svg``; or a folder, for ``comparison.png`` in it.

    Returns:
        Location of the picture.

    Raises:
        UsageError: the format is unknown.
        DatasetError: the picture cannot be written.
    """
    folder, name = picture_place(output)
    languages = comparison.languages
    count = 1 + max(1, len(languages))
    figure, panels = new_figure((count + 1) // 2, 2)
    losses, recalls = panels[0], dict(zip(languages, panels[1:], strict=False))
    grouped = {run.name for group in comparison.groups for run in group.runs}
    labels: dict[str, int] = {}
    for run in comparison.runs:
        number = labels.setdefault(comparison.label(run), len(labels))
        style = style_of(number)
        thin: dict[str, Any] = {"linewidth": 0.9, "alpha": 0.8} if run.name in grouped else {}
        draw_series(losses, *run.history.loss, style, smooth=True, offset=number, **thin)
        for language, panel in recalls.items():
            draw_series(panel, *run.history.sum_of_recalls(language), style, offset=number, **thin)
    smoothed = any(is_smoothed(run.history.loss.values) for run in comparison.runs)
    losses.set_ylabel("loss per query" + (" (running mean)" if smoothed else ""))
    for language, panel in recalls.items():
        panel.set_ylabel(f"validation recalls, {plain(language)} (sum)")
    last = max(run.history.last_step for run in comparison.runs)
    for panel in panels[:count]:
        panel.set_xlabel("step")
        panel.set_xlim(0, 1.02 * max(last, 1))
        panel.set_ylim(bottom=0)
        mark_empty(panel)
    handles = [
        Line2D([], [], **style_of(number)._asdict(), markersize=4, linewidth=1.2, label=plain(label))
        for label, number in labels.items()
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
