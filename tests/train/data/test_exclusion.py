"""Trainings and evaluations without duplicates equal those on datasets that never had them."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from schemas.duplicates import Duplicate, duplicates_csv
from schemas.errors import DatasetError, InputError
from schemas.fingerprints import sha256_of_file
from schemas.storage.folder import Folder
from tests.train.trainings import CONFIG, assert_equal, events, rewrite
from train.data.splits import Exclusion
from train.evaluation.scores import evaluate
from train.runs.checkpoints import LAST, read_checkpoint
from train.runs.run import open_run

# Of two groups of images, one of them within the training split, and one group of captions.
DUPLICATES = [
    Duplicate(0, "bytes", 1.0, "train-004", "train"),
    Duplicate(0, "bytes", 1.0, "train-006", "train"),
    Duplicate(0, "hash", 0.9, "test-002", "test"),
    Duplicate(1, "cosine", 0.95, "train-010", "train"),
    Duplicate(1, "cosine", 0.95, "train-011", "train"),
    Duplicate(2, "text", 1.0, "test-003", "test", "en", "comparable", "1"),
    Duplicate(2, "text", 1.0, "train-020", "train", "en", "comparable", "0"),
]
LEFT_OUT = {
    "train": ({"train-004", "train-006"}, ("train-020", "en", "comparable", 0)),
    "test": ({"test-002"}, ("test-003", "en", "comparable", 1)),
}
SHORT = CONFIG.replace("max_steps = 44", "max_steps = 6").replace("eval_every_steps = 17", "eval_every_steps = 3")


@pytest.fixture
def exclude(tmp_path) -> str:
    path = tmp_path / "duplicates.csv"
    path.write_text(duplicates_csv(DUPLICATES))
    return str(path)


@pytest.fixture
def pruned(toy, tmp_path):
    """Write the toy without the captions that a split excludes."""

    def write(split: str):
        images, caption = LEFT_OUT[split]

        def keep(rows):
            others = [row for row in rows if row["image_id"] not in images]
            return [
                row for row in others if tuple(row[name] for name in ("image_id", "language", "portion", "index")) != caption
            ]

        return replace(toy, captions=rewrite(toy.captions, tmp_path / f"without-{split}", keep))

    return write


def test_leaks_have_another_member_in_another_split(tmp_path):
    members = [
        *[(0, "a", "train"), (0, "b", "test,test_2016")],
        *[(1, "c", "train"), (1, "d", "val")],
        # An image of both splits is no duplicate of itself; of two such images, each has the other one.
        *[(2, "e", "test,train"), (2, "f", "train")],
        *[(3, "g", "test,train"), (3, "h", "test,train")],
    ]
    rows = [Duplicate(group, "hash", 1.0, image_id, splits) for group, image_id, splits in members]

    def leaks(split: str, others: set[str]) -> str:
        return "".join(item.image_id for item in Exclusion.read(str(tmp_path / "list.csv"), [split], others.__contains__).items)

    (tmp_path / "list.csv").write_text(duplicates_csv(rows))
    assert leaks("train", {"test", "val"}) == "acfgh"
    assert leaks("test_2016", {"train"}) == "b"
    assert leaks("val", {"train"}) == "d"
    assert leaks("train", {"test_2017"}) == ""


def test_training_without_duplicates_equals_one_on_data_without_them(train_toy, pruned, exclude, tmp_path):
    remarks = []
    train_toy(SHORT, exclude=exclude, on_warning=remarks.append)
    train_toy(SHORT, "pruned", corpus=pruned("train"))
    stored, other = (read_checkpoint(Folder(str(tmp_path / name)), LAST) for name in ("run", "pruned"))
    assert_equal(stored.model, other.model)
    counts = f"2 images and 1 caption with duplicates in other splits, by {exclude!r}"
    assert f"left out of split train: {counts}" in remarks
    with Path(exclude).open("rb") as file:
        digest = sha256_of_file(file)
    assert stored.fingerprints["exclude"] == digest
    assert "exclude" not in other.fingerprints
    assert events(tmp_path / "run", "excluded") == [
        {"event": "excluded", "step": 0, "images": 2, "captions": 1, "list_sha256": digest}
    ]


def test_a_run_is_resumed_with_its_list_only(train_toy, exclude):
    train_toy(SHORT, exclude=exclude)
    with pytest.raises(DatasetError, match=r"holds another run \(exclude: was [0-9a-f]{12}\.\.\., now none"):
        train_toy(SHORT, resume=True)
    Path(exclude).write_text(duplicates_csv(DUPLICATES[:5]))
    with pytest.raises(DatasetError, match=r"holds another run \(exclude: was [0-9a-f]{12}\.\.\., now [0-9a-f]{12}"):
        train_toy(SHORT, resume=True, exclude=exclude)
    train_toy(SHORT, "plain")
    with pytest.raises(DatasetError, match=r"holds another run \(exclude: was none"):
        train_toy(SHORT, "plain", resume=True, exclude=exclude)


def test_scores_without_duplicates_equal_those_of_data_without_them(write_run, toy, pruned, exclude):
    run = open_run(write_run(languages=("en", "de", "fr")))
    scores = evaluate(run, captions=toy.captions, features=toy.features, splits=["test"], exclude=exclude)
    expected = evaluate(run, captions=pruned("test").captions, features=toy.features, splits=["test"])
    assert len(scores) == len(expected) == 4
    for score, other in zip(scores, expected, strict=True):
        assert score.retrieval == other.retrieval
        assert score.chance == other.chance
        excluded = json.loads(json.dumps(score.to_dict()))["excluded"]
        assert (excluded["images"], excluded["captions"]) == (1, 1)
    queries = {(score.language, score.portion): score.retrieval.text_to_image.queries for score in scores}
    assert queries == {("en", "comparable"): 23, ("de", "comparable"): 16, ("en", "translation"): 8, ("fr", "translation"): 8}


def test_numbers_are_those_of_removed_captions(write_run, toy, tmp_path):
    """A list may name images of other languages, and captions of languages that the dataset lacks: they are not counted."""
    rows = [Duplicate(0, "bytes", 1.0, "train-004", "train"), Duplicate(0, "bytes", 1.0, "test-002", "test")]
    # In a list that is older than the dataset, this image was of the test split.
    rows += [Duplicate(1, "bytes", 1.0, "train-010", "train"), Duplicate(1, "bytes", 1.0, "train-011", "test")]
    rows += [Duplicate(2, "text", 1.0, "train-020", "train", "cs", "comparable", "0")]
    rows += [Duplicate(2, "text", 1.0, "test-003", "test", "cs", "comparable", "0")]
    (tmp_path / "list.csv").write_text(duplicates_csv(rows))
    run = open_run(write_run())
    options = {"captions": toy.captions, "features": toy.features, "splits": ["test"], "languages": ["en"]}
    [score, *_] = evaluate(run, **options, exclude=str(tmp_path / "list.csv"))
    assert score.exclusion is not None
    assert score.to_dict()["excluded"] == {"images": 1, "captions": 0, "list_sha256": score.exclusion.sha256}
    assert score.exclusion.remark(["test"]).startswith("left out of split test: 1 image and 0 captions with duplicates")
    [complete, *_] = evaluate(run, **options)
    assert complete.retrieval.image_to_text.queries - score.retrieval.image_to_text.queries == 1


def test_unknown_image_of_a_list_is_an_error(write_run, train_toy, toy, tmp_path):
    rows = [Duplicate(0, "bytes", 1.0, "train-004", "train"), Duplicate(0, "bytes", 1.0, "other", "test")]
    path = tmp_path / "list.csv"
    path.write_text(duplicates_csv(rows))
    words = f"{str(path)!r} lists 1 image of which {toy.captions!r} has no captions, e.g. 'other': "
    with pytest.raises(InputError, match=f"^{re.escape(words)}"):
        evaluate(open_run(write_run()), captions=toy.captions, features=toy.features, splits=["test"], exclude=str(path))
    path.write_text(duplicates_csv([replace(rows[0], image_id="4"), replace(rows[1], image_id="test-002")]))
    with pytest.raises(InputError, match=r"lists 1 image of which .* has no captions, e\.g\. '4'"):
        train_toy(SHORT, "trained", exclude=str(path))
    assert not (tmp_path / "trained").exists()
