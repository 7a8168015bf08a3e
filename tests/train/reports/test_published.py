import gzip
import os
import re
from pathlib import Path

import pytest

from schemas.errors import UsageError
from train.config.sections import load_config
from train.reports.published import (
    ENSEMBLES,
    GOLD_COLUMNS,
    GOLD_RANKS,
    PAPERS,
    STS_PAPERS,
    TASKS,
    presets_of_paper,
    presets_of_table,
    rows_of_paper,
)

ROWS = [(paper, row) for paper in PAPERS for row in rows_of_paper(paper)]
DIRECTIONS = {"I": "image_to_text", "T": "text_to_image"}
MEASURES = {"1": "recall_at_1", "5": "recall_at_5", "10": "recall_at_10", "Mr": "median_rank"}

# Paper and table; of recalls language, queries and K; of textual similarity the year; then the numbers from top to bottom.
PRINTED = """
kadar2018 2 en I 1 | 31.6 31.6 31.7 34.8 33.8 31.5 42.4 42.7 43.8
kadar2018 2 en I 5 | 60.4 61.2 62.4 63.7 62.8 61.4 69.9 70.7 71.8
kadar2018 2 en I 10 | 72.7 73.8 74.1 74.8 75.2 74.7 79.8 80.1 81.4
kadar2018 2 en T 1 | 23.3 23.5 24.7 25.8 26.2 27.1 30.5 30.6 32.3
kadar2018 2 en T 5 | 53.6 53.4 53.9 56.5 56.4 56.2 57.8 58.1 59.9
kadar2018 2 en T 10 | 65.8 65.8 65.7 67.8 68.4 66.9 67.9 68.3 70.2
kadar2018 3 de I 1 | 29.3 26.9 28.2 26.8 28.2 30.2 34.2 35.2 37.9
kadar2018 3 de I 5 | 58.1 56.6 57.7 57.5 61.9 60.4 63.0 64.3 66.1
kadar2018 3 de I 10 | 71.8 70.0 71.3 70.9 73.4 72.8 74.0 75.3 76.8
kadar2018 3 de T 1 | 20.3 20.3 20.9 21.0 22.5 21.8 23.9 24.6 26.6
kadar2018 3 de T 5 | 47.2 46.4 46.9 48.5 49.3 50.5 49.5 50.8 53.0
kadar2018 3 de T 10 | 60.1 59.2 59.3 60.4 61.7 62.3 60.5 62.0 64.0
kadar2018 4 en I 10 | 56.3 67.4 58.2 67.9 67.6
kadar2018 4 en T 10 | 40.1 55.1 47.7 55.7 56.0
kadar2018 4 de I 10 | 39.5 58.3 51.0 62.0 61.9
kadar2018 4 de T 10 | 20.9 44.6 39.6 48.1 49.1
kadar2018 5 en I 10 | 79.8 73.7 73.6 76.0 73.1
kadar2018 5 en T 10 | 67.9 61.6 62.2 65.9 62.1
kadar2018 5 de I 10 | 74.0 66.4 67.6 71.2 67.9
kadar2018 5 de T 10 | 60.5 53.9 54.9 59.1 54.9
kadar2018 6 en T 10 | 50.4 58.7 56.3 59.2 61.8
kadar2018 6 de T 10 | 39.5 51.2 52.2 49.6 52.7
kadar2018 6 fr T 10 | 47.0 57.0 55.0 57.2 59.2
kadar2018 6 cs T 10 | 42.0 51.0 51.6 50.8 55.2
kadar2018 7 fr T 10 | 47.0 56.3 58.9 61.6
kadar2018 7 cs T 10 | 42.0 51.3 52.4 57.2
huang2019 1 de T 1 | 20.3 21.0 31.0 31.3 35.7 22.5 25.8 36.3 39.2 40.3 40.7
huang2019 1 de T 5 | 47.2 48.5 60.9 62.2 64.9 49.3 54.9 65.3 67.5 70.1 70.5
huang2019 1 de T 10 | 60.1 60.4 71.0 70.9 74.6 61.7 65.1 74.7 76.7 79.0 78.8
huang2019 1 de I 1 | 29.3 26.8 46.5 47.5 52.3 28.2 34.1 53.1 55.0 60.4 56.5
huang2019 1 de I 5 | 58.1 57.5 77.5 78.5 81.8 61.9 65.5 82.3 84.7 85.4 84.6
huang2019 1 de I 10 | 71.8 70.9 83.0 84.5 88.5 73.4 76.5 88.8 91.2 92.0 91.3
huang2019 1 en T 1 | 23.3 25.8 39.4 39.6 45.8 26.2 30.1 46.2 48.7 50.1 48.9
huang2019 1 en T 5 | 53.6 56.5 69.2 69.1 74.4 56.4 62.5 74.7 77.2 78.1 78.3
huang2019 1 en T 10 | 65.8 67.8 69.1 79.8 83.0 68.4 71.6 82.9 85.0 85.7 85.8
huang2019 1 en I 1 | 31.6 34.8 55.0 53.1 61.8 33.8 36.4 63.3 66.4 68.0 66.5
huang2019 1 en I 5 | 60.4 63.7 81.8 82.1 87.5 62.8 68.0 87.0 88.3 88.8 89.1
huang2019 1 en I 10 | 72.7 74.8 89.0 87.5 93.7 75.2 80.9 93.3 93.4 94.0 94.1
huang2019 sts 2012 | 29.9 86.3 83.7 80.6 82.2 84.1 84.5 84.0 84.6 85.8 86.2 86.4
huang2019 sts 2014 | 51.3 83.4 84.5 82.7 84.1 84.3 84.8 83.9 84.5 87.8 88.3 88.0
huang2019 sts 2015 | 60.4 86.4 85.0 89.6 90.8 90.8 91.2 90.7 91.5 91.5 91.8 91.7
gella2017 1 en T 1 | 23.3 25.8 23.5 24.7 26.2 27.1
gella2017 1 en T 5 | 53.6 56.5 53.4 53.9 56.4 56.2
gella2017 1 en T 10 | 65.8 67.8 65.8 65.7 68.4 66.9
gella2017 1 en T Mr | 5 4 5 5 4 4
gella2017 1 en I 1 | 31.6 34.8 31.6 31.7 33.8 31.5
gella2017 1 en I 5 | 60.4 63.7 61.2 62.4 62.8 61.4
gella2017 1 en I 10 | 72.7 74.8 73.8 74.1 75.2 74.7
gella2017 1 en I Mr | 3 3 3 3 3 3
gella2017 2 de T 1 | 20.3 21.0 20.3 20.9 22.5 21.8
gella2017 2 de T 5 | 47.2 48.5 46.4 46.9 49.3 50.5
gella2017 2 de T 10 | 60.1 60.4 59.2 59.3 61.7 62.3
gella2017 2 de T Mr | 6 6 6 6 6 5
gella2017 2 de I 1 | 29.3 26.8 26.9 28.2 28.2 30.2
gella2017 2 de I 5 | 58.1 57.5 56.6 57.7 61.9 60.4
gella2017 2 de I 10 | 71.8 70.9 70.0 71.3 73.4 72.8
gella2017 2 de I Mr | 4 4 4 4 3 3
gella2017 sts 2012 | 29.9 87.3 83.7 – 80.6 82.2 80.5 82.0 83.1 84.6
gella2017 sts 2014 | 51.3 83.4 84.5 72.7 82.7 84.1 81.8 81.4 83.8 84.5
gella2017 sts 2015 | 60.4 86.4 85.0 79.7 89.6 90.8 89.2 90.4 90.3 91.5
"""
COLUMNS = [[part.split() for part in line.split(" | ")] for line in PRINTED.strip().splitlines()]


