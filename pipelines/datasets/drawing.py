"""Labelled boxes over a picture, readable at any size of the picture."""

from __future__ import annotations

import colorsys
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

from PIL import Image, ImageDraw, ImageFont

__all__ = ["LabelledBox", "colour_of", "draw_boxes"]

_LEAST_SIDE = 800  # Smaller pictures are enlarged, their longer side to this many pixels, so that labels can be read.
_Place: TypeAlias = tuple[float, float, float, float]
_GOLDEN_RATIO = (5**0.5 - 1) / 2


class LabelledBox(NamedTuple):
    """A box that is drawn.

    Attributes:
        xyxy: its corners, in pixels of the picture.
        label: what stands at its upper left corner; nothing where it is empty.
        group: boxes of one group have one colour.
    """

    xyxy: tuple[float, float, float, float]
    label: str
    group: int = 0


def colour_of(group: int) -> tuple[int, int, int]:
    """A strong colour; groups that follow each other have hues far apart, by the golden ratio."""
    red, green, blue = colorsys.hsv_to_rgb(group * _GOLDEN_RATIO % 1, 0.8, 0.95)
    return round(red * 255), round(green * 255), round(blue * 255)


def draw_boxes(image: Image.Image, boxes: Sequence[LabelledBox]) -> Image.Image:
    """Draws boxes over a copy of a picture.

    The lines are as thick and the labels as high as suits the size of the picture. A label moves down where it would cover an
    earlier one, or to the first free place above, and is left out where there is none: others stay readable.

    Args:
        image: mode ``RGB``; a small one is enlarged first.
        boxes: the most important first: it lies on top of the others, and its label is placed first.

    Returns:
        The drawing, mode ``RGB``.
    """
    scale = max(1.0, _LEAST_SIDE / max(image.size))
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    canvas = image.resize(size, Image.Resampling.BICUBIC) if scale > 1 else image.copy()
    pen = ImageDraw.Draw(canvas)
    width = max(2, round(max(size) / 400))
    font = ImageFont.load_default(max(13, round(max(size) / 60)))
    scaled = [box._replace(xyxy=_within((value * scale for value in box.xyxy), size)) for box in boxes]
    for box in reversed(scaled):
        pen.rectangle(box.xyxy, outline=colour_of(box.group), width=width)
    taken: list[_Place] = []
    for box in scaled:
        place = _place_of(pen.textbbox((0, 0), box.label, font=font), box.xyxy, taken, size) if box.label else None
        if place is not None:
            taken.append(place)
            _draw_label(pen, font, box, place)
    return canvas


def _within(xyxy: Iterable[float], size_wh: tuple[int, int]) -> _Place:
    """Corners that lie on pixels of the canvas, so that every side of a box can be seen."""
    left, top, right, bottom = xyxy
    width, height = size_wh
    left, top = min(max(left, 0), width - 1), min(max(top, 0), height - 1)
    return left, top, min(max(right, left), width - 1), min(max(bottom, top), height - 1)


def _draw_label(
    pen: ImageDraw.ImageDraw, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, box: LabelledBox, place: _Place
) -> None:
    """Draws a label on a ground of the box's colour."""
    ground = colour_of(box.group)
    pen.rectangle(place, fill=ground)
    # ITU-R BT.601's weights of the channels for brightness.
    bright = 0.299 * ground[0] + 0.587 * ground[1] + 0.114 * ground[2] > 140
    pen.text((place[0] + 3, place[1] + 1), box.label, fill="black" if bright else "white", font=font)


def _place_of(text: _Place, box: _Place, taken: Sequence[_Place], size_wh: tuple[int, int]) -> _Place | None:
    """Where a label goes: at the upper left corner of its box, else at the first free place below, else above; None for nowhere."""
    width, height = text[2] + 6, text[3] + 4
    left = max(0.0, min(box[0], size_wh[0] - 1 - width))
    lowest = max(0.0, size_wh[1] - 1 - height)
    beside = [each for each in taken if each[0] < left + width and left < each[2]]
    for top in (max(0.0, min(box[1], lowest)), 0.0):
        while top <= lowest:
            covered = [each[3] for each in beside if each[1] < top + height and top < each[3]]
            if not covered:
                return left, top, left + width, top + height
            top = max(covered) + 1
    return None
