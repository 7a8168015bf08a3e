"""The rank of a caption of table 3 as text."""

import pytest

from train.reports.gold_ranks import RankedCaption
from train.reports.published import GoldRank


@pytest.mark.parametrize(
    ("ranks", "text"), [((), "–"), ((3,), "3"), ((3, 3), "3"), ((4, 3), "3.5 [3–4]"), ((9, 1, 5), "5 [1–9]")]
)
def test_rank_text_is_the_median_with_its_range(ranks, text):
    assert RankedCaption(GoldRank("image", "en", 0, "a dog", {}), {"OE": ranks}).rank_text("OE") == text
