"""Places of labels beside what they name, apart from points, boxes and other labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

Place: TypeAlias = tuple[float, float, float, float]
"""Least x and y, greatest x and y."""


def place_beside(
    label_wh: tuple[float, float], target: Place, taken: Sequence[Place], bounds: Place, *, reach: int = 1
) -> Place | None:
    """Return the first free place of a label beside a target; None if there is none.

    Places are at the corners of the target, and up to ``reach`` heights of the label away. The label lies within the bounds and
    meets neither the target nor a place that is taken.

    >>> place_beside((3, 1), (0, 0, 4, 4), [], (0, 0, 10, 10))
    (0.0, 4.0, 3.0, 5.0)
    """
    width, height = label_wh
    obstacles = np.array([target, *taken], float)
    for distance in range(reach):
        left, low, right, high = np.add(target, np.multiply((-1, -1, 1, 1), distance * height))
        ends, sides = (left, right - width), (low, high - height)
        beyond = [(x, y) for y in (low - height, high) for x in ends] + [(x, y) for x in (right, left - width) for y in sides]
        for x, y in beyond:
            corner = np.clip((x, y), bounds[:2], np.subtract(bounds[2:], label_wh))
            place = np.concatenate([corner, corner + label_wh])
            apart = (place[2:] <= obstacles[:, :2]) | (obstacles[:, 2:] <= place[:2])
            if (corner >= bounds[:2]).all() and apart.any(1).all():
                return tuple(place.tolist())
    return None
