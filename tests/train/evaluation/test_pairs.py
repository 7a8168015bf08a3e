"""Pairs of vectors without a run: the vectors that a run embeds give what the run gives."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import imagepivot
from schemas.dataset import open_dataset
from schemas.duplicates import Duplicate, duplicates_csv
from schemas.errors import DatasetError
from schemas.parameters import FeaturesParameters
from tests.builders import write_rows
from tests.train.trainings import DAN, MLMME, rewrite
from train.evaluation.embedding import embed
from train.evaluation.pairs import UNKNOWN_TRAINING
from train.evaluation.search import search
from train.evaluation.sentences import embed_sentences
from train.jobs import EmbedJob, EvaluateJob, FiguresJob, SearchJob
from train.reports.comparison import compare_runs
from train.reports.figures import draw_figures
from train.reports.score_report import evaluation_content, write_evaluation
from train.runs.run import open_run

pytestmark = pytest.mark.slow


@pytest.fixture(params=["cosine", "order"])
def run(request, write_run) -> str:
    """A run whose languages are not in the order of the alphabet: the order similarity is not symmetric."""
    return write_run("run", languages=("fr", "en", "de"), similarity=request.param)


@pytest.fixture
def pair_of(tmp_path):
    """Embed a corpus with a run, and return the folders of captions and images."""

    def write(run: str, corpus, name: str = "embedded", **options) -> tuple[str, str]:
        embed(EmbedJob(run, str(tmp_path / name), corpus.features, corpus.captions, device="cpu", **options))
        return str(tmp_path / name / "captions"), str(tmp_path / name / "images")

    return write


@pytest.fixture
def duplicates(tmp_path) -> str:
    """List an image and a caption of test, and a training image that no test image equals."""
    leaks = [
        *(Duplicate(0, "hash", 1.0, f"{split}-001", split) for split in ("train", "test")),
        *(Duplicate(1, "text", 1.0, f"{split}-003", split, "en", "comparable", "1") for split in ("test", "train")),
        *(Duplicate(2, "bytes", 1.0, f"test-{n:03d}", "test") for n in (5, 6)),
        *(Duplicate(3, "bytes", 1.0, f"{split}-008", split) for split in ("val", "test")),
    ]
    (tmp_path / "duplicates.csv").write_text(duplicates_csv(leaks))
    return str(tmp_path / "duplicates.csv")


def written(folder, job: EvaluateJob) -> tuple[dict, bytes]:
    """Evaluate into a folder, and return the content of both files, without the runs."""
    scores = imagepivot.evaluate(job)
    write_evaluation(scores, evaluation_content(scores, job), str(folder))
    content = json.loads((folder / "evaluation.json").read_text())
    assert content.pop("runs")
    return content, (folder / "ranks.parquet").read_bytes()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"folds": 2},
        {"cross_lingual": True},
        {"exclude": "duplicates.csv"},
        {"allow_missing_features": True},
        {"folds": 2, "cross_lingual": True, "exclude": "duplicates.csv", "splits": ("val", "test"), "languages": ("de", "en")},
    ],
    ids=["whole", "folds", "cross-lingual", "exclude", "missing", "all"],
)
def test_pair_of_a_run_equals_the_run_in_every_field(run, toy, gappy, pair_of, duplicates, tmp_path, options):
    if "exclude" in options:
        options = options | {"exclude": duplicates}
    corpus = gappy if "allow_missing_features" in options else toy
    captions, images = pair_of(run, corpus)
    ours, ranks = written(tmp_path / "pair", EvaluateJob(captions=captions, features=images, device="cpu", **options))
    theirs, expected = written(tmp_path / "of-run", EvaluateJob(run, corpus.captions, corpus.features, device="cpu", **options))
    assert ours == theirs
    assert ranks == expected
    assert all(
        score["excluded"]["images"] == 1 for score in ours["scores"] if "exclude" in options and score["split"] == "test"
    )
    comparison = compare_runs([tmp_path / "of-run", tmp_path / "pair"])
    assert {(test.difference, test.p_value) for test in comparison.tests} == {(0.0, 1.0)}
    assert comparison.differences == {}
    assert comparison.notes[-1] == f"pair: {UNKNOWN_TRAINING}"


@pytest.mark.parametrize("text", [DAN, MLMME], ids=["dan", "mlmme"])
def test_pair_of_another_similarity_equals_the_run(train_toy, toy, toy_regions, pair_of, tmp_path, text):
    corpus = toy_regions if text == DAN else toy
    run = train_toy(text, corpus=corpus, max_steps=None).folder
    captions, images = pair_of(run, corpus)
    assert open_dataset(captions).manifest.parameters["model"]["similarity"] == "inner-product"
    ours = written(tmp_path / "pair", EvaluateJob(captions=captions, features=images, device="cpu"))
    assert ours == written(tmp_path / "of-run", EvaluateJob(run, corpus.captions, corpus.features, device="cpu"))


def test_vectors_of_two_runs_are_refused(write_run, toy, pair_of):
    captions, _ = pair_of(write_run("one"), toy, "first")
    _, images = pair_of(write_run("two", seed=1), toy, "second")
    with pytest.raises(DatasetError, match="do not share a space: 'one' of checkpoint") as error:
        imagepivot.evaluate(captions=captions, features=images, device="cpu")
    digests = [open_dataset(location).manifest.parameters["model"]["weights_sha256"][:12] for location in (captions, images)]
    assert all(text in str(error.value) for text in (captions, images, *digests))


def test_changed_vectors_are_evaluated_again(write_run, toy, pair_of, tmp_path):
    captions, images = pair_of(write_run(), toy)
    job = EvaluateJob(captions=captions, features=images, device="cpu")
    before = job.made_from()
    other = rewrite(images, tmp_path / "other", lambda rows: [row | {"feature": -row["feature"]} for row in rows])
    assert open_dataset(other).fingerprint == open_dataset(images).fingerprint
    shutil.rmtree(images)
    shutil.move(other, images)
    assert job.made_from() != before


@pytest.fixture
def tower(run) -> Callable[[str], SimpleNamespace]:
    """Take a run as a pretrained text encoder, with the parameters of captions that it embedded."""
    opened = open_run(run)

    def encode(texts, language):
        return embed_sentences(opened, [text.split() for text in texts], language)

    return lambda folder: SimpleNamespace(
        name="tower", parameters=FeaturesParameters.from_json(open_dataset(folder).manifest.parameters), encode=encode
    )


def test_search_with_a_tower_finds_what_the_run_finds(run, toy, pair_of, tower):
    captions, images = pair_of(run, toy)
    job = SearchJob(run, "en1 en2", "en", embeddings=images, tokenized=True, device="cpu", top=61)
    expected = search(job)
    assert len({hit.score for hit in expected}) > 30
    assert search(replace(job, run="sentence:tower", tokenized=False), load=lambda model, device: tower(captions)) == expected
    with pytest.raises(DatasetError, match=r"'tower' and .* do not share a space: 'run' of checkpoint .*, and 'toy'"):
        search(replace(job, run="sentence:tower", embeddings="", features=toy.features), load=lambda *_: tower(captions))


def test_joint_model_encodes_and_compares_as_the_run(run, toy, pair_of, tower, monkeypatch):
    captions, images = pair_of(run, toy)
    monkeypatch.setattr(imagepivot, "load_text_encoder", None, raising=False)  # Restored, since a loaded name is kept.
    monkeypatch.setattr("pipelines.text.queries.load_text_encoder", lambda model, device: tower(captions))
    ours, theirs = imagepivot.open_joint_model("sentence:tower", images), imagepivot.open_run(run)
    vectors = open_dataset(images).numpy()
    np.testing.assert_array_equal(ours.encode_images(vectors), vectors)
    texts = ours.encode_text(["en1 en2", "en3"], language="en")
    np.testing.assert_array_equal(texts, embed_sentences(theirs, [["en1", "en2"], ["en3"]], "en"))
    scores = ours.similarity(vectors, texts)
    assert scores.dtype == np.float32
    assert len(np.unique(scores)) > 30
    np.testing.assert_array_equal(scores, theirs.similarity(vectors, texts))
    with pytest.raises(DatasetError, match=r"'tower' and .* do not share a space"):
        imagepivot.open_joint_model("sentence:tower", toy.features)


def test_mteb_model_of_a_tower_embeds_as_the_run(run, toy, pair_of, tower):
    captions, _ = pair_of(run, toy)
    ours, theirs = imagepivot.mteb_model(tower(captions), language="en"), imagepivot.open_run(run)
    vectors = ours.encode([{"text": ["en1 en2", "en3"]}])
    assert np.array_equal(vectors, embed_sentences(theirs, [["en1", "en2"], ["en3"]], "en"))
    assert np.array_equal(ours.similarity(vectors, vectors), theirs.similarity(vectors, vectors))


def test_figures_of_a_pair_are_those_of_the_run(run, toy, pair_of, tmp_path):
    captions, images = pair_of(run, toy)
    texts = [
        {name: row[name] for name in ("image_id", "language", "portion", "index", "split")}
        | {"text": f"{row['language']} {row['index']} of {row['image_id']}", "tokens": ["text"]}
        for row in open_dataset(toy.captions)
    ]
    write_rows(tmp_path / "texts", "captions", texts, parameters={"recipe": "raw"})
    options = {"split": "test", "only": ("retrieval", "map"), "points": 9, "device": "cpu"}
    theirs = draw_figures(FiguresJob(run, str(tmp_path / "a"), toy.captions, toy.features, **options))
    job = FiguresJob(str(tmp_path / "b"), captions=captions, features=images, texts=str(tmp_path / "texts"), **options)
    assert (job.run, job.output) == ("", str(tmp_path / "b"))
    ours = draw_figures(job)
    place = lambda ranking: (ranking.caption.key, ranking.rank, ranking.right.image_id, [hit.image_id for hit in ranking.hits])  # noqa: E731
    assert [place(ranking) for ranking in ours.rankings] == [place(ranking) for ranking in theirs.rankings]
    for shown in (ranking.caption for ranking in ours.rankings):
        assert shown.text == f"{shown.key.language} {shown.key.index} of {shown.key.image_id}"
    assert ours.map.image_ids == theirs.map.image_ids
