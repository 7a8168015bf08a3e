import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from schemas.dataset import open_dataset
from schemas.errors import DatasetError, UsageError
from tests.train.models.test_encoders import batch_with
from tests.train.trainings import CONFIG, ENGLISH, MHA_D, SMALL, assert_equal, events, reproduce_job, weights
from train.config.sections import from_toml
from train.evaluation.embedding import embed
from train.evaluation.scores import evaluate
from train.evaluation.search import search
from train.jobs import EmbedJob, EvaluateJob, ReproduceJob, SearchJob, StsJob, TrainJob
from train.loop.training import train
from train.loop.training_data import load_training_inputs
from train.reports.reproduce import reproduce
from train.reports.row_datasets import corpora_of
from train.reports.row_results import read_result
from train.runs.run import open_run
from train.sts.similarity import sts

TABLE = "sentences.0.words.weight"


def begins(text: str, how: str = "finetuned", steps: int = 44) -> str:
    return text.replace("word_dim = 4", f'word_dim = 4\nword_vectors = "{how}"').replace(
        "max_steps = 44", f"max_steps = {steps}"
    )


def reads(text: str, steps: int = 44) -> str:
    return begins(text, "precomputed", steps)


HUANG = {**SMALL, "model.num_heads": "2", "model.attention_dim": "5", "model.context_dim": "7", "schedule.max_epochs": "0"}


@pytest.fixture(scope="session")
def region_tokens(toy_regions, toy_tokens):
    return replace(toy_regions, token_features=toy_tokens.token_features)


def huang(corpus, output, *rows, seeds=1) -> ReproduceJob:
    return reproduce_job("huang2019", str(output), corpus, rows=rows, seeds=seeds, overrides=HUANG, workers=1, device="cpu")


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.parametrize(
    ("text", "corpus"),
    [
        *((begins(CONFIG, how), "toy_words") for how in ("finetuned", "frozen")),
        (reads(CONFIG), "toy_tokens"),
        (reads(MHA_D), "region_tokens"),
    ],
    ids=["finetuned", "frozen", "vse", "mha-d"],
)
def test_training_with_vectors_resumes_bit_for_bit(train_toy, request, tmp_path, text, corpus):
    corpus = request.getfixturevalue(corpus)
    train_toy(text, "whole", corpus=corpus)
    train_toy(text.replace("= 44", "= 20"), "parts", corpus=corpus, memory_map=str(tmp_path / "maps"))
    train_toy(text, "parts", corpus=corpus, resume=True)
    assert_equal(weights(tmp_path / "parts"), weights(tmp_path / "whole"))


@pytest.mark.slow
def test_resuming_with_other_vectors_is_refused(train_toy, toy_words, toy_tokens, write_words, write_tokens, tmp_path):
    other = {
        "word_vectors": (begins, toy_words, write_words(tmp_path / "other", seed=9)),
        "token_features": (reads, toy_tokens, write_tokens(tmp_path, seed=9)),
    }
    for name, (takes, corpus, location) in other.items():
        train_toy(takes(CONFIG, steps=20), name, corpus=corpus)
        with pytest.raises(DatasetError, match=rf"holds another run \({name}: was [0-9a-f]{{12}}\.\.\., now"):
            train_toy(takes(CONFIG), name, corpus=replace(corpus, **{name: location}), resume=True)
    with pytest.raises(DatasetError, match=r"model\.word_vectors: was \"finetuned\", now \"random\""):
        train_toy(CONFIG, "word_vectors", resume=True)


def test_vectors_without_matching_configuration_are_refused(toy, toy_words, toy_tokens):
    for text, corpus, message in (
        (begins(CONFIG), toy, "no word vectors are given: give --word-vectors FOLDER"),
        (begins(CONFIG, "frozen"), toy, "model.word_vectors is 'frozen', but no word vectors are given"),
        (CONFIG, toy_words, "model.word_vectors is 'random', so that the model would not use them"),
        (reads(CONFIG), toy, "token features are missing: give --token-features FOLDER"),
        (CONFIG, toy_tokens, "is given, but model.word_vectors is not 'precomputed'"),
    ):
        with pytest.raises(UsageError, match=message):
            load_training_inputs(from_toml(text, "test"), replace(corpus, captions="nowhere"), seed=0)


