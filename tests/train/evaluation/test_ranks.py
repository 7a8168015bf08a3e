"""Tables of ranks equal scores, brute force and the stored file."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import imagepivot
from schemas.errors import DatasetError
from schemas.storage.folder import Folder
from train.data.splits import open_data
from train.evaluation.evaluation import embed_captions, embed_images
from train.evaluation.ranks import RANKS, SCHEMA, Queries, join_runs, read_ranks, write_ranks
from train.evaluation.scores import evaluate
from train.evaluation.statistics import bootstrap_intervals
from train.runs.run import open_run


def of_direction(table: pa.Table, direction: str) -> list[dict]:
    return table.filter(pc.equal(table["direction"], direction)).to_pylist()


@pytest.mark.slow
def test_table_equals_brute_force(write_run, toy):
    run = open_run(write_run())
    (score,) = evaluate(
        run, captions=toy.captions, features=toy.features, splits=["val"], languages=["de"], portions=("comparable",)
    )
    data = open_data(toy.captions, toy.features, split="val", portions={"de": ("comparable",)})
    captions = data.captions
    images = embed_images(run.model, data.features)
    scores = run.model.scores(images, embed_captions(run.model, captions.batch(np.arange(len(captions))), "de")).numpy()
    assert len(images) == len(captions.image_ids)
    queries = of_direction(score.ranks, "text_to_image")
    keys = zip(captions.images, captions.indices, strict=True)
    assert [row["query_id"] for row in queries] == [f"{captions.image_ids[i]}/de/comparable/{index}" for i, index in keys]
    for column, row in enumerate(queries):
        own = captions.images[column]
        others = np.delete(np.arange(len(images)), own)
        assert row["image_id"] == captions.image_ids[own]
        assert row["rank"] == 1 + (scores[others, column] > scores[own, column] - 1e-6).sum()
        assert row["best_wrong"] == captions.image_ids[others[scores[others, column].argmax()]]
    for image, row in enumerate(of_direction(score.ranks, "image_to_text")):
        wrong = np.flatnonzero(captions.images != image)
        assert row["query_id"] == row["image_id"] == captions.image_ids[image]
        assert row["best_wrong"] == queries[wrong[scores[image, wrong].argmax()]]["query_id"]
        best = scores[image, captions.images == image].max()
        assert row["rank"] == 1 + (scores[image, wrong] > best - 1e-6).sum()
    assert {tuple(row[name] for name in ("split", "language", "portion", "candidates", "fold")) for row in queries} == {
        ("val", "de", "comparable", None, None)
    }


@pytest.mark.slow
@pytest.mark.parametrize(("seeds", "folds"), [((0,), 1), ((0,), 3), ((0, 1), 1)])
def test_scores_follow_from_their_tables(write_run, toy, seeds, folds):
    runs = [open_run(write_run(f"seed-{seed}", seed=seed)) for seed in seeds]
    scores = evaluate(runs, captions=toy.captions, features=toy.features, splits=["test"], folds=folds)
    assert len(scores) > 1
    for score in scores:
        for direction in ("image_to_text", "text_to_image"):
            rows, metrics = of_direction(score.ranks, direction), getattr(score.retrieval, direction)
            ranks, images = np.array([row["rank"] for row in rows]), np.array([row["image_id"] for row in rows])
            assert score.intervals[direction] == bootstrap_intervals(ranks, images)
            assert {row["fold"] for row in rows} == ({None} if folds == 1 else {1, 2, 3})
            assert len(rows) == metrics.queries
            groups = [ranks[[row["fold"] == fold for row in rows]] for fold in {row["fold"] for row in rows}]
            assert metrics.recall_at_5 == pytest.approx(np.mean([100 * (group <= 5).mean() for group in groups]))
    plain = scores[0].to_dict()["intervals"]["text_to_image"]
    assert plain["recall_at_1"] == vars(scores[0].intervals["text_to_image"].recall_at_1)


@pytest.mark.slow
def test_cross_lingual_tables_name_the_candidates(write_run, toy):
    run = open_run(write_run(languages=("en", "de")))
    scores = evaluate(run, captions=toy.captions, features=toy.features, splits=["test"], cross_lingual=True)
    results = [(score, other, result) for score in scores for other, result in score.cross_lingual.items()]
    assert results
    for score, other, result in results:
        rows = result.ranks.to_pylist()
        assert {(row["language"], row["candidates"], row["direction"]) for row in rows} == {
            (score.language, other, "text_to_text")
        }
        assert sum(row["rank"] == 1 for row in rows) == round(result.direction.recall_at_1 * len(rows) / 100)
        assert result.intervals == bootstrap_intervals(
            np.array([row["rank"] for row in rows]), np.array([row["image_id"] for row in rows])
        )
        for row in rows:
            assert row["query_id"].split("/")[:2] == [row["image_id"], score.language]
            image_id, language, _, _ = row["best_wrong"].split("/")
            assert image_id != row["image_id"]
            assert language == other


def table(rank: int = 3) -> pa.Table:
    values = ["val", "en", "comparable", "image_to_text", None, "a", "a", rank, "b/en/comparable/0", None]
    return pa.table([[value] for value in values], schema=SCHEMA)


def test_ranks_are_written_with_equal_bytes_and_read_back(tmp_path):
    for name in ("one", "two"):
        write_ranks(Folder(str(tmp_path / name)), table(), {"step": "12"})
    assert (tmp_path / "one" / RANKS).read_bytes() == (tmp_path / "two" / RANKS).read_bytes()
    stored = imagepivot.read_ranks(tmp_path / "one")
    assert stored.equals(table())
    assert stored.schema.metadata == {b"step": b"12"}


def test_only_runs_with_ranks_of_the_same_queries_are_joined():
    rows = [{**table(rank).to_pylist()[0], "query_id": name, "image_id": name} for rank, name in ((3, "b"), (1, "a"))]
    first, turned, other = (
        Queries.of(pa.Table.from_pylist(own, SCHEMA), direction="image_to_text")
        for own in (rows, rows[::-1], [rows[0], {**rows[1], "query_id": "c"}])
    )
    joined = join_runs([first, turned])
    assert (joined.ids.tolist(), joined.images.tolist(), joined.ranks.tolist()) == (["a", "b"], ["a", "b"], [[1, 3], [1, 3]])
    assert join_runs([first, other]) is None
    assert join_runs([first, None]) is None


def test_missing_and_damaged_ranks_are_errors(tmp_path):
    with pytest.raises(DatasetError, match=r"holds no ranks\.parquet: give a folder that imagepivot evaluate --output or"):
        read_ranks(tmp_path)
    write_ranks(Folder(str(tmp_path)), table())
    content = (tmp_path / RANKS).read_bytes()
    (tmp_path / RANKS).write_bytes(content[:-40])
    with pytest.raises(DatasetError, match=r"ranks\.parquet is damaged"):
        read_ranks(tmp_path)
