import numpy as np
import pytest

from schemas.drawing.charts import place_beside

BOUNDS = (0, 0, 60, 40)


def meets(a, b) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


@pytest.mark.parametrize("seed", range(5))
def test_place_is_within_the_bounds_and_free(seed):
    corners = np.random.default_rng(seed).integers(0, 40, (30, 2))
    taken = [(x, y, x + 4, y + 2) for x, y in corners.tolist()]
    placed = [place_beside((8, 3), box, taken, BOUNDS, reach=4) for box in taken]
    assert any(placed)
    for place in filter(None, placed):
        assert (place[2] - place[0], place[3] - place[1]) == (8, 3)
        assert 0 <= place[0] <= 52
        assert 0 <= place[1] <= 37
        assert not any(meets(place, box) for box in taken)
