"""Training curves of a run, and the style of all figures."""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from schemas.drawing.fonts import draw_with_fonts
from schemas.drawing.style import Axes, Figure, Line2D, MaxNLocator, own_style
from schemas.escapes import escape_text
from schemas.storage.folder import Folder
from train.runs.history import History

_DIRECTIONS = {"image_to_text": "image to text", "text_to_image": "text to image"}
_CUTOFFS: dict[int, Any] = {10: "-", 5: (0, (5, 1.5)), 1: (0, (1.2, 1.2))}


@own_style()
def draw_curves(history: History, folder: Folder, name: str) -> None:
    """Draw the log of a run.

    Raises:
        DatasetError: the picture cannot be written.
    """
    terms = [*history.losses("step"), *history.losses("validation")]
    kinds = list(dict.fromkeys(name.partition("/")[0] for name in terms)) or [""]  # Kinds differ in scale.
    rows = len(kinds) // 2 + 2  # The last one has recalls.
    figure, panels = new_figure(rows, 2, sharex=True)
    losses, rate, recalls = panels[: len(kinds)], panels[len(kinds)], panels[-2:]
    for panel in panels[len(kinds) + 1 : -2]:
        panel.set_visible(False)
    for kind, panel in zip(kinds, losses, strict=True):
        _draw_losses(panel, history, kind)
    draw_series(rate, *history.series("step", "learning_rate"), style_of(0)._replace(marker=""))
    rate.set_ylabel("learning rate")
    rate.set_ylim(bottom=0)
    rate.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)
    rate.yaxis.get_offset_text().set_fontsize(TINY)
    for panel, (direction, words) in zip(recalls, _DIRECTIONS.items(), strict=True):
        for index, language in enumerate(history.languages):
            for cutoff, dashes in _CUTOFFS.items():
                style = style_of(index)._replace(linestyle=dashes)
                recalls_at = history.series("evaluation", language, direction, f"recall_at_{cutoff}")
                draw_series(panel, *recalls_at, style, offset=index)
        _draw_chance(panel, history, direction)
        panel.set_ylabel(f"validation recall, {words} (%)")
        panel.set_xlabel("step")
        panel.set_ylim(0, min(103.0, panel.get_ylim()[1]) if panel.lines else 100.0)  # 100 %, and the height of a marker.
    best = history.best
    if best is not None:
        for panel in recalls:
            panel.axvline(best["step"], color=GREY, linewidth=0.8, zorder=1)
        handles = _handles(history.languages, best["step"])
        figure.legend(handles=handles, loc="outside lower center", ncols=8, fontsize=TINY, frameon=False)
    for panel in (*losses, rate, *recalls):
        mark_empty(panel)
    rate.set_xlim(0, 1.02 * max(history.last_step, 1))
    save(figure, folder, name)


def _draw_chance(panel: Axes, history: History, direction: str) -> None:
    languages: dict[tuple[float, ...], list[str]] = {}
    for language in history.languages:
        if scores := history.chance(language).get(direction):
            languages.setdefault(tuple(scores[f"recall_at_{cutoff}"] for cutoff in sorted(_CUTOFFS)), []).append(language)
    texts = [" ".join([*names, *(f"{recall:.1f}" for recall in recalls)]) for recalls, names in languages.items()]
    draw_chance(panel, [recall for recalls in languages for recall in recalls], ", ".join(texts))


def draw_chance(panel: Axes, scores: Sequence[float], text: str) -> None:
    """Draw thin dashed lines at scores of chance, with a text above the panel."""
    for score in scores:
        panel.axhline(score, color=GREY, linestyle=(0, (4, 3)), linewidth=0.6, zorder=1)
    if scores:
        panel.set_title(plain(f"chance: {text}"), loc="right", fontsize=TINY, color=GREY)


def _draw_losses(panel: Axes, history: History, kind: str) -> None:
    # A language has one style in all panels; terms of no language, or of two, follow.
    training, validation = history.losses(), history.losses("validation")
    languages = {name: name.removeprefix("c2i/") for name in {**training, **validation}}
    order = list(dict.fromkeys([*history.languages, *languages.values()]))
    names = [name for name in languages if name.partition("/")[0] == kind]
    for name in sorted(names, key=lambda name: order.index(languages[name])):
        index, label = order.index(languages[name]), plain(name.replace("/", ", "))
        if name in training:
            draw_series(panel, *training[name], style_of(index), smooth=True, pale=True, offset=index, label=label)
        if name in validation:
            label += ", validation"
            draw_series(panel, *validation[name], style_of(index), offset=index, label=label, mfc="white", linewidth=0.7)
    panel.set_ylabel("loss per query")
    panel.set_ylim(bottom=0)
    if panel.lines:
        smoothed = any(is_smoothed(training[name].values) for name in names if name in training)
        title = "running means; pale: as logged" if smoothed else None
        # Above the panel, to hide no line.
        place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.2, "alignment": "left"}
        panel.legend(fontsize=TINY, frameon=False, title=title, title_fontsize=TINY, ncols=2, **place)


