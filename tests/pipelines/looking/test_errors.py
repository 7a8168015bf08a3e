from itertools import groupby

import pytest

from pipelines.looking.errors import error_strips, worst_queries
from pipelines.looking.exhibits import Photos
from schemas.dataset import open_dataset
from tests.builders import write_rows
from train.evaluation.ranks import read_ranks

NO_PHOTOS = Photos()


def by_group(rows: list[dict]) -> dict[tuple[str, str], list[dict]]:
    """Queries by direction and language, the right item of the lowest rank first, without those in first place."""
    rows = [row for row in rows if row["rank"] > 1]
    rows.sort(key=lambda row: (row["direction"], row["language"], -row["rank"], row["query_id"]))
    return {key: list(group) for key, group in groupby(rows, lambda row: (row["direction"], row["language"]))}


@pytest.fixture
def ranks(finished_run):
    return read_ranks(finished_run[0])


def named(key: tuple[str, str]) -> str:
    return f"worst errors, {key[0].replace('_', ' ')}, val, {key[1]}, comparable"


def test_worst_errors_are_those_of_the_ranks(ranks):
    expected = by_group(ranks.to_pylist())
    found = dict(worst_queries(ranks, 5))
    assert found == {named(key): rows[:5] for key, rows in expected.items()}
    assert len(found) == 4
    assert all(found[named(key)][0]["rank"] == max(row["rank"] for row in rows) for key, rows in expected.items())


@pytest.mark.slow
def test_errors_show_captions_and_what_stood_above(ranks, tmp_path):
    expected, rows = by_group(ranks.to_pylist()), []
    for caption_id in {row["query_id"] for row in ranks.to_pylist() if row["direction"] == "text_to_image"}:
        image_id, language, portion, index = caption_id.split("/")
        key = {"image_id": image_id, "language": language, "portion": portion, "index": int(index), "split": "val"}
        rows.append({**key, "text": f"text of {caption_id}", "tokens": ["a"]})
        rows.append({**key, "portion": "beyond", "text": "no candidate", "tokens": ["a"]})
    rows.sort(key=lambda row: row["portion"])
    write_rows(tmp_path / "captions", "captions", rows)
    strips = {strip.heading.text: strip for strip in error_strips(ranks, open_dataset(tmp_path / "captions"), NO_PHOTOS)}
    for key, errors in expected.items():
        strip = strips[named(key)]
        right, above = strip.exhibits[::2], strip.exhibits[1::2]
        assert [exhibit.mark for exhibit in right] == [f"rank {row['rank']}" for row in errors[:4]]
        assert [exhibit.image_id for exhibit in right] == [row["image_id"] for row in errors[:4]]
        assert all("above it" in exhibit.title for exhibit in above)
        wrong = [row["best_wrong"] for row in errors[:4]]
        if key[0] == "text_to_image":
            assert [exhibit.lines[0].text for exhibit in right] == [f"text of {row['query_id']}" for row in errors[:4]]
            assert [exhibit.image_id for exhibit in above] == wrong
            assert all(line.language == key[1] for e in above for line in e.lines)
        else:
            assert all(line.text.startswith(f"text of {e.image_id}/{key[1]}/") for e in right for line in e.lines)
            assert [exhibit.lines[0].text for exhibit in above] == [f"text of {caption_id}" for caption_id in wrong]
            assert [exhibit.image_id for exhibit in above] == [caption_id.split("/")[0] for caption_id in wrong]
