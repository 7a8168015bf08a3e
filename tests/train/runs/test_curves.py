"""What the pictures show, by matplotlib's own account of the figure."""

import pytest

from schemas.drawing import charts
from schemas.drawing.charts import Style, draw_series, new_figure, plain, running_mean, save, style_of
from schemas.storage.folder import Folder
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
    assert [panel.get_ylabel() for panel in (captions, images, rate)] == ["loss per query", "loss per query", "learning rate"]
    assert [panel.get_ylabel() for panel in recalls] == [
        *("validation recall, image to text (%)", "validation recall, text to image (%)")
    ]
    assert [panel.get_xlabel() for panel in recalls] == ["step", "step"]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.texts] == ["en", "de", "R@10", "R@5", "R@1", "best model, step 20"]


def test_language_looks_the_same_in_all_panels():
    captions, images, _, _, recalls, _ = plot_curves(HISTORY).axes
    (english,) = (line for line in images.lines if line.get_label() == "c2i, en")
    assert {(line.get_color(), line.get_marker()) for line in recalls.lines[:3]} == {
        (english.get_color(), english.get_marker())
    }
    (neither,) = (line for line in captions.lines if line.get_label() == "c2c")
    assert neither.get_color() not in {line.get_color() for line in recalls.lines[:6]}


@pytest.mark.slow
def test_constant_learning_rate_has_no_panel():
    entries = [{**entry, "learning_rate": 0.1} if "learning_rate" in entry else entry for entry in HISTORY.entries]
    visible = [panel.get_ylabel() for panel in plot_curves(History(tuple(entries))).axes if panel.get_visible()]
    assert [label.partition(",")[0] for label in visible] == ["loss per query"] * 2 + ["validation recall"] * 2


@pytest.mark.slow
def test_panels_without_anything_say_so():
    figure = plot_curves(History(()))
    panels = [panel for panel in figure.axes if panel.get_visible()]
    assert [[text.get_text() for text in panel.texts] for panel in panels] == [["nothing logged yet"]] * 3
    assert figure.legends == []


@pytest.mark.cluster
def test_same_log_gives_the_same_bytes(tmp_path):
    for kind in ("png", "pdf", "svg"):
        for name in ("a", "b"):
            save(plot_curves(HISTORY), Folder(str(tmp_path)), f"{name}.{kind}")
        assert (tmp_path / f"a.{kind}").read_bytes() == (tmp_path / f"b.{kind}").read_bytes()


def test_lines_are_told_apart_without_colour():
    styles = [style_of(number) for number in range(40)]
    assert len({(str(style.linestyle), style.marker) for style in styles}) == 40
    assert len({style.color for style in styles[:7]}) == 7


def test_running_mean():
    assert running_mean([1.0, 2.0, 6.0, 4.0]) == [1.0, 3.0, 4.0, 4.0]  # As far as there are neighbours on both sides.
    values = [float(number % 7) for number in range(300)]
    means = running_mean(values)
    for place in (5, 100, 294):
        assert means[place] == pytest.approx(sum(values[place - 5 : place + 6]) / 11)


def test_many_values_are_smoothed_and_few_are_not():
    _, (panel,) = new_figure(1, 1)
    style = Style("black", "-", "o")
    few, many = [float(n % 2) for n in range(10)], [float(n % 2) for n in range(300)]
    draw_series(panel, range(10), few, style, smooth=True, pale=True)
    assert [list(line.get_ydata()) for line in panel.lines] == [few]
    draw_series(panel, range(300), many, style, smooth=True, pale=True)
    assert [list(line.get_ydata()) for line in panel.lines[1:]] == [many, running_mean(many)]
    draw_series(panel, [], [], style)
    assert len(panel.lines) == 3


def test_labels_are_taken_as_they_are(tmp_path):
    figure, (panel,) = new_figure(1, 1)
    for label in ("a$b", "$x$", "_hidden", "50%"):
        draw_series(panel, [1], [1.0], style_of(0), label=plain(label))
    texts = [text.get_text() for text in panel.legend().texts]
    assert [text.replace(r"\$", "$").strip() for text in texts] == ["a$b", "$x$", "_hidden", "50%"]
    charts.save(figure, Folder(str(tmp_path)), "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000
