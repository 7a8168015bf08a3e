"""Charts of pages, as SVG without background."""

from collections.abc import Mapping, Sequence

from pipelines.looking.pages import Chart
from schemas.drawing.charts import TINY, draw_series, new_figure, plain, render_figure, style_of
from schemas.drawing.style import Figure, own_style


@own_style()
def line_chart(
    title: str,
    series: Mapping[str, tuple[Sequence[int], Sequence[float]]],
    *,
    x_label: str,
    y_label: str,
    alternative: str,
) -> Chart:
    """Draw a line for each name; the text in place of the chart follows its title."""
    figure, [panel] = new_figure(1, 1, width=6.4, height=2.8)
    for index, (name, (places, values)) in enumerate(series.items()):
        draw_series(panel, places, values, style_of(index), offset=index, label=plain(name))
    panel.set(xlabel=x_label, ylabel=y_label)
    panel.set_ylim(bottom=0)
    if len(series) > 1:
        figure.legend(loc="outside right upper", fontsize=TINY, frameon=False)
    return chart_of(figure, title, alternative)


def chart_of(figure: Figure, title: str, alternative: str) -> Chart:
    """Return a figure as a chart."""
    for patch in (figure.patch, *(panel.patch for panel in figure.axes)):
        patch.set_visible(False)
    return Chart(title, render_figure(figure, "svg"), f"{title}. {alternative}")
