import pytest

from extractors.tokens.transformer import parts_of

CLS, SEP = 101, 102


def parts(tokens, positions=512):
    return parts_of(tokens, begin=CLS, end=SEP, positions=positions)


@pytest.mark.parametrize(
    ("tokens", "ids", "starts"), [([[5], [6, 7, 8], [9]], (CLS, 5, 6, 7, 8, 9, SEP), [0, 1, 4]), ([], (CLS, SEP), [])]
)
def test_parts_of_short_caption_is_one_part(tokens, ids, starts):
    (part,) = parts(tokens)
    assert (part.ids, part.starts.tolist()) == (ids, starts)


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