def _handles(names: Sequence[str], best_step: int) -> list[Line2D]:
    """Return the legend of recalls: languages, cutoffs, and the best step."""
    languages = [
        Line2D([], [], **(style_of(index)._asdict() | {"linestyle": "-"}), markersize=4, linewidth=1.2, label=plain(language))
        for index, language in enumerate(names)
    ]
    cutoffs = [Line2D([], [], color=GREY, linestyle=dashes, linewidth=1.2, label=f"R@{k}") for k, dashes in _CUTOFFS.items()]
    best = Line2D([], [], color=GREY, marker="|", markersize=9, linestyle="", label=f"best model, step {best_step:,}")
    return [*languages, *cutoffs, best]


SMALL, TINY = 8, 7
"""Font sizes in points: of labels, and of text inside a panel."""

GREY = "0.45"

# The colour-blind safe palette of Okabe and Ito 2008, without yellow, which is illegible on white.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#000000", "#E69F00")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (5, 1.2, 1.2, 1.2)), (0, (8, 2)))
_MARKS = 12
_POINTS_TO_SMOOTH = 60


class Style(NamedTuple):
    """Style of a line."""

    color: str
    linestyle: Any
    marker: str


def style_of(index: int) -> Style:
    """Return a unique style: colours, dashes and markers have different periods."""
    return Style(*(choices[index % len(choices)] for choices in (_COLOURS, _DASHES, _MARKERS)))


def new_figure(
    rows: int, columns: int, *, width: float = 7.2, height: float = 2.5, **options: Any
) -> tuple[Figure, list[Axes]]:
    """Return a figure and its panels, row by row.

    Sizes are in inches: the width of the figure, by default two columns of a paper, and the height of a row. Options are those of
    ``Figure.subplots``.
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
    """Draw a line with a few markers, if it has values.

    ``smooth`` replaces many values by their running mean, and ``pale`` draws the values below it. ``offset``, the index of the
    line, shifts its markers. Options are those of ``Axes.plot``, e.g. the label.
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
    """Return whether `draw_series` with ``smooth`` smooths these values."""
    return len(values) > _POINTS_TO_SMOOTH


def running_mean(values: Sequence[float]) -> list[float]:
    """Return the mean over a centred window at each value, narrower at the ends."""
    max_radius = max(1, len(values) // _POINTS_TO_SMOOTH)
    sums = [0.0, *accumulate(values)]
    radii = [min(max_radius, index, len(values) - 1 - index) for index in range(len(values))]
    return [(sums[index + r + 1] - sums[index - r]) / (2 * r + 1) for index, r in enumerate(radii)]


def plain(text: str) -> str:
    """Escape a label for matplotlib.

    Dollars begin mathematics, and a leading underscore hides the label. Control characters except line feeds become escapes.
    """
    return (" " if text.startswith("_") else "") + escape_text(text, lines=True).replace("$", r"\$")


def mark_empty(panel: Axes) -> None:
    """Write a note into a panel without lines."""
    if not panel.lines:
        panel.text(0.5, 0.5, "nothing logged yet", ha="center", transform=panel.transAxes, fontsize=SMALL, color=GREY)


@own_style()
def save(figure: Figure, folder: Folder, name: str, dpi: int = 200) -> None:
    """Write a figure atomically as ``.png``, ``.pdf`` or ``.svg``, by its name.

    Equal figures give equal bytes, since dates and the version of matplotlib are left out. Characters that matplotlib's font lacks
    are drawn with fonts of this machine.
    """
    kind = name.rpartition(".")[2]
    metadata = {"png": {"Software": None}, "pdf": {"CreationDate": None}, "svg": {"Date": None}}[kind]

    def draw() -> bytes:
        data = io.BytesIO()
        figure.savefig(data, format=kind, dpi=dpi, metadata=metadata)
        return data.getvalue()

    data = draw_with_fonts(figure, draw)
    with folder.replace(name) as file:
        file.write(data)