@pytest.mark.parametrize(("key", "printed"), [column for column in COLUMNS if "sts" not in column[0]], ids=str)
def test_column_of_recalls_equals_the_paper(key, printed):
    paper, table, language, direction, measure = key
    rows = [row for row in rows_of_paper(paper) if (row.table, row.language) == (f"table {table}", language) and row.numbers]
    assert [f"{row.numbers[DIRECTIONS[direction], MEASURES[measure]]}" for row in rows] == printed


@pytest.mark.parametrize(("key", "printed"), [column for column in COLUMNS if "sts" in column[0]], ids=str)
def test_column_of_textual_similarity_equals_the_paper(key, printed):
    (task,) = (task for task in TASKS if task.endswith(key[2]))
    assert [f"{row.values.get(task, '–')}" for row in STS_PAPERS[key[0]].rows] == printed


def test_columns_have_all_published_numbers():
    numbers = sum(len(row.numbers) for paper in PAPERS for row in rows_of_paper(paper))
    numbers += sum(len(row.numbers) for paper in STS_PAPERS.values() for row in paper.rows)
    assert numbers == sum(value != "–" for _, printed in COLUMNS for value in printed) == 469


@pytest.mark.parametrize(
    ("paper", "table", "language", "row", "recall"),
    [
        ("gella2017", "table 2", "de", "PARALLEL-ASYM", 62.3),
        ("kadar2018", "table 2", "en", "Pivot-Sym (Gella et al.)", 65.8),
        ("kadar2018", "table 4", "de", "Bi-comparable", 48.1),
        ("kadar2018", "table 6", "cs", "Multi-comparable + c2c", 55.2),
        ("huang2019", "table 1", "de", "vsepp-de", 70.9),
        ("huang2019", "table 1", "en", "dan", 69.1),
        ("huang2019", "table 1", "en", "huang2019/mha-d-bert", 85.8),
        ("huang2019", "table 1", "de", "huang2019/mha-d-fasttext", 79.0),
    ],
)
def test_numbers_are_those_of_their_rows(paper, table, language, row, recall):
    rows = [each for each in rows_of_paper(paper) if (each.table, each.language) == (table, language)]
    (found,) = (each for each in rows if row in (each.name, each.preset))
    assert found.numbers["text_to_image", "recall_at_10"] == recall


