"""Curves of a run as a picture, and the look of all pictures: lines differ by colour, and in grey print by dashes and markers."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from schemas.escapes import escape_text
from schemas.fonts import draw_with_fonts
from schemas.storage.folder import Folder
from train.runs.history import History

_DIRECTIONS = {"image_to_text": "image to text", "text_to_image": "text to image"}
_CUTOFFS: dict[int, Any] = {10: "-", 5: (0, (5, 1.5)), 1: (0, (1.2, 1.2))}


def draw_curves(history: History, folder: Folder, name: str) -> None:
    """Draw what a run has logged.

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


SMALL, TINY = 8, 7
"""Sizes of text, in points: of labels, and of what stands inside a panel."""

GREY = "0.45"

# The colours of Okabe and Ito 2008, which the colour-blind tell apart, without the yellow that is lost on white.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#000000", "#E69F00")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (5, 1.2, 1.2, 1.2)), (0, (8, 2)))
_MARKS = 12
_POINTS_TO_SMOOTH = 60


class Style(NamedTuple):
    """How a line is drawn: its colour, its dashes, its marker."""

    color: str
    linestyle: Any
    marker: str


def style_of(number: int) -> Style:
    """Return the style of a line; all three repeat after different numbers of lines, so that none looks like another."""
    return Style(*(choices[number % len(choices)] for choices in (_COLOURS, _DASHES, _MARKERS)))


def new_figure(
    rows: int, columns: int, *, width: float = 7.2, height: float = 2.5, **options: Any
) -> tuple[Figure, list[Axes]]:
    """Return a figure, and its panels row by row.

    Width and height of a row are in inches; 7.2 are two columns of a paper. Options go to ``Figure.subplots``.
    """
    figure = Figure(figsize=(width, height * rows), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False, **options).flat)
    for panel in panels:
        panel.grid(color="0.88", linewidth=0.6)
        panel.set_axisbelow(True)
        panel.tick_params(labelsize=TINY, length=2.5)
        panel.spines[["top", "right"]].set_visible(False)
        panel.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        panel.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        panel.xaxis.label.set_size(SMALL)
        panel.yaxis.label.set_size(SMALL)
    return figure, panels


def draw_series(
    panel: Axes,
    steps: Sequence[int],
    values: Sequence[float],
    style: Style,
    *,
    smooth: bool = False,
    pale: bool = False,
    offset: int = 0,
    **options: Any,
) -> None:
    """Draw a line with a few markers; nothing where there are no values.

    With ``smooth`` many values become their running mean, with ``pale`` drawn over themselves. Lines with another ``offset``,
    their number, have their markers at other places. Options, such as the label, go to ``Axes.plot``.
    """
    if not values:
        return
    if smooth and is_smoothed(values):
        if pale:
            panel.plot(steps, values, color=style.color, linewidth=0.5, alpha=0.25, zorder=1.5)
        values = running_mean(values)
    every = max(1, len(values) // _MARKS)
    marks: Any = 1 if every == 1 else (offset * every // 4 % every, every)
    defaults = {"markersize": 3.5, "linewidth": 1.2, "markevery": marks, "markeredgewidth": 0.8}
    panel.plot(steps, values, **{**style._asdict(), **defaults, **options})


def is_smoothed(values: Sequence[float]) -> bool:
    """Tell whether `draw_series` smooths a line, if it may."""
    return len(values) > _POINTS_TO_SMOOTH


def running_mean(values: Sequence[float]) -> list[float]:
    """Return the means over a window around each value, a thirtieth of the series wide and narrower at its ends."""
    reach = max(1, len(values) // _POINTS_TO_SMOOTH)
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    means = []
    for place in range(len(values)):
        near = min(reach, place, len(values) - 1 - place)
        means.append((sums[place + near + 1] - sums[place - near]) / (2 * near + 1))
    return means


def plain(text: str) -> str:
    """Return a label for matplotlib, which takes dollars for mathematics, and hides what begins with an underscore.

    Control characters are escapes; line feeds stay.
    """
    return (" " if text.startswith("_") else "") + escape_text(text, lines=True).replace("$", r"\$")


def mark_empty(panel: Axes) -> None:
    """Say in a panel without lines that it has none."""
    if not panel.lines:
        panel.text(0.5, 0.5, "nothing logged yet", ha="center", transform=panel.transAxes, fontsize=SMALL, color=GREY)


def fit_percent(panel: Axes) -> None:
    """Let an axis of percentages begin at 0 and end no later than a marker's height above 100."""
    panel.set_ylim(0, min(103.0, panel.get_ylim()[1]) if panel.lines else 100.0)


def save(figure: Figure, folder: Folder, name: str) -> None:
    """Write a figure, whole or not at all, in the format of its name: ``.png``, ``.pdf`` or ``.svg``.

    The same figure gives the same bytes: without the date, and the version of matplotlib, that PDF and SVG files name. Characters
    that matplotlib's font lacks are drawn with fonts of this machine.
    """
    kind = name.rpartition(".")[2]
    metadata = {"png": {"Software": None}, "pdf": {"CreationDate": None}, "svg": {"Date": None}}[kind]

    def draw() -> bytes:
        data = io.BytesIO()
        figure.savefig(data, format=kind, dpi=200, metadata=metadata)
        return data.getvalue()

    data = draw_with_fonts(figure, draw)
    with folder.replace(name) as file:
        file.write(data)
