"""Labelled boxes over a picture, readable at any size of the picture."""

from __future__ import annotations

import colorsys
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

from PIL import Image, ImageDraw, ImageFont

from schemas.escapes import escape_text
from schemas.fonts import font_files, warn_of_missing_glyphs

_LEAST_SIDE = 800  # Smaller pictures are enlarged to this many pixels on their longer side, so that labels are readable.
_Place: TypeAlias = tuple[float, float, float, float]
_Font: TypeAlias = ImageFont.FreeTypeFont | ImageFont.ImageFont
_NO_CHARACTER = "\U0010fffe"
_GOLDEN_RATIO = (5**0.5 - 1) / 2


class LabelledBox(NamedTuple):
    """A box to draw.

    Attributes:
        xyxy: corners of the box, in pixels of the picture.
        label: text at its upper left corner; may be empty.
        group: boxes of one group have one colour.
    """

    xyxy: tuple[float, float, float, float]
    label: str
    group: int = 0


def colour_of(group: int) -> tuple[int, int, int]:
    """Return a strong colour; by the golden ratio, the hues of successive groups are far apart."""
    red, green, blue = colorsys.hsv_to_rgb(group * _GOLDEN_RATIO % 1, 0.8, 0.95)
    return round(red * 255), round(green * 255), round(blue * 255)


def draw_boxes(image: Image.Image, boxes: Sequence[LabelledBox]) -> Image.Image:
    """Draw boxes over a copy of a picture.

    Line width and label height depend on the size of the picture. A label that would cover an earlier one moves down, or to the
    first free place above, and is omitted if there is none, so that the others remain readable.

    Args:
        image: mode ``RGB``; a small one is enlarged first.
        boxes: the most important first: it is drawn on top of the others, and its label is placed first.

    Returns:
        The drawing, mode ``RGB``.
    """
    scale = max(1.0, _LEAST_SIDE / max(image.size))
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    canvas = image.resize(size, Image.Resampling.BICUBIC) if scale > 1 else image.copy()
    pen = ImageDraw.Draw(canvas)
    width = max(2, round(max(size) / 400))
    height = max(13, round(max(size) / 60))
    scaled = [
        LabelledBox(_within((value * scale for value in box.xyxy), size), escape_text(box.label), box.group) for box in boxes
    ]
    for box in reversed(scaled):
        pen.rectangle(box.xyxy, outline=colour_of(box.group), width=width)
    taken: list[_Place] = []
    for box in scaled:
        font = _font_for(box.label, height)
        place = _place_of(pen.textbbox((0, 0), box.label, font=font), box.xyxy, taken, size) if box.label else None
        if place is not None:
            taken.append(place)
            _draw_label(pen, font, box, place)
    return canvas


def _font_for(text: str, height: int) -> _Font:
    """Return Pillow's own font, or the first font of this machine that has more of the characters of a text."""
    best: _Font = ImageFont.load_default(height)
    nowhere = missing = set() if text.isascii() else _missing_from(best, text)
    for path in font_files() if missing else ():
        try:
            font = ImageFont.truetype(path, height)
            lacking = _missing_from(font, text)
        except OSError:
            continue
        nowhere = nowhere & lacking
        if len(lacking) < len(missing):
            best, missing = font, lacking
        if not missing:
            break
    warn_of_missing_glyphs(nowhere)
    return best


def _missing_from(font: _Font, text: str) -> set[str]:
    """Return the characters of a text that a font draws as it does those that no font has."""
    glyphs = {character: font.getmask(character) for character in {*text, _NO_CHARACTER} if not character.isspace()}
    drawn = {character: (mask.size, bytes(mask)) for character, mask in glyphs.items()}
    return {character for character in text if drawn.get(character) == drawn[_NO_CHARACTER]}


def _within(xyxy: Iterable[float], size_wh: tuple[int, int]) -> _Place:
    """Move corners onto pixels of the canvas, so that every side of a box is visible."""
    left, top, right, bottom = xyxy
    width, height = size_wh
    left, top = min(max(left, 0), width - 1), min(max(top, 0), height - 1)
    return left, top, min(max(right, left), width - 1), min(max(bottom, top), height - 1)


def _draw_label(pen: ImageDraw.ImageDraw, font: _Font, box: LabelledBox, place: _Place) -> None:
    """Draw a label on a background of the box's colour."""
    background = colour_of(box.group)
    pen.rectangle(place, fill=background)
    # Channel weights for brightness from ITU-R BT.601.
    bright = 0.299 * background[0] + 0.587 * background[1] + 0.114 * background[2] > 140
    pen.text((place[0] + 3, place[1] + 1), box.label, fill="black" if bright else "white", font=font)


def _place_of(text: _Place, box: _Place, taken: Sequence[_Place], size_wh: tuple[int, int]) -> _Place | None:
    """Find a place for a label: the upper left corner of its box, else the first free place below, else above, else None."""
    width, height = text[2] + 6, text[3] + 4
    left = max(0.0, min(box[0], size_wh[0] - 1 - width))
    lowest = max(0.0, size_wh[1] - 1 - height)
    beside = [place for place in taken if place[0] < left + width and left < place[2]]
    for top in (max(0.0, min(box[1], lowest)), 0.0):
        while top <= lowest:
            covered = [place[3] for place in beside if place[1] < top + height and top < place[3]]
            if not covered:
                return left, top, left + width, top + height
            top = max(covered) + 1
    return None
