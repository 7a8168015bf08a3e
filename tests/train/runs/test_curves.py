"""What the pictures show, by matplotlib's own account of the figure."""

import pytest

from schemas.drawing.charts import running_mean
from tests.train.runs.test_history import HISTORY
from train.runs.curves import plot_curves
from train.runs.history import History


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


@pytest.mark.slow
def test_panels_without_anything_say_so():
    figure = plot_curves(History(()))
    panels = [panel for panel in figure.axes if panel.get_visible()]
    assert [[text.get_text() for text in panel.texts] for panel in panels] == [["nothing logged yet"]] * 3
    assert figure.legends == []


def test_running_mean():
    assert running_mean([1.0, 2.0, 6.0, 4.0]) == [1.0, 3.0, 4.0, 4.0]  # As far as there are neighbours on both sides.
    values = [float(number % 7) for number in range(300)]
    means = running_mean(values)
    for place in (5, 100, 294):
        assert means[place] == pytest.approx(sum(values[place - 5 : place + 6]) / 11)
