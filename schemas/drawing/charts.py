"""Charts: panels, series, labels and files in one style."""

import io
from collections.abc import Iterable, Sequence
from itertools import accumulate, product
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from schemas.drawing.fonts import draw_with_fonts
from schemas.drawing.style import Axes, Figure, MaxNLocator, Text, own_style
from schemas.escapes import escape_text
from schemas.storage.folder import Folder

SMALL, TINY = 8, 7
"""Font sizes in points: of labels, and of text inside a panel."""

GREY = "0.45"

ONE_COLUMN, TWO_COLUMNS = 3.5, 7.2
"""Widths of pictures in inches: one and two columns of a paper (89 and 183 mm)."""

Place: TypeAlias = tuple[float, float, float, float]
"""Least x and y, greatest x and y."""

DPI = 300
"""Pixels per inch, of photographs also in PDF and SVG."""

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
    rows: int, columns: int, *, width: float = TWO_COLUMNS, height: float = 2.5, **options: Any
) -> tuple[Figure, list[Axes]]:
    """Return a figure and its panels, row by row.

    Sizes are in inches: the width of the figure, by default two columns of a paper, and the height of a row.
    Options are those of ``Figure.subplots``.
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

    ``smooth`` replaces many values by their running mean, and ``pale`` draws the values below it. ``offset``,
    the index of the line, shifts its markers. Options are those of ``Axes.plot``, e.g. the label.
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


def settle(figure: Figure) -> None:
    """Fix layout and fonts of a figure, so that texts have their extents."""
    draw_with_fonts(figure, figure.draw_without_rendering)
    figure.set_layout_engine("none")


def place_labels(
    panel: Axes, labels: Sequence[tuple[Text, Any]], taken: Iterable[Place], *, pad: float, reach: int
) -> list[str]:
    """Move labels of a settled figure beside what they name, hide those without room.

    Each label, a centred text, has two corners of what it names. ``pad`` pixels around these stay free, and
    so do the places that are taken. Returns the texts of hidden labels.
    """
    bounds, places, hidden = np.asarray(panel.bbox.extents), list(taken), []
    for text, corners in labels:
        ends, extent = panel.transData.transform(corners).clip(bounds[:2], bounds[2:]), Text.get_window_extent(text)
        target = (*(ends.min(0) - pad).tolist(), *(ends.max(0) + pad).tolist())
        place = place_beside((extent.width + 4, extent.height + 2), target, places, panel.bbox.extents, reach=reach)
        text.set_visible(place is not None)
        if place is None:
            hidden.append(text.get_text())
        else:
            places.append(place)
            x, y = panel.transData.inverted().transform(np.mean([place[:2], place[2:]], axis=0)).tolist()
            text.set_position((x, y))
    return hidden


def place_beside(
    label_wh: tuple[float, float], target: Place, taken: Sequence[Place], bounds: Place, *, reach: int = 1
) -> Place | None:
    """Return a free place of a label at the corners of a target, or None.

    The distance is less than ``reach`` heights of the label. The label lies within the bounds, and meets
    neither the target nor a place that is taken.
    """
    width, height = label_wh
    obstacles = np.array([target, *taken], float)
    for distance in range(reach):
        left, low, right, high = np.add(target, np.multiply((-1, -1, 1, 1), distance * height))
        ends, sides = (left, right - width), (low, high - height)
        for x, y in [*product(ends, (low - height, high)), *product((right, left - width), sides)]:
            corner = np.clip((x, y), bounds[:2], np.subtract(bounds[2:], label_wh))
            place = np.concatenate([corner, corner + label_wh])
            apart = (place[2:] <= obstacles[:, :2]) | (obstacles[:, 2:] <= place[:2])
            if (corner >= bounds[:2]).all() and apart.any(1).all():
                return tuple(place.tolist())
    return None


def save(figure: Figure, folder: Folder, name: str) -> None:
    """Write a figure atomically as ``.png``, ``.pdf`` or ``.svg``, by its name.

    Equal figures give equal bytes, since dates and the version of matplotlib are left out. Characters that
    matplotlib's font lacks are drawn with fonts of this machine.
    """
    data = render_figure(figure, name.rpartition(".")[2])
    with folder.replace(name) as file:
        file.write(data)


@own_style()
def render_figure(figure: Figure, kind: str, dpi: int = DPI, **metadata: str) -> bytes:
    """Return a figure as ``png``, ``pdf`` or ``svg``, see `save`."""
    without: dict[str, Any] = {"png": {"Software": None}, "pdf": {"CreationDate": None}, "svg": {"Date": None}}[kind]

    def draw() -> bytes:
        data = io.BytesIO()
        figure.savefig(data, format=kind, dpi=dpi, metadata={**without, **metadata})
        return data.getvalue()

    return draw_with_fonts(figure, draw)