@pytest.mark.parametrize(("paper", "row"), ROWS, ids=str)
def test_preset_of_a_row_trains_its_language(paper, row):
    others = ("gella2017/", "vsepp", "scan/", "dan") if paper == "huang2019" else ("gella2017/",)
    assert row.preset.startswith((f"{paper}/", *others))
    for preset in ENSEMBLES.get(row.preset, (row.preset,)):
        assert row.language in load_config(preset).data.languages
        if preset.endswith(("-en", "-de")):
            assert load_config(preset).data.languages == (row.language,)


def test_presets_of_a_table():
    assert presets_of_table("gella2017", 2) == tuple(
        f"gella2017/{name}" for name in ("vse-de", "oe-de", "pivot-sym", "parallel-sym", "pivot-asym", "parallel-asym")
    )
    assert presets_of_table("gella2017", 4) == tuple(
        ["mlmme"]
        + [f"gella2017/{name}" for name in ("vse-en", "oe-en", "pivot-sym", "parallel-sym", "pivot-asym", "parallel-asym")]
    )
    assert set(presets_of_table("huang2019", 2)) >= {"gella2017/parallel-asym", "vsepp", "huang2019/mha-d"}
    with pytest.raises(UsageError, match="--table is 5, but the tables of gella2017 are 1, 2, 3, 4"):
        presets_of_table("gella2017", 5)


def test_presets_of_a_paper_have_members_before_their_ensembles():
    names = presets_of_paper("huang2019")
    assert len(set(names)) == len(names)
    assert ENSEMBLES["scan/t2i-avg+i2t-lse-de"] == ("scan/t2i-avg-de", "scan/i2t-lse-de")
    for ensemble, members in ENSEMBLES.items():
        assert all(names.index(member) < names.index(ensemble) for member in members)
        assert any(row.preset == ensemble for _, row in ROWS)
    assert presets_of_paper("gella2017") == (*dict.fromkeys(row.preset for row in rows_of_paper("gella2017")), "mlmme")


def test_gold_ranks_of_the_paper():
    assert [tuple(rank.ranks.values()) for rank in GOLD_RANKS] == [(141, 37, 6), (85, 7, 3), (36, 1, 3), (24, 2, 2)]
    assert all(list(rank.ranks) == list(GOLD_COLUMNS) for rank in GOLD_RANKS)
    for preset in GOLD_COLUMNS.values():
        assert load_config(preset.format("de")).model.similarity == "order"


def test_gold_captions_equal_multi30k():
    # The fixture of this name is a toy here.
    folder = Path(os.environ.get("IMAGEPIVOT_TEST_DATA", Path(__file__).parents[4] / "shared/data"), "multi30k/data/task2")
    if not folder.is_dir():
        pytest.skip("the Multi30K text is not there: set IMAGEPIVOT_TEST_DATA")
    images = (folder / "image_splits" / "test_2016_images.txt").read_text().split()
    for rank in GOLD_RANKS:
        with gzip.open(folder / "raw" / f"test_2016.{rank.index + 1}.{rank.language}.gz", "rt", encoding="utf-8") as lines:
            text = lines.read().split("\n")[images.index(f"{rank.image_id}.jpg")]
        # The paper prints them tokenized and truecased.
        assert re.findall(r"\w+", text.lower()) == re.findall(r"\w+", rank.text.lower())
