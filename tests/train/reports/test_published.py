from __future__ import annotations

import pytest

from schemas.errors import UsageError
from train.config.sections import resolve
from train.reports.published import PAPERS, Measures, rows_of_paper

ROWS = [row for paper in PAPERS for row in rows_of_paper(paper)]


def find(table: str, name: str, language: str):
    (row,) = (row for row in ROWS if (row.table, row.name, row.language, row.paper) == (table, name, language, "kadar2018"))
    return row


def test_every_number_of_the_tables_is_included():
    counted = {}
    for row in ROWS:
        values = [value for side in (row.image_to_text, row.text_to_image) for value in vars(side).values()]
        key = row.paper, row.table
        counted[key] = counted.get(key, 0) + sum(value is not None for value in values)
    assert counted == {
        ("gella2017", "table 1"): 6 * 8,
        ("gella2017", "table 2"): 6 * 8,
        ("kadar2018", "table 2"): 3 * 6,
        ("kadar2018", "table 3"): 3 * 6,
        ("kadar2018", "table 4"): 5 * 4,
        ("kadar2018", "table 5"): 5 * 4,
        ("kadar2018", "table 6"): 5 * 4,
        ("kadar2018", "table 7"): 4 * 2,
        ("kadar2018", "figure 3"): 0,
    }


def test_numbers_are_in_the_columns_of_the_papers():
    vse, *_, asym = [row for row in ROWS if (row.paper, row.table) == ("gella2017", "table 2")]
    assert (vse.image_to_text, vse.text_to_image) == (Measures(29.3, 58.1, 71.8, 4), Measures(20.3, 47.2, 60.1, 6))
    assert (asym.name, asym.text_to_image.median_rank, asym.image_to_text.median_rank) == ("PARALLEL-ASYM", 5, 3)
    assert find("table 2", "Bilingual + c2c", "en").image_to_text == Measures(43.8, 71.8, 81.4)
    assert find("table 4", "Bi-comparable", "de").image_to_text == Measures(recall_at_10=62.0)
    assert find("table 5", "Half Monolingual", "en").text_to_image == Measures(recall_at_10=61.6)
    assert find("table 6", "Multi-comparable + c2c", "cs").text_to_image == Measures(recall_at_10=55.2)
    assert find("table 7", "+ Comparable", "fr").text_to_image == Measures(recall_at_10=58.9)


def test_recalls_rise_with_the_cutoff():
    for row in ROWS:
        for side in (row.image_to_text, row.text_to_image):
            recalls = [value for value in (side.recall_at_1, side.recall_at_5, side.recall_at_10) if value is not None]
            assert recalls == sorted(recalls)
            assert all(0 < value < 100 for value in recalls)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.table} {row.name} {row.language}")
def test_the_preset_of_a_row_trains_its_language(row):
    assert row.preset.startswith(f"{row.paper}/")
    assert row.language in resolve(row.preset).data.languages


def test_an_unknown_paper_is_refused():
    with pytest.raises(UsageError, match="no tables of 'huang2019': expected one of gella2017, kadar2018"):
        rows_of_paper("huang2019")
