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


def test_specs_are_values():
    assert FeatureSpec(name="pool", shape=(4,)) == FeatureSpec("pool", (4,), "float32", "")
    assert len({FeatureSpec(name="pool", shape=(4,)), FeatureSpec(name="pool", shape=(4,), dtype="float16")}) == 2
