from itertools import product

import numpy as np
import pytest

from schemas.drawing.charts import place_beside

BOUNDS = (0, 0, 60, 40)


def meets(a, b) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


@pytest.mark.parametrize("seed", range(20))
def test_place_is_within_the_bounds_and_free(seed):
    rng = np.random.default_rng(seed)
    corners = rng.integers(0, 40, (30, 2))
    taken = [(x, y, x + 4, y + 2) for x, y in corners.tolist()]
    placed = [place_beside((8, 3), box, taken, BOUNDS, reach=4) for box in taken]
    assert any(placed)
    for place in filter(None, placed):
        assert (place[2] - place[0], place[3] - place[1]) == (8, 3)
        assert 0 <= place[0] <= 52
        assert 0 <= place[1] <= 37
        assert not any(meets(place, box) for box in taken)


def test_last_free_place_is_taken():
    """Cells of 10 x 10 but one are occupied, and the label is as large as a cell."""
    cells = [(x, y, x + 10, y + 10) for x, y in product(range(0, 60, 10), range(0, 40, 10))]
    for free in ((20, 0, 30, 10), (20, 20, 30, 30), (10, 10, 20, 20), (30, 10, 40, 20)):
        assert place_beside((10, 10), (20, 10, 30, 20), [cell for cell in cells if cell != free], BOUNDS) == free
    assert place_beside((10, 10), (20, 10, 30, 20), cells, BOUNDS, reach=9) is None
    assert place_beside((61, 10), (20, 10, 30, 20), [], BOUNDS, reach=9) is None
