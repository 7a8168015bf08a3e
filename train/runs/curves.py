"""Training curves of a run."""

from collections.abc import Sequence
from typing import Any

from schemas.drawing.charts import GREY, TINY, draw_series, is_smoothed, mark_empty, new_figure, plain, style_of
from schemas.drawing.style import Axes, Figure, Line2D, own_style
from train.runs.history import History

_DIRECTIONS = {"image_to_text": "image to text", "text_to_image": "text to image"}
_CUTOFFS: dict[int, Any] = {10: "-", 5: (0, (5, 1.5)), 1: (0, (1.2, 1.2))}


@own_style()
def plot_curves(history: History) -> Figure:
    """Return a figure of losses, recalls, and the learning rate if it varies."""
    terms = [*history.losses("step"), *history.losses("validation")]
    kinds = list(dict.fromkeys(name.partition("/")[0] for name in terms)) or [""]  # A panel each, since they differ in scale.
    rates = history.series("step", "learning_rate")
    has_rate = len(set(rates.values)) > 1
    rows = (len(kinds) + has_rate + 1) // 2 + 1  # The last one has recalls.
    figure, panels = new_figure(rows, 2, sharex=True)
    losses, recalls = panels[: len(kinds)], panels[-2:]
    for panel in panels[len(kinds) + has_rate : -2]:
        panel.set_visible(False)
    for kind, panel in zip(kinds, losses, strict=True):
        _draw_losses(panel, history, kind)
    if has_rate:
        rate = panels[len(kinds)]
        draw_series(rate, *rates, style_of(0)._replace(marker=""))
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
        _draw_chance_recalls(panel, history, direction)
        panel.set_ylabel(f"validation recall, {words} (%)")
        panel.set_xlabel("step")
        panel.set_ylim(0, min(103.0, panel.get_ylim()[1]) if panel.lines else 100.0)  # 100 %, and the height of a marker.
    best = history.best
    if best is not None:
        for panel in recalls:
            panel.axvline(best["step"], color=GREY, linewidth=0.8, zorder=1)
        handles = _handles(history.languages, best["step"])
        figure.legend(handles=handles, loc="outside lower center", ncols=8, fontsize=TINY, frameon=False)
    for panel in (*losses, *recalls):
        mark_empty(panel)
    losses[0].set_xlim(0, 1.02 * max(history.last_step, 1))
    return figure


def _draw_chance_recalls(panel: Axes, history: History, direction: str) -> None:
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
    # A language has one style in all panels; losses of no language, or of two, follow.
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
