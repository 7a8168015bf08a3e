"""The gain of a caption of table 3 over OE, from ranks by column."""

import pytest

from train.reports.gold_ranks import RankedCaption

ALL = {"OE": (12,), "PIVOT": (3,), "PARALLEL": (4,)}


@pytest.mark.parametrize(
    ("ranks", "gain"),
    [
        (ALL, 3.0),  # Over the worse of the other ranks.
        (ALL | {"PARALLEL": (2,)}, 4.0),
        (ALL | {"PIVOT": (1, 9, 6)}, 2.0),  # The median of several runs.
        (ALL | {"OE": (2,)}, 0.5),
        ({"OE": (12,), "PIVOT": (3,)}, 0.0),  # No gain is known without a column.
        ({"OE": (12,), "PARALLEL": (3,)}, 0.0),
        ({"PIVOT": (3,), "PARALLEL": (4,)}, 0.0),
        ({}, 0.0),
    ],
)
def test_gain_is_the_rank_under_oe_over_the_worse_of_the_others(ranks, gain):
    assert RankedCaption("image", "en", 0, "a dog", ranks).gain == gain


@pytest.mark.parametrize(
    ("ranks", "text"), [((), "–"), ((3,), "3"), ((3, 3), "3"), ((4, 3), "3.5 [3–4]"), ((9, 1, 5), "5 [1–9]")]
)
def test_rank_text_is_the_median_with_its_range(ranks, text):
    assert RankedCaption("image", "en", 0, "a dog", {"OE": ranks}).rank_text("OE") == text
