import numpy as np
import pytest

from extractors.tokens.transformer import parts_of, pool_parts

CLS, SEP = 101, 102


def parts(tokens, positions=512):
    return parts_of(tokens, begin=CLS, end=SEP, positions=positions)


def test_parts_of_short_caption_is_one_part():
    (part,) = parts([[5], [6, 7, 8], [9]])
    assert part.ids == (CLS, 5, 6, 7, 8, 9, SEP)
    assert part.starts.tolist() == [0, 1, 4]


def test_parts_of_empty_caption_has_begin_and_end():
    (part,) = parts([])
    assert (part.ids, part.starts.tolist()) == ((CLS, SEP), [])
    states = np.array([[1, 2], [3, 4]], np.float32)
    np.testing.assert_array_equal(pool_parts([part], [states], "mean"), states)


@pytest.mark.parametrize(
    ("positions", "expected"),
    [
        (9, [(CLS, 1, 2, 3, 4, 5, 6, 7, SEP)]),
        (8, [(CLS, 1, 2, 3, 4, 5, SEP), (CLS, 6, 7, SEP)]),  # A token is never divided.
        (5, [(CLS, 1, 2, 3, SEP), (CLS, 4, 5, SEP), (CLS, 6, 7, SEP)]),
        (3, [(CLS, 1, SEP), (CLS, 2, SEP), (CLS, 4, SEP), (CLS, 6, SEP)]),  # What of a token has no room is not read.
    ],
)
def test_parts_of_long_caption_are_split_between_tokens(positions, expected):
    found = parts([[1], [2, 3], [4, 5], [6, 7]], positions)
    assert [part.ids for part in found] == expected
    assert sum(len(part.starts) for part in found) == 4


def test_pool_parts_pools_sub_words():
    rng = np.random.default_rng(0)
    sizes = [[1, 3, 2], [4]]
    found = parts([[7] * size for part in sizes for size in part], positions=8)
    assert [len(part.ids) for part in found] == [8, 6]
    states = [rng.standard_normal((len(part.ids), 5)).astype(np.float32) for part in found]
    groups = [states[0][1:2], states[0][2:5], states[0][5:7], states[1][1:5]]
    for pooling, pooled in (("mean", [group.mean(axis=0) for group in groups]), ("first", [group[0] for group in groups])):
        vectors = pool_parts(found, states, pooling)
        assert (vectors.dtype, vectors.shape) == (np.float32, (6, 5))
        np.testing.assert_array_equal(vectors[[0, -1]], [states[0][0], states[1][-1]])
        np.testing.assert_allclose(vectors[1:-1], np.stack(pooled), atol=1e-6)
