"""Trainings that begin with pretrained vectors of words."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from schemas.dataset import open_dataset
from schemas.errors import DatasetError, UsageError
from tests.train.trainings import CONFIG, MHA_D, SMALL, assert_equal, reproduce_job, weights
from train.config.sections import from_toml
from train.data.word_vectors import open_word_vectors
from train.evaluation.scores import evaluate_run
from train.jobs import EvaluateJob, ReproduceJob, TrainJob
from train.loop import train
from train.reports.reproduce import reproduce
from train.reports.reproduce_report import read_report
from train.reports.row_datasets import corpora_of, left_out
from train.reports.row_results import read_result
from train.runs.run import open_run
from train.training_data import open_material

TABLE = "sentences.0.words.weight"


def begins(text: str, how: str = "finetuned", steps: int = 44) -> str:
    return text.replace("word_dim = 4", f'word_dim = 4\nword_vectors = "{how}"').replace(
        "max_steps = 44", f"max_steps = {steps}"
    )


def stored(corpus) -> dict[int, list[float]]:
    return {row["id"]: row["vector"] for row in open_dataset(corpus.word_vectors).table().to_pylist()}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["finetuned", "frozen"])
def test_words_begin_with_their_vectors(train_toy, toy_words, tmp_path, how):
    remarks = []
    job = TrainJob(from_toml(begins(CONFIG, how), "test"), toy_words, str(tmp_path / "run"), device="cpu", curves=False)
    train(job, remark=remarks.append)
    train_toy(CONFIG, "drawn")
    begun, drawn = weights(tmp_path / "run")[TABLE], weights(tmp_path / "drawn")[TABLE]
    vectors = stored(toy_words)
    known = sorted(vectors)
    moved = (begun[known] - torch.tensor([vectors[number] for number in known])).abs().max()
    assert (float(moved) == 0) == (how == "frozen")
    assert not torch.allclose(begun[known], drawn[known], atol=0.3)
    if how == "frozen":  # A word without a vector stays as it was drawn, too.
        again = replace(job, config=from_toml(begins(CONFIG, "frozen", 1), "test"), output=str(tmp_path / "again"))
        train(again)
        assert torch.equal(weights(tmp_path / "again")[TABLE], begun)
    (said,) = remarks
    size = len(open_dataset(toy_words.vocabulary).vocabulary())
    assert f"began with the vectors of words in {toy_words.word_vectors!r}: {len(known)} of {size} in en, de" in said
    run = open_run(tmp_path / "run")
    assert run.fingerprints["word_vectors"] == open_dataset(toy_words.word_vectors).fingerprint
    assert evaluate_run(EvaluateJob(str(tmp_path / "run"), toy_words.captions, toy_words.features, ("val",)))


def test_words_that_begin_with_a_vector_are_counted(toy_words):
    words = open_word_vectors(
        toy_words.word_vectors, vocabulary=open_dataset(toy_words.vocabulary).fingerprint, languages=("en", "de"), width=4
    )
    rows = open_dataset(toy_words.word_vectors).table().to_pylist()
    for languages in (("en",), ("de",), ("en", "de")):
        expected = {row["id"] for row in rows if row["language"] in languages}
        assert words.known(languages, range(1000)) == len(expected)
        assert words.known(languages, (0, 1, *sorted(expected)[:5])) == 5


@pytest.mark.slow
def test_good_vectors_help(train_toy, toy_words):
    """The vectors say which words belong to one topic, in both languages, which a short training does not find out alone."""
    text = CONFIG.replace("embed_dim = 6", "embed_dim = 12")
    drawn = train_toy(text, "drawn").progress.best_score
    frozen = train_toy(begins(text, "finetuned"), "trained", corpus=toy_words).progress.best_score
    assert frozen > drawn


@pytest.mark.slow
@pytest.mark.parametrize("how", ["finetuned", "frozen"])
def test_it_resumes_bit_for_bit(train_toy, toy_words, tmp_path, how):
    train_toy(begins(CONFIG, how), "whole", corpus=toy_words)
    train_toy(begins(CONFIG, how, 20), "parts", corpus=toy_words)
    train_toy(begins(CONFIG, how), "parts", corpus=toy_words, resume=True)
    assert_equal(weights(tmp_path / "parts"), weights(tmp_path / "whole"))


@pytest.mark.slow
def test_a_run_is_not_resumed_with_other_vectors(train_toy, toy_words, write_words, tmp_path):
    train_toy(begins(CONFIG, steps=20), corpus=toy_words)
    other = replace(toy_words, word_vectors=write_words(tmp_path / "other", seed=9))
    with pytest.raises(DatasetError, match=r"holds another run \(word_vectors: was [0-9a-f]{12}\.\.\., now"):
        train_toy(begins(CONFIG), corpus=other, resume=True)
    with pytest.raises(DatasetError, match=r"model\.word_vectors: was \"finetuned\", now \"random\""):
        train_toy(CONFIG, resume=True)


def test_vectors_and_configuration_must_agree_before_anything_is_read(toy, toy_words, tmp_path):
    for text, corpus, message in (
        (begins(CONFIG), toy, "no word vectors are given: give --word-vectors FOLDER"),
        (CONFIG, toy_words, "model.word_vectors is 'random', so that no word would begin with them"),
    ):
        config = from_toml(text, "test")
        with pytest.raises(UsageError, match=message):
            open_material(config, replace(corpus, captions="nowhere"), seed=0)


@pytest.mark.slow
def test_words_of_another_run_come_before_pretrained_ones(train_toy, toy_words, tmp_path):
    train_toy(CONFIG.replace(', de = ["comparable"]', "").replace("c2c_probability = 0.5", ""), "english")
    job = TrainJob(
        from_toml(begins(CONFIG, "frozen", 1), "test"),
        toy_words,
        str(tmp_path / "run"),
        device="cpu",
        curves=False,
        init_from=str(tmp_path / "english"),
    )
    remarks = []
    train(job, remark=remarks.append)
    assert [remark.partition(" ")[0] for remark in remarks] == ["began", "started"]
    assert_equal(weights(tmp_path / "run")[TABLE], weights(tmp_path / "english", "best.pt")[TABLE])


@pytest.mark.parametrize("how", ["finetuned", "frozen"])
def test_a_model_of_heads_begins_with_the_words_of_each_language(train_toy, toy_regions, toy_words, tmp_path, how):
    corpus = replace(toy_regions, word_vectors=toy_words.word_vectors)
    train_toy(begins(MHA_D, how, 3), corpus=corpus)
    rows = open_dataset(toy_words.word_vectors).table().to_pylist()
    model = open_run(tmp_path / "run").model
    for language, encoder in zip(("en", "de"), model.sentences, strict=True):
        of_language = [row for row in rows if row["language"] == language]
        ids = torch.tensor([row["id"] for row in of_language])
        gap = (encoder.words(ids) - torch.tensor([row["vector"] for row in of_language])).abs().max()
        assert float(gap.detach()) <= (0 if how == "frozen" else 0.1)


# --- tables ----------------------------------------------------------------------------------------------------------


HUANG = {**SMALL, "model.num_heads": "2", "model.attention_dim": "5", "model.context_dim": "7", "schedule.max_epochs": "0"}


def huang(corpus, output, *rows, seeds=1) -> ReproduceJob:
    return reproduce_job("huang2019", str(output), corpus, rows=rows, seeds=seeds, overrides=HUANG, workers=1, device="cpu")


def test_rows_that_need_vectors_are_trained_where_these_are_given(toy_regions, toy_words, tmp_path):
    toy, toy_words = toy_regions, replace(toy_words, features=toy_regions.features)
    rows = ("mha-d", "mha-d-fasttext")
    without, given = huang(toy, tmp_path / "o", *rows), huang(toy_words, tmp_path / "o", *rows)
    assert list(corpora_of(without)) == ["huang2019/mha-d"]
    lacking = "pretrained word vectors (--word-vectors FOLDER, which imagepivot word-vectors makes)"
    assert left_out(without) == [f"left out for want of {lacking}: huang2019/mha-d-fasttext"]
    assert (list(corpora_of(given)), left_out(given)) == (["huang2019/mha-d", "huang2019/mha-d-fasttext"], [])
    assert [corpus.word_vectors for corpus in corpora_of(given).values()] == ["", toy_words.word_vectors]
    with pytest.raises(
        UsageError, match=r"nothing to train: left out for want of pretrained word vectors \(--word-vectors FOLDER"
    ):
        corpora_of(huang(toy, tmp_path / "o", "mha-d-fasttext"))
    with pytest.raises(UsageError, match="is given, but no row that is chosen begins with word vectors"):
        corpora_of(huang(toy_words, tmp_path / "o", "mha-d"))


@pytest.mark.cluster
def test_a_row_with_vectors_keeps_the_results_of_the_others(four_languages_regions, write_words, tmp_path):
    remarks = []
    rows = ("mha-d", "mha-d-fasttext")
    assert reproduce(huang(four_languages_regions, tmp_path / "o", *rows), remark=remarks.append) == ()
    assert any(
        remark.startswith("left out for want of") and remark.endswith(": huang2019/mha-d-fasttext") for remark in remarks
    )
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
    report = read_report(str(tmp_path / "o"), "huang2019").to_markdown()
    (line,) = (line for line in report.splitlines() if line.startswith("| huang2019/mha-d-fasttext | "))
    numbers = pretrained["pretrained"]
    assert f"| en {words['en']}, de {words['de']} | en {numbers['en']}, de {numbers['de']} |" in line