@pytest.mark.parametrize(
    ("row", "field", "lacking", "unread"),
    [
        ("mha-d-fasttext", "word_vectors", "pretrained word vectors", "begins with word vectors"),
        ("mha-d-bert", "token_features", "vectors of tokens", "reads vectors of tokens"),
    ],
)
def test_rows_with_vectors_need_their_dataset(toy_regions, toy_words, toy_tokens, tmp_path, row, field, lacking, unread):
    option = field.replace("_", "-")
    command = {"token_features": "text-features"}.get(field, option)
    lacking = f"{lacking} (--{option} FOLDER, which imagepivot {command} makes)"
    location = getattr(toy_words if field == "word_vectors" else toy_tokens, field)
    toy, vectors = toy_regions, replace(toy_regions, **{field: location})
    without, given = (huang(corpus, tmp_path / "o", "mha-d", row) for corpus in (toy, vectors))
    corpora, remarks = corpora_of(without)
    assert (list(corpora), remarks) == (["huang2019/mha-d"], [f"left out for lack of {lacking}: huang2019/{row}"])
    corpora, remarks = corpora_of(given)
    assert (list(corpora), remarks) == (["huang2019/mha-d", f"huang2019/{row}"], [])
    assert [getattr(corpus, field) for corpus in corpora.values()] == ["", location]
    with pytest.raises(UsageError, match=rf"nothing to train: left out for lack of {re.escape(lacking)}"):
        corpora_of(huang(toy, tmp_path / "o", row))
    with pytest.raises(UsageError, match=f"is given, but no row that is chosen {unread}"):
        corpora_of(huang(vectors, tmp_path / "o", "mha-d"))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["finetuned", "frozen"])
def test_training_starts_from_word_vectors(train_toy, toy_words, finished_run, tmp_path, how):
    remarks = []
    train_toy(begins(CONFIG, how), corpus=toy_words, on_warning=remarks.append)
    begun, drawn = weights(tmp_path / "run")[TABLE], weights(finished_run[0])[TABLE]
    vectors = {row["id"]: row["vector"] for row in open_dataset(toy_words.word_vectors).table().to_pylist()}
    known = sorted(vectors)
    moved = (begun[known] - torch.tensor([vectors[number] for number in known])).abs().max()
    assert (float(moved) == 0) == (how == "frozen")
    assert not torch.allclose(begun[known], drawn[known], atol=0.3)
    if how == "frozen":  # A word without a vector stays as it was drawn, too.
        train_toy(begins(CONFIG, "frozen", 1), "again", corpus=toy_words)
        assert torch.equal(weights(tmp_path / "again")[TABLE], begun)
    size = len(open_dataset(toy_words.vocabulary).vocabulary())
    assert remarks == [
        f"word vectors loaded from {toy_words.word_vectors!r}: {len(known)} of {size} in en, de; the others are random"
    ]
    run = open_run(tmp_path / "run")
    assert run.fingerprints["word_vectors"] == open_dataset(toy_words.word_vectors).fingerprint
    assert evaluate(EvaluateJob(str(tmp_path / "run"), toy_words.captions, toy_words.features, ("val",)))


@pytest.mark.slow
def test_init_from_run_overrides_word_vectors(train_toy, toy_words, tmp_path):
    train_toy(ENGLISH, "english")
    remarks = []
    train_toy(begins(CONFIG, "frozen", 1), corpus=toy_words, init_from=str(tmp_path / "english"), on_warning=remarks.append)
    assert [remark.partition(" ")[0] for remark in remarks] == ["word", "started"]
    assert_equal(weights(tmp_path / "run")[TABLE], weights(tmp_path / "english", "best.pt")[TABLE])


