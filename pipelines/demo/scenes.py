"""Drawn scenes of coloured shapes: contents, layouts and pictures.

The same count and seed give the same scenes in every Python version. Fewer scenes of a seed are the beginning of more scenes.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

from PIL import Image, ImageDraw, ImageFilter

from schemas.errors import UsageError

#: Colours of shapes, sRGB.
COLOURS = {
    "red": (214, 40, 40),
    "blue": (36, 94, 204),
    "green": (38, 142, 62),
    "yellow": (250, 204, 21),
    "orange": (245, 124, 0),
    "purple": (130, 50, 168),
    "brown": (121, 72, 42),
    "black": (34, 34, 38),
}
#: Colours of backgrounds, sRGB.
BACKGROUNDS = {
    "white": (252, 252, 250),
    "grey": (176, 179, 184),
    "pink": (250, 196, 214),
    "light blue": (184, 220, 246),
    "light green": (196, 234, 190),
}
#: Radius of the circle around a shape, in pixels.
SIZES = {"small": 13.5, "large": 27.0}
#: Areas for the shapes of a group: left, top, right, bottom as fractions of the picture.
POSITIONS = {
    "left": (0.03, 0.06, 0.45, 0.94),
    "right": (0.55, 0.06, 0.97, 0.94),
    "top": (0.06, 0.03, 0.94, 0.45),
    "bottom": (0.06, 0.55, 0.94, 0.97),
    "centre": (0.20, 0.20, 0.80, 0.80),
}

_PICTURE_SIZES_WH = ((320, 240), (240, 320), (300, 300))
_OPPOSITE = {"left": "right", "right": "left", "top": "bottom", "bottom": "top"}
_MAX_COUNT = 4  # Shapes in a group.
_COLUMN_CHOICES = {1: (1,), 2: (1, 2), 3: (1, 2, 3), 4: (1, 2, 4)}
_MAX_SCENES = 100_000
_RADIUS_FACTORS = (0.93, 1.05)  # Radii vary a little around those in SIZES.
_GAP = 3.0  # Free pixels on each side of a shape.
_MAX_SHIFT = 18.0  # Distance of a shape from the middle of its cell, in pixels.
_MAX_TILT = 9.0  # Rotation of a shape, in degrees.
_SUPERSAMPLING = 4  # Shapes are drawn this many times larger and then reduced.
_CORNERS = 72  # Corners of the polygon that approximates a curve.
_SHADOW_DEPTH = 70  # Grey levels, of 255.

_Item = TypeVar("_Item")
_Outline = tuple[tuple[float, float], ...]
_Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class ShapeGroup:
    """One to four equal shapes: keys of `SHAPES`, `COLOURS`, `SIZES`, `POSITIONS`."""

    shape: str
    colour: str
    size: str
    count: int
    position: str


@dataclass(frozen=True)
class Scene:
    """The content of a picture.

    Attributes:
        groups: one group, or two of different colours on opposite sides.
        variant: seed of everything that captions do not mention: picture size, exact positions, wording.
    """

    background: str
    groups: tuple[ShapeGroup, ...]
    variant: int = 0


@dataclass(frozen=True)
class Placed:
    """One shape and its position.

    Attributes:
        centre_xy: middle of the circle around the shape, in pixels of the picture.
        radius: radius of that circle, in pixels; the shape stays inside it.
        tilt: rotation in degrees.
    """

    group: ShapeGroup
    centre_xy: tuple[float, float]
    radius: float
    tilt: float


def make_scenes(count: int, seed: int = 0) -> Iterator[tuple[str, Scene]]:
    """Generate different scenes and their image ids ``scene-00000`` ....

    Raises:
        UsageError: the count is out of range.
    """
    if not 1 <= count <= _MAX_SCENES:
        raise UsageError(f"expected a count of scenes from 1 to {_MAX_SCENES}, found {count!r}: give a count in that range")
    rng = Random(seed)
    seen: set[tuple[str, tuple[ShapeGroup, ...]]] = set()
    while len(seen) < count:
        scene = _draw_scene(rng)
        content = (scene.background, scene.groups)
        if content not in seen:
            yield f"scene-{len(seen):05d}", scene
            seen.add(content)


def _draw_scene(rng: Random) -> Scene:
    """Sample a scene, by the version-independent ``Random.random()``."""
    background = _pick(rng, tuple(BACKGROUNDS))
    if rng.random() < 0.5:
        positions: tuple[str, ...] = (_pick(rng, tuple(POSITIONS)),)
    else:
        position = _pick(rng, tuple(_OPPOSITE))
        positions = (position, _OPPOSITE[position])
    colours = list(COLOURS)
    groups = []
    for position in positions:
        colour = colours.pop(int(rng.random() * len(colours)))
        shape, size, count = _pick(rng, tuple(SHAPES)), _pick(rng, tuple(SIZES)), 1 + int(rng.random() * _MAX_COUNT)
        groups.append(ShapeGroup(shape=shape, colour=colour, size=size, count=count, position=position))
    return Scene(background=background, groups=tuple(groups), variant=int(rng.random() * 2**31))


def _pick(rng: Random, items: Sequence[_Item]) -> _Item:
    return items[int(rng.random() * len(items))]


def picture_size_wh(scene: Scene) -> tuple[int, int]:
    """Return width and height of the picture."""
    return _PICTURE_SIZES_WH[scene.variant % len(_PICTURE_SIZES_WH)]


def layout(scene: Scene) -> list[Placed]:
    """Place the shapes of a scene in cells, without overlap."""
    rng = Random(2 * scene.variant)
    width, height = picture_size_wh(scene)
    placed = []
    for group in scene.groups:
        left, top, right, bottom = POSITIONS[group.position]
        area_xyxy = (left * width, top * height, right * width, bottom * height)
        room = 2 * (SIZES[group.size] * _RADIUS_FACTORS[1] + _GAP)
        grids = [_cells(area_xyxy, group.count, columns) for columns in _COLUMN_CHOICES[group.count]]
        for cell_xyxy in _pick(rng, [cells for cells in grids if _narrowest(cells) >= room]):
            radius = SIZES[group.size] * _between(rng, *_RADIUS_FACTORS)
            x, y = (
                (low + high) / 2 + _between(rng, -1, 1) * min(_MAX_SHIFT, (high - low) / 2 - radius - _GAP)
                for low, high in (cell_xyxy[0::2], cell_xyxy[1::2])
            )
            tilt = _between(rng, -_MAX_TILT, _MAX_TILT)
            placed.append(Placed(group=group, centre_xy=(x, y), radius=radius, tilt=tilt))
    return placed


def _cells(area_xyxy: _Box, count: int, columns: int) -> list[_Box]:
    """Divide an area into rows of equal height; the last may have fewer cells."""
    left, top, right, bottom = area_xyxy
    rows = -(-count // columns)
    height = (bottom - top) / rows
    cells = []
    for row in range(rows):
        in_row = min(columns, count - row * columns)
        width = (right - left) / in_row
        y = top + row * height
        cells += [(left + i * width, y, left + (i + 1) * width, y + height) for i in range(in_row)]
    return cells


def _narrowest(cells: Sequence[_Box]) -> float:
    return min(min(right - left, bottom - top) for left, top, right, bottom in cells)


def _between(rng: Random, low: float, high: float) -> float:
    return low + (high - low) * rng.random()


def draw(scene: Scene) -> Image.Image:
    """Draw a scene as an RGB picture; the same scene gives the same pixels."""
    picture = _paper(scene)
    shapes = layout(scene)
    shadow = Image.new("L", picture.size)
    for shape in shapes:
        box_xy, mask = _mask(shape)
        shadow.paste(_SHADOW_DEPTH, (box_xy[0] + 2, box_xy[1] + 3), mask)
    picture.paste((40, 40, 60), mask=shadow.filter(ImageFilter.GaussianBlur(2.5)))
    for shape in shapes:
        box_xy, mask = _mask(shape)
        picture.paste(_shaded(COLOURS[shape.group.colour], mask.size), box_xy, mask)
    return picture


def _paper(scene: Scene) -> Image.Image:
    """Draw the background, a mottled sheet that darkens to one end."""
    rng = Random(2 * scene.variant + 1)
    width, height = picture_size_wh(scene)
    slope = Image.linear_gradient("L").rotate(90 * int(rng.random() * 4)).resize((width, height))
    coarse_wh = (width // 5, height // 5)
    grain = Image.frombytes("L", coarse_wh, bytes(int(256 * rng.random()) for _ in range(coarse_wh[0] * coarse_wh[1])))
    grain = grain.resize((width, height), Image.Resampling.BICUBIC)
    light = BACKGROUNDS[scene.background]
    dark = tuple(int(0.90 * value) for value in light)
    return Image.composite(
        Image.new("RGB", (width, height), dark),
        Image.new("RGB", (width, height), light),
        Image.blend(slope, grain, 0.22),
    )


def _shaded(colour: tuple[int, int, int], size_wh: tuple[int, int]) -> Image.Image:
    """Draw a patch of a colour, a little lighter at its upper end."""
    light = tuple(int(value + 0.16 * (255 - value)) for value in colour)
    dark = tuple(int(0.94 * value) for value in colour)
    slope = Image.linear_gradient("L").resize(size_wh)
    return Image.composite(Image.new("RGB", size_wh, dark), Image.new("RGB", size_wh, light), slope)


def _mask(shape: Placed) -> tuple[tuple[int, int], Image.Image]:
    """Draw the antialiased ``L`` mask of a shape, and return its corner and the mask."""
    x, y = shape.centre_xy
    corner_xy = (math.floor(x - shape.radius) - 1, math.floor(y - shape.radius) - 1)
    side = math.ceil(2 * shape.radius) + 3
    mask = Image.new("L", (side * _SUPERSAMPLING, side * _SUPERSAMPLING))
    pen = ImageDraw.Draw(mask)
    cos, sin = math.cos(math.radians(shape.tilt)), math.sin(math.radians(shape.tilt))
    for outline, value in zip(SHAPES[shape.group.shape], (255, 0), strict=False):
        points = [
            (
                _SUPERSAMPLING * (x - corner_xy[0] + shape.radius * (u * cos - v * sin)),
                _SUPERSAMPLING * (y - corner_xy[1] + shape.radius * (u * sin + v * cos)),
            )
            for u, v in outline
        ]
        pen.polygon(points, fill=value)
    return corner_xy, mask.reduce(_SUPERSAMPLING)


_TURNS = [2 * math.pi * i / _CORNERS for i in range(_CORNERS)]


def _round(radius: float) -> _Outline:
    return tuple((radius * math.cos(turn), radius * math.sin(turn)) for turn in _TURNS)


_STAR = tuple((r * math.sin(math.pi * i / 5), -r * math.cos(math.pi * i / 5)) for i, r in enumerate((1.0, 0.43) * 5))
_HEART = tuple(
    (
        16 / 17 * math.sin(t) ** 3,
        -(13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)) / 17,
    )
    for t in _TURNS
)
_A, _L = 0.29, 0.94  # Half the width and half the length of the bars of a cross.
_CROSS = ((-_A, -_L), (_A, -_L), (_A, -_A), (_L, -_A), (_L, _A), (_A, _A))

#: Outlines of shapes in the unit circle, y downwards; a second outline is a hole.
SHAPES: dict[str, tuple[_Outline, ...]] = {
    "circle": (_round(0.90),),
    "square": (((-0.7, -0.7), (0.7, -0.7), (0.7, 0.7), (-0.7, 0.7)),),
    "triangle": (((0.0, -0.98), (0.86, 0.5), (-0.86, 0.5)),),
    "star": (_STAR,),
    "cross": ((*_CROSS, *((-x, -y) for x, y in _CROSS)),),
    "diamond": (((0.0, -1.0), (0.72, 0.0), (0.0, 1.0), (-0.72, 0.0)),),
    "heart": (_HEART,),
    "ring": (_round(0.92), _round(0.52)),
}
