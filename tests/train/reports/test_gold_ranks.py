"""Table 3 of Gella et al. from the ranks that ``reproduce`` writes."""

import numpy as np
import pyarrow as pa
import pytest

from schemas.console.tables import Cell
from schemas.errors import DatasetError
from schemas.storage.folder import Folder
from train.evaluation.ranks import SCHEMA, write_ranks
from train.reports import gold_ranks as module
from train.reports.gold_ranks import RankedCaption, gold_ranks
from train.reports.published import GOLD_COLUMNS, GoldRank
from train.reports.row_results import write_result

SEEDS = 2
CAPTIONS = {"de": 2, "en": 3}  # Of each image, by language.
ROWS = {"oe-de": ["de"], "oe-en": ["en"], "pivot-asym": ["de", "en"], "parallel-asym": ["de", "en"]}


@pytest.fixture
def write_row(tmp_path):
    """Write runs of a row with drawn ranks of nine images; return the ranks by language, image and index."""

    def write(name: str, untrained: tuple[str, ...] = ()) -> dict[tuple[str, str, int], list[int]]:
        rng, drawn = np.random.default_rng(len(name)), {}
        for seed in range(SEEDS):
            result, rows = tmp_path / "results" / "gella2017" / name / f"seed-{seed}.json", []
            for key in [(lang, f"test-{n}", index) for lang in ROWS[name] for n in range(9) for index in range(CAPTIONS[lang])]:
                language, image_id, index = key
                row = {"split": "test_2016", "language": language, "portion": "comparable", "direction": "text_to_image"}
                row |= {"query_id": f"{image_id}/{language}/comparable/{index}", "image_id": image_id}
                rows.append(row | {"rank": int(rng.integers(1, 10))})
                drawn.setdefault(key, []).append(rows[-1]["rank"])
            write_result(result, {"untrained": list(untrained)})
            write_ranks(Folder(str(result.with_suffix(""))), pa.Table.from_pylist(rows, schema=SCHEMA))
        return drawn

    return write


@pytest.fixture
def drawn(write_row):
    """Ranks of the rows of table 3."""
    return {name: write_row(name) for name in ROWS}


@pytest.fixture
def published(monkeypatch):
    """Two captions stand for those of the paper, and one that the data lack."""
    ranks = dict(zip(GOLD_COLUMNS, (141, 37, 6), strict=True))
    captions = (("test-3", "de", 1, "ein Wort"), ("test-3", "en", 0, "a word"), ("elsewhere", "en", 0, "no word"))
    monkeypatch.setattr(module, "GOLD_RANKS", tuple(GoldRank(*caption, ranks) for caption in captions))


def of_column(drawn, column: str, language: str) -> dict[tuple[str, str, int], list[int]]:
    name = GOLD_COLUMNS[column].format(language).removeprefix("gella2017/")
    return {key: ranks for key, ranks in drawn[name].items() if key[0] == language}


def test_ranks_are_those_of_each_run(drawn, published, tmp_path):
    ranks = gold_ranks(str(tmp_path))
    assert ranks.images == 9
    assert ranks.runs == {f"gella2017/{name}": SEEDS for name in ROWS}
    assert [(line.gold.image_id, line.gold.language, line.gold.index, line.gold.text) for line in ranks.published] == [
        ("test-3", "de", 1, "ein Wort"),
        ("test-3", "en", 0, "a word"),
    ]
    for line in ranks.published:
        for column in GOLD_COLUMNS:
            expected = of_column(drawn, column, line.gold.language)[line.gold.language, line.gold.image_id, line.gold.index]
            assert list(line.ranks[column]) == expected


@pytest.mark.usefixtures("drawn", "published")
def test_table_has_ranks_beside_published_ones(tmp_path):
    ranks = gold_ranks(str(tmp_path))
    [captions] = ranks.to_tables()
    first = ranks.published[0]
    cells = [Cell(first.rank_text(name), rank) for name, rank in zip(GOLD_COLUMNS, (141, 37, 6), strict=True)]
    assert captions.rows[0] == (("de: ein Wort", "  image test-3"), *cells)
    assert f"| de: ein Wort<br>  image test-3 | {first.rank_text('OE')} (141) | " in ranks.to_markdown()
    assert ranks.to_dict()["published"][0]["published"] == {"OE": 141, "PIVOT": 37, "PARALLEL": 6}


@pytest.mark.usefixtures("published")
def test_untrained_rows_are_left_out(write_row, tmp_path):
    with pytest.raises(DatasetError, match="holds no trained row of table 3"):
        gold_ranks(str(tmp_path))
    for name in ("oe-de", "oe-en", "parallel-asym"):
        write_row(name)
    ranks = gold_ranks(str(tmp_path))
    assert "gella2017/pivot-asym" not in ranks.runs
    assert [list(caption.ranks) for caption in ranks.published] == [["OE", "PARALLEL"]] * 2


@pytest.mark.parametrize(
    ("ranks", "text"), [((), "–"), ((3,), "3"), ((3, 3), "3"), ((4, 3), "3.5 [3–4]"), ((9, 1, 5), "5 [1–9]")]
)
def test_rank_text_is_the_median_with_its_range(ranks, text):
    assert RankedCaption(GoldRank("image", "en", 0, "a dog", {}), {"OE": ranks}).rank_text("OE") == text
