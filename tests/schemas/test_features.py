import struct

import numpy as np
import pytest

from schemas.features import FeatureSpec


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        *(({"shape": shape}, "shape of feature 'pool' is .*, expected positive sizes") for shape in ((), (0,), (36, 0), (-1,))),
        ({"dtype": "float64"}, r"dtype of feature 'pool' is 'float64', expected one of \('float32', 'float16'\)"),
    ],
)
def test_invalid_specs_are_refused(values, problem):
    assert FeatureSpec("any", (2, 3, 5)).width == 30
    with pytest.raises(ValueError, match=problem):
        FeatureSpec(**{"name": "pool", "shape": (4,), **values})


# --- rounding --------------------------------------------------------------------------------------------------------

HALF = FeatureSpec("pool", (4,), "float16")


def test_values_are_rounded_to_the_nearest_and_ties_to_even():
    generator = np.random.default_rng(11)
    halves = generator.integers(0, 0x7BFF, 2000).astype(np.uint16).view(np.float16).astype(np.float32)
    above = (halves.astype(np.float16).view(np.uint16) + 1).view(np.float16).astype(np.float32)
    values = np.concatenate(
        [halves, (halves + above) / 2, generator.normal(size=2000).astype(np.float32), [1e-9, -3e-8, 65519]]
    )
    values = np.concatenate([values, -values]).astype(np.float32)
    # The standard library packs halves by its own code, and refuses what would become infinite.
    expected = b"".join(struct.pack("<e", value) for value in values.tolist())
    found = HALF.rounded(values.reshape(2, -1))
    assert (found.dtype, found.shape) == (np.float16, (2, len(values) // 2))
    assert found.astype("<f2").tobytes() == expected


@pytest.mark.filterwarnings("error")
def test_rounded_overflow_is_infinite_without_warning():
    assert HALF.rounded(np.array([65519, 65520, -65520, 1e30, np.nan], np.float32)).tolist()[:4] == [
        65504,
        np.inf,
        -np.inf,
        np.inf,
    ]
