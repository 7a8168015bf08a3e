import struct

import numpy as np
import pytest

from schemas.features import FeatureSpec


@pytest.mark.parametrize(("shape", "width"), [((2048,), 2048), ((36, 2048), 73_728), ((1,), 1), ((2, 3, 5), 30)])
def test_width_is_the_number_of_values(shape, width):
    assert FeatureSpec(name="any", shape=shape).width == width


@pytest.mark.parametrize("shape", [(), (0,), (36, 0), (-1,)])
def test_sizes_are_positive(shape):
    with pytest.raises(ValueError, match=r"shape of feature 'pool' is .*, expected positive sizes"):
        FeatureSpec(name="pool", shape=shape)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "int8", ""])
def test_other_types_are_refused(dtype):
    with pytest.raises(ValueError, match=rf"dtype of feature 'pool' is '{dtype}', expected one of \('float32', 'float16'\)"):
        FeatureSpec(name="pool", shape=(4,), dtype=dtype)


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


def test_float32_stays_the_very_array():
    values = np.ones(4, np.float32)
    assert FeatureSpec("pool", (4,)).rounded(values) is values
