"""What the pictures show, by matplotlib's own account of the figure."""

import pytest

from schemas.drawing.charts import Style, draw_series, new_figure, running_mean
from tests.train.runs.test_history import HISTORY
from train.runs.curves import plot_curves


def points(line) -> list[tuple[float, float]]:
    return list(zip(*(values.tolist() for values in line.get_data()), strict=True))


@pytest.mark.slow
def test_curves_of_a_run():
    figure = plot_curves(HISTORY)
    captions, images, rate, unused, *recalls = figure.axes  # Losses of captions alone have a panel of their own.
    assert {line.get_label(): points(line) for line in captions.lines} == {"c2c": [(10, 3.0), (30, 1.0)]}
    assert {line.get_label(): points(line) for line in images.lines} == {
        "c2i, en": [(20, 2.0)],
        "c2i, en, validation": [(40, 1.5)],
    }
    assert not unused.get_visible()
    assert [points(line) for line in rate.lines] == [[(10, 0.1), (20, 0.2), (30, 0.3)]]
    assert [panel.get_title(loc="right") for panel in recalls] == ["", "chance: en 0.2 1.2 2.5"]
    chance = recalls[1].lines[6:9]
    assert [set(line.get_ydata()) for line in chance] == [{0.25}, {1.25}, {2.5}]
    assert {line.is_dashed() for line in chance} == {True}
    for line in chance:
        line.remove()
    for panel in recalls:
        *lines, best = panel.lines
        assert [points(line) for line in lines] == [
            *([(20, 3.0), (40, 4.0)], [(20, 2.0), (40, 3.0)], [(20, 1.0), (40, 2.0)]),
            *([(40, 6.0)], [(40, 5.0)], [(40, 4.0)]),
        ]
        assert set(best.get_xdata()) == {20}
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.texts] == ["en", "de", "R@10", "R@5", "R@1", "best model, step 20"]


def test_many_values_are_smoothed_and_few_are_not():
    _, (panel,) = new_figure(1, 1)
    style = Style("black", "-", "o")
    few, many = [float(n % 2) for n in range(10)], [float(n % 2) for n in range(300)]
    draw_series(panel, range(10), few, style, smooth=True, pale=True)
    assert [list(line.get_ydata()) for line in panel.lines] == [few]
    draw_series(panel, range(300), many, style, smooth=True, pale=True)
    assert [list(line.get_ydata()) for line in panel.lines[1:]] == [many, running_mean(many)]
    assert running_mean(many)[100] == pytest.approx(sum(many[95:106]) / 11)
