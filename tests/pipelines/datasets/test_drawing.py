import numpy as np
import pytest
from PIL import Image

from pipelines.datasets.drawing import LabelledBox, colour_of, draw_boxes

GREY = (127, 127, 127)


def plain(width: int, height: int) -> Image.Image:
    return Image.new("RGB", (width, height), GREY)


def of_colour(image: Image.Image, colour: tuple[int, int, int]) -> np.ndarray:
    """Return the mask of the pixels of exactly this colour, ``[H, W]``."""
    return (np.asarray(image) == colour).all(axis=2)


def test_colours_differ():
    colours = [colour_of(group) for group in range(1601)]
    assert colours == [colour_of(group) for group in range(1601)]
    nearest = min(np.abs(np.subtract(a, b)).sum() for n, a in enumerate(colours[:12]) for b in colours[:n])
    assert nearest > 40
    assert all(max(colour) > 200 for colour in colours), "strong on any photograph"


def test_a_box_has_four_sides_of_its_colour_and_leaves_the_rest():
    drawing = draw_boxes(plain(800, 600), [LabelledBox((100, 50, 300, 250), "", 5)])
    expected = np.zeros((600, 800), dtype=bool)
    expected[50:251, 100:301] = True
    expected[52:249, 102:299] = False
    np.testing.assert_array_equal(of_colour(drawing, colour_of(5)), expected)
    assert of_colour(drawing, GREY).sum() == 800 * 600 - expected.sum()


@pytest.mark.slow
def test_lines_are_thicker_in_a_larger_picture():
    def thickness(width: int) -> int:
        drawing = draw_boxes(plain(width, width // 2), [LabelledBox((10, 10, width - 10, width // 2 - 10), "", 1)])
        return int(of_colour(drawing, colour_of(1))[width // 4].sum()) // 2

    assert (thickness(800), thickness(1600), thickness(4000)) == (2, 4, 10)


@pytest.mark.parametrize(
    ("size_wh", "expected"), [((1, 1), (800, 800)), ((320, 200), (800, 500)), ((20, 2000), (20, 2000)), ((801, 3), (801, 3))]
)
def test_small_pictures_are_enlarged(size_wh, expected):
    image = plain(*size_wh)
    drawing = draw_boxes(image, [LabelledBox((0, 0, *size_wh), "everything", 3), LabelledBox((0, 0, 0, 0), "a corner", 4)])
    assert drawing.size == expected
    assert of_colour(drawing, colour_of(3)).any()
    assert image.size == size_wh
    assert of_colour(image, GREY).all(), "the picture itself stays"


def test_corners_grow_with_the_picture():
    drawing = draw_boxes(plain(64, 64), [LabelledBox((16, 8, 32, 24), "", 2)])
    rows, columns = np.nonzero(of_colour(drawing, colour_of(2)))
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (100, 300, 200, 400)


@pytest.mark.parametrize(
    "xyxy", [(-50, -50, 2000, 2000), (700, 500, 100, 100), (790, 590, 799, 599), (900, 700, 950, 750), (3.5, 3.5, 3.5, 3.5)]
)
def test_boxes_that_reach_out_of_the_picture_can_be_seen(xyxy):
    drawing = draw_boxes(plain(800, 600), [LabelledBox(xyxy, "label", 7)])
    assert drawing.size == (800, 600)
    assert of_colour(drawing, colour_of(7)).sum() > 100


def test_a_label_stands_within_the_picture():
    def area(xyxy) -> int:
        return int(of_colour(draw_boxes(plain(800, 600), [LabelledBox(xyxy, "blue bus stop 0.93", 8)]), colour_of(8)).sum())

    in_the_middle = area((300, 300, 301, 301))
    for corner in ((799, 599, 799, 599), (0, 0, 0, 0), (799, 0, 799, 0)):
        assert area(corner) == pytest.approx(in_the_middle, abs=12)


@pytest.mark.slow
def test_labels_cover_no_other():
    """Twenty boxes at one place: each label is as large as alone."""
    boxes = [LabelledBox((100, 20, 102, 22), "a label", group) for group in range(20)]
    drawing = draw_boxes(plain(800, 600), boxes)
    alone = of_colour(draw_boxes(plain(800, 600), boxes[:1]), colour_of(0)).sum()
    shown = [int(of_colour(drawing, colour_of(group)).sum()) for group in range(20)]
    assert min(shown) > 0.9 * alone


def test_labels_that_find_no_place_are_left_out_and_the_first_stay():
    boxes = [LabelledBox((700, 60, 799, 79), "the same label", group) for group in range(20)]
    drawing = draw_boxes(plain(800, 100), boxes)
    alone = of_colour(draw_boxes(plain(800, 100), boxes[:1]), colour_of(0)).sum()
    shown = [int(of_colour(drawing, colour_of(group)).sum()) > 0.5 * alone for group in range(20)]
    assert 3 <= sum(shown) < 10, "below and above the box"
    assert shown == sorted(shown, reverse=True)


def test_the_first_box_lies_on_top():
    boxes = [LabelledBox((100, 100, 200, 200), "", 1), LabelledBox((100, 100, 200, 200), "", 2)]
    drawing = draw_boxes(plain(800, 600), boxes)
    assert of_colour(drawing, colour_of(1)).any()
    assert not of_colour(drawing, colour_of(2)).any()


def test_no_boxes_leave_the_picture():
    assert of_colour(draw_boxes(plain(800, 600), []), GREY).all()
