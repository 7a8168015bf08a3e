"""The picture ``curves.png`` of a run: loss, learning rate, and recalls on the validation split, over its steps."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from schemas.storage.folder import Folder
from train.runs.history import History
from train.runs.plotting import GREY, TINY, draw_series, fit_percent, is_smoothed, mark_empty, new_figure, plain, save, style_of

_DIRECTIONS = {"image_to_text": "image to text", "text_to_image": "text to image"}
_CUTOFFS: dict[int, Any] = {10: "-", 5: (0, (5, 1.5)), 1: (0, (1.2, 1.2))}


def draw_curves(history: History, folder: Folder, name: str) -> None:
    """Draw what a run has logged.

    Args:
        history: the log.
        folder: where to write the picture.
        name: name of the file, which says its format.

    Raises:
        DatasetError: the picture cannot be written.
    """
    figure, (losses, rate, *recalls) = new_figure(2, 2, sharex=True)
    _draw_losses(losses, history)
    draw_series(rate, *history.learning_rate, style_of(0)._replace(marker=""))
    rate.set_ylabel("learning rate")
    rate.set_ylim(bottom=0)
    rate.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)
    rate.yaxis.get_offset_text().set_fontsize(TINY)
    for panel, (direction, words) in zip(recalls, _DIRECTIONS.items(), strict=True):
        for number, language in enumerate(history.languages):
            style = style_of(number)
            for cutoff, dashes in _CUTOFFS.items():
                draw_series(
                    panel, *history.recall(language, direction, cutoff), style._replace(linestyle=dashes), offset=number
                )
        panel.set_ylabel(f"validation recall, {words} (%)")
        panel.set_xlabel("step")
        fit_percent(panel)
    if history.best is not None:
        for panel in recalls:
            panel.axvline(history.best["step"], color=GREY, linewidth=0.8, zorder=1)
        figure.legend(handles=_handles(history), loc="outside lower center", ncols=8, fontsize=TINY, frameon=False)
    for panel in (losses, rate, *recalls):
        mark_empty(panel)
    losses.set_xlim(0, 1.02 * max(history.last_step, 1))
    save(figure, folder, name)


def _draw_losses(panel: Axes, history: History) -> None:
    # A language looks the same in all panels; what belongs to none, or to two, comes after them.
    training, validation = history.losses(), history.losses("validation")
    looks = {name: name.removeprefix("c2i/") for name in {**training, **validation}}
    order = list(dict.fromkeys([*history.languages, *looks.values()]))
    for name in sorted(looks, key=lambda name: order.index(looks[name])):
        number, label = order.index(looks[name]), plain(name.replace("/", ", "))
        if name in training:
            draw_series(panel, *training[name], style_of(number), smooth=True, pale=True, offset=number, label=label)
        if name in validation:
            draw_series(
                panel,
                *validation[name],
                style_of(number),
                offset=number,
                label=f"{label}, validation",
                mfc="white",
                linewidth=0.7,
            )
    panel.set_ylabel("loss per query")
    panel.set_ylim(bottom=0)
    if panel.lines:
        smoothed = any(is_smoothed(series.values) for series in training.values())
        title = "running means; pale: each batch" if smoothed else None
        # Above the panel, where it hides no line.
        place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.2, "alignment": "left"}
        panel.legend(fontsize=TINY, frameon=False, title=title, title_fontsize=TINY, ncols=2, **place)


def _handles(history: History) -> list[Line2D]:
    """Return the lines of a legend for both panels of recalls: languages, cutoffs, and the step of the best model."""
    languages = [
        Line2D([], [], color=style.color, marker=style.marker, markersize=4, linewidth=1.2, label=plain(language))
        for language, style in ((language, style_of(number)) for number, language in enumerate(history.languages))
    ]
    cutoffs = [Line2D([], [], color=GREY, linestyle=dashes, linewidth=1.2, label=f"R@{k}") for k, dashes in _CUTOFFS.items()]
    assert history.best is not None
    best = Line2D(
        [], [], color=GREY, marker="|", markersize=9, linestyle="", label=f"best model, step {history.best['step']:,}"
    )
    return [*languages, *cutoffs, best]
