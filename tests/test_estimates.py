"""The page of estimates has the numbers that its arithmetic gives."""

from pathlib import Path

import pytest

from tests import estimates

PAGE = Path(__file__).parents[1] / "docs" / "internals" / "estimates.md"


@pytest.mark.parametrize("table", [estimates.work, estimates.launching, estimates.listing])
def test_page_has_the_tables_of_the_arithmetic(table):
    assert table() in PAGE.read_text(encoding="utf-8")
