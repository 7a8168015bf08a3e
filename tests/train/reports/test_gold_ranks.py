import json
import shutil
from pathlib import Path

import pytest
import torch

from schemas.console.tables import Cell
from schemas.errors import DatasetError
from tests.train.trainings import SMALL, reproduce_job
from train.data.batches import CaptionBatch
from train.data.splits import open_data
from train.evaluation.evaluation import embed_captions, embed_images
from train.reports import gold_ranks as module
from train.reports.gold_ranks import gold_ranks
from train.reports.published import GOLD_COLUMNS, GoldRank, presets_of_table
from train.reports.reproduce import reproduce
from train.reports.row_results import read_result, write_report, write_result
from train.runs.run import open_run

pytestmark = pytest.mark.cluster

BETTER = SMALL | {"schedule.eval_every_steps": "5", "schedule.max_steps": "10", "optimizer.learning_rate": "0.01"}
SEEDS = 2


@pytest.fixture(scope="module")
def trained(toy_2016, tmp_path_factory) -> Path:
    """The rows of table 3, two runs each; read-only."""
    output = tmp_path_factory.mktemp("gold") / "out"
    rows = presets_of_table("gella2017", 3)
    reproduce(
        reproduce_job("gella2017", str(output), toy_2016, seeds=SEEDS, rows=rows, overrides=BETTER, workers=1, device="cpu")
    )
    return output


@pytest.fixture
def published(monkeypatch):
    """Two captions of the toy stand for those of the paper, and one that it lacks."""
    ranks = dict(zip(GOLD_COLUMNS, (141, 37, 6), strict=True))
    captions = (("test-003", "de", 1, "ein Wort"), ("test-003", "en", 0, "a word"), ("elsewhere", "en", 0, "no word"))
    monkeypatch.setattr(module, "GOLD_RANKS", tuple(GoldRank(*caption, ranks) for caption in captions))


def ranks_by_hand(output: Path, corpus, column: str, language: str) -> dict[tuple[str, int], list[int]]:
    """Rank one caption at a time under each run of a column, by image id and index."""
    found: dict[tuple[str, int], list[int]] = {}
    for seed in range(SEEDS):
        run = open_run(output / "runs" / GOLD_COLUMNS[column].format(language) / f"seed-{seed}")
        portions, l2 = {language: ["comparable"]}, run.config.data.l2_features
        data = open_data(corpus.captions, corpus.features, split="test_2016", portions=portions, l2=l2)
        images = embed_images(run.model, data.features)
        rows = data.captions.rows_of(language)
        batch = CaptionBatch(data.captions.token_ids, data.captions.offsets, rows)
        with torch.no_grad():
            scores = run.model.scores(images, embed_captions(run.model, batch, language)).tolist()
        for column_number, row in enumerate(rows):
            image = data.captions.images[row]
            others = [number for number in range(len(scores)) if number != image]
            rank = 1 + sum(scores[other][column_number] >= scores[image][column_number] for other in others)
            found.setdefault((data.captions.image_ids[image], int(data.captions.indices[row])), []).append(rank)
    return found


def test_ranks_are_those_of_each_run(trained, toy_2016, published):
    ranks = gold_ranks(str(trained))
    assert ranks.images == 9
    assert ranks.runs == dict.fromkeys(presets_of_table("gella2017", 3), SEEDS)
    assert [(line.gold.image_id, line.gold.language, line.gold.index, line.gold.text) for line in ranks.published] == [
        ("test-003", "de", 1, "ein Wort"),
        ("test-003", "en", 0, "a word"),
    ]
    for line in ranks.published:
        for column in GOLD_COLUMNS:
            expected = ranks_by_hand(trained, toy_2016, column, line.gold.language)[line.gold.image_id, line.gold.index]
            assert list(line.ranks[column]) == expected


def test_reports(trained, published, tmp_path):
    ranks = gold_ranks(str(trained))
    [captions] = ranks.to_tables()
    first = ranks.published[0]
    cells = [Cell(first.rank_text(name), rank) for name, rank in zip(GOLD_COLUMNS, (141, 37, 6), strict=True)]
    assert captions.rows[0] == (("de: ein Wort", "  image test-003"), *cells)
    assert len(captions.rows) == 2
    assert write_report(str(tmp_path), "table", ranks.to_markdown(), ranks.to_dict()) == [
        f"{tmp_path}/table.md",
        f"{tmp_path}/table.json",
    ]
    markdown = (tmp_path / "table.md").read_text()
    assert f"| de: ein Wort<br>  image test-003 | {first.rank_text('OE')} (141) | " in markdown
    assert "Runs: gella2017/oe-de 2, gella2017/oe-en 2" in markdown
    stored = json.loads((tmp_path / "table.json").read_text())
    assert stored == json.loads(json.dumps(ranks.to_dict()))
    assert stored["published"][0]["published"] == {"OE": 141, "PIVOT": 37, "PARALLEL": 6}
    assert len(stored["published"][0]["ranks"]["OE"]) == SEEDS


def test_untrained_features_are_named(trained, tmp_path):
    assert gold_ranks(str(trained)).untrained == ()
    shutil.copytree(trained, tmp_path / "o")
    path = tmp_path / "o/results/gella2017/pivot-asym/seed-0.json"
    write_result(path, read_result(path) | {"untrained": ["pool (random:0)"]})
    ranks = gold_ranks(str(tmp_path / "o"))
    write_report(str(tmp_path), "table", ranks.to_markdown(), ranks.to_dict())
    assert "- untrained: the weights of pool (random:0) are random" in (tmp_path / "table.md").read_text()
    assert json.loads((tmp_path / "table.json").read_text())["untrained"] == ["pool (random:0)"]


def test_untrained_rows_are_left_out(trained, published, tmp_path):
    shutil.copytree(trained, tmp_path / "o")
    shutil.rmtree(tmp_path / "o/results/gella2017/pivot-asym")
    ranks = gold_ranks(str(tmp_path / "o"))
    assert "gella2017/pivot-asym" not in ranks.runs
    assert [list(caption.ranks) for caption in ranks.published] == [["OE", "PARALLEL"]] * 2
    with pytest.raises(DatasetError, match="holds no trained row of table 3"):
        gold_ranks(str(tmp_path / "empty"))