@pytest.mark.cluster
def test_adding_word_vectors_keeps_results_of_other_rows(four_languages_regions, write_words, tmp_path):
    rows = ("mha-d", "mha-d-fasttext")
    assert reproduce(huang(four_languages_regions, tmp_path / "o", *rows)) == ()
    vectors = write_words(tmp_path / "words", vocabulary=four_languages_regions.vocabulary)
    ended = []
    job = huang(replace(four_languages_regions, word_vectors=vectors), tmp_path / "o", *rows)
    assert reproduce(job, lambda done: ended.append(done.task.preset)) == ()
    assert ended == ["huang2019/mha-d", "huang2019/mha-d-fasttext"]
    random, pretrained = (read_result(tmp_path / "o" / "results" / "huang2019" / name / "seed-0.json") for name in rows)
    assert set(pretrained["fingerprints"]) - set(random["fingerprints"]) == {"word_vectors"}
    known = Counter(row["language"] for row in open_dataset(vectors).table().to_pylist())
    words = pretrained["words"]
    assert all(0 < pretrained["pretrained"][language] <= min(known[language], words[language]) for language in ("en", "de"))
    assert "pretrained" not in random


@pytest.fixture(scope="session")
def run(toy_tokens, tmp_path_factory):
    """A run with token features; read-only."""
    folder = tmp_path_factory.mktemp("reads") / "run"
    train(TrainJob(from_toml(reads(CONFIG), "test"), toy_tokens, str(folder), device="cpu", curves=False))
    return str(folder)


@pytest.mark.slow
def test_run_with_token_features(run, train_toy, toy_tokens, tmp_path):
    chance = train_toy(reads(CONFIG, 1), corpus=toy_tokens).progress.best_score
    assert max(line["score"] for line in events(Path(run), "evaluation")) > 1.5 * chance
    opened = open_run(run)
    assert opened.fingerprints["token_features"] == open_dataset(toy_tokens.token_features).fingerprint
    assert opened.fingerprints["token_model"] == "f" * 64
    assert not any("words" in name for name in opened.model.state_dict())
    assert opened.language_ids == {}
    (counts,) = events(Path(run), "training_data")
    assert set(counts) == {"event", "step", "captions"}  # No words: the model has no word embeddings.
    with pytest.raises(UsageError, match=r"exist for captions only: it cannot read other text\. evaluate, embed and"):
        search(SearchJob(run, "en1", "en", toy_tokens.features, device="cpu", tokenized=True))
    (tmp_path / "pairs.tsv").write_text("1\ten1\ten2\n2\ten3\ten2\n")
    with pytest.raises(UsageError, match="exist for captions only"):
        sts(StsJob((str(tmp_path / "pairs.tsv"), run), tokenized=True))


@pytest.mark.slow
def test_evaluate_with_token_features(run, toy_tokens, finished_run, tmp_path):
    job = EvaluateJob(run, toy_tokens.captions, toy_tokens.features, ("test",), token_features=toy_tokens.token_features)
    scores = evaluate(job)
    assert {score.language for score in scores} == {"en", "de"}
    mapped = evaluate(replace(job, memory_map=str(tmp_path / "maps"), cross_lingual=True))
    assert [score.retrieval for score in mapped] == [score.retrieval for score in scores]
    with pytest.raises(UsageError, match="give --token-features FOLDER"):
        evaluate(replace(job, token_features=""))
    with pytest.raises(UsageError, match=r"is given, but model\.word_vectors is not 'precomputed'"):
        evaluate(replace(job, run=str(finished_run[0])))
    # An ensemble may have members of both sorts.
    assert evaluate(replace(job, run=(run, str(finished_run[0]))))


@pytest.mark.slow
def test_embed_with_token_features(run, toy_tokens, tmp_path):
    job = EmbedJob(run, str(tmp_path / "out"), toy_tokens.features, toy_tokens.captions, "cpu")
    with pytest.raises(UsageError, match="give --token-features FOLDER"):
        embed(job)
    manifest = embed(replace(job, token_features=toy_tokens.token_features))[1]
    assert {source["name"] for source in manifest.inputs} == {"encoded", "token-features"}
    opened, tokens = open_run(run), {}
    for row in open_dataset(toy_tokens.token_features):
        tokens[row["image_id"], row["language"], row["portion"], row["index"]] = row["vectors"]
    for row in list(open_dataset(tmp_path / "out" / "captions"))[::17]:
        vectors = torch.from_numpy(tokens[row["image_id"], row["language"], row["portion"], row["index"]].copy())
        expected = opened.model.encode_captions(batch_with([vectors]), row["language"]).values[0].detach().numpy()
        np.testing.assert_allclose(row["embedding"], expected, atol=1e-6)
    assert len(embed(replace(job, captions="", output=str(tmp_path / "images")))) == 1
