import json
import shutil

import pyarrow as pa
import pytest

from schemas.storage.folder import Folder
from train.evaluation.ranks import read_ranks, write_ranks
from train.reports.comparison import compare_runs
from train.reports.verdict import published_table, verdict


@pytest.fixture
def ranked(finished_run, tmp_path):
    """Copy a run with other ranks: a function of language and direction."""

    def write(name: str, rank_of) -> str:
        folder = shutil.copytree(finished_run[0], tmp_path / name)
        table = read_ranks(folder)
        ranks = [rank_of(row["language"], row["direction"]) for row in table.to_pylist()]
        index = table.column_names.index("rank")
        table = table.set_column(index, table.schema.field("rank"), pa.array(ranks, pa.int32()))
        write_ranks(Folder(str(folder)), table, {key.decode(): text.decode() for key, text in table.schema.metadata.items()})
        return str(folder)

    return write


@pytest.mark.slow
def test_verdict_names_the_better_run_where_it_is_better(ranked):
    good = ranked("good", lambda language, direction: 1)
    bad = ranked("bad", lambda language, direction: 12 if (language, direction) == ("de", "text_to_image") else 1)
    *sentences, last = verdict(compare_runs([bad, good]))
    assert [sentence.partition(", p ")[0] for sentence in sentences] == [
        f"good is better than bad in de comparable val, text to image, R@{cutoff} by 100.0 points" for cutoff in (1, 5, 10)
    ]
    assert all(float(sentence.partition(", p ")[2]) < 0.05 for sentence in sentences)
    assert last == "no difference found elsewhere (p of at least 0.05)"


@pytest.mark.slow
def test_verdict_without_difference_says_so(ranked):
    runs = [ranked(name, lambda language, direction: 3) for name in ("one", "two")]
    assert verdict(compare_runs(runs)) == ["no difference found in 12 tests (p of at least 0.05)"]
    assert verdict(compare_runs(runs[:1])) == []


@pytest.mark.slow
def test_published_rows_stand_below_those_of_their_images(finished_run, tmp_path):
    run = compare_runs([str(finished_run[0])])
    assert published_table(run).rows == [], "no published numbers of a validation split"
    numbers = {"recall_at_1": 11.0, "recall_at_5": 22.0, "recall_at_10": 33.0, "median_rank": 4.0, "queries": 9}
    score = {"language": "de", "portion": "comparable", "split": "test_2016", "sum_of_recalls": 132.0}
    score |= dict.fromkeys(("image_to_text", "text_to_image"), numbers)
    score |= {"chance": {direction: [1, 2, 3, 4] for direction in ("image_to_text", "text_to_image")}}
    (tmp_path / "evaluation").mkdir()
    content = {"scores": [score], "runs": [{"settings": {}}]}
    (tmp_path / "evaluation" / "evaluation.json").write_text(json.dumps(content))
    table = published_table(compare_runs([str(tmp_path / "evaluation")]))
    assert table.rows[0][2:] == (11.0, 22.0, 33.0, 4.0) * 2
    assert all(any(row[2:]) for row in table.rows), "rows without numbers"
    shown = {tuple(row[1:]) for row in table.rows[1:]}
    assert not any("table 6" in row[0] for row in shown)  # It is on translations.
    assert ("kadar2018, table 3: Bilingual + c2c", 37.9, 66.1, 76.8, None, 26.6, 53.0, 64.0, None) in shown
