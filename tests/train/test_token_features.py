"""Trainings on vectors of tokens in place of words."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from schemas.dataset import open_dataset
from schemas.errors import DatasetError, UsageError
from tests.train.trainings import CONFIG, MHA_D, SMALL, assert_equal, reproduce_job, weights
from train.config.sections import from_toml
from train.evaluation.embedding import embed
from train.evaluation.scores import evaluate_run
from train.evaluation.search import search
from train.evaluation.sts import sts
from train.jobs import EmbedJob, EvaluateJob, FiguresJob, ReproduceJob, SearchJob, StsJob, TrainJob
from train.reports.figures import draw_figures
from train.reports.reproduce import reproduce
from train.reports.row_datasets import corpora_of, left_out
from train.reports.row_results import read_result
from train.runs.run import open_run
from train.training_data import open_material


def reads(text: str, steps: int = 44) -> str:
    text = text.replace("word_dim = 4", 'word_dim = 4\nword_vectors = "precomputed"')
    return text.replace("max_steps = 44", f"max_steps = {steps}")


@pytest.fixture(scope="session")
def region_tokens(toy_regions, toy_tokens):
    """Several features for each image, and vectors of the tokens."""
    return replace(toy_regions, token_features=toy_tokens.token_features)


@pytest.mark.slow
def test_a_training_reads_them(train_toy, toy_tokens, tmp_path):
    result = train_toy(reads(CONFIG), corpus=toy_tokens)
    chance = train_toy(reads(CONFIG, 1), "chance", corpus=toy_tokens)
    assert result.progress.best_score > 1.5 * chance.progress.best_score
    run = open_run(tmp_path / "run")
    assert run.fingerprints["token_features"] == open_dataset(toy_tokens.token_features).fingerprint
    assert run.fingerprints["token_model"] == "f" * 64
    assert not any("words" in name for name in weights(tmp_path / "run"))
    assert run.language_ids == {}


@pytest.mark.cluster
@pytest.mark.parametrize("text", [CONFIG, MHA_D], ids=["vse", "mha-d"])
def test_it_resumes_bit_for_bit(train_toy, toy_tokens, region_tokens, tmp_path, text):
    corpus = toy_tokens if text == CONFIG else region_tokens
    train_toy(reads(text), "whole", corpus=corpus)
    train_toy(reads(text, 20), "parts", corpus=corpus, memory_map=str(tmp_path / "maps"))
    train_toy(reads(text), "parts", corpus=corpus, resume=True)
    assert_equal(weights(tmp_path / "parts"), weights(tmp_path / "whole"))


@pytest.mark.slow
def test_a_run_is_not_resumed_with_other_vectors(train_toy, toy_tokens, write_tokens, tmp_path):
    train_toy(reads(CONFIG, 20), corpus=toy_tokens)
    other = replace(toy_tokens, token_features=write_tokens(tmp_path, seed=9))
    with pytest.raises(DatasetError, match=r"holds another run \(token_features: was [0-9a-f]{12}\.\.\., now"):
        train_toy(reads(CONFIG), corpus=other, resume=True)


def test_vectors_and_configuration_must_agree_before_anything_is_read(toy, toy_tokens, tmp_path):
    for text, corpus, message in (
        (reads(CONFIG), toy, "no vectors of tokens are given: give --token-features FOLDER"),
        (CONFIG, toy_tokens, "is given, but the model has vectors of words of its own"),
    ):
        config = from_toml(text, "test")
        with pytest.raises(UsageError, match=message):
            open_material(config, replace(corpus, captions="nowhere"), seed=0)
    with pytest.raises(UsageError, match=r"model\.word_dim is 5, but the vectors in .* have 4 numbers"):
        open_material(from_toml(reads(CONFIG).replace("word_dim = 4", "word_dim = 5"), "test"), toy_tokens, seed=0)


@pytest.mark.slow
def test_a_run_can_start_from_another(train_toy, toy_tokens, tmp_path):
    train_toy(reads(CONFIG), "first", corpus=toy_tokens)
    job = TrainJob(
        from_toml(reads(CONFIG, 1), "test"),
        *(toy_tokens, str(tmp_path / "second")),
        device="cpu",
        curves=False,
        init_from=str(tmp_path / "first"),
    )
    from train.loop import train

    remarks = []
    train(job, remark=remarks.append)
    assert remarks[0].startswith("started from")
    assert "words" not in remarks[0]


# --- commands over runs ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def run(toy_tokens, tmp_path_factory):
    """A run that reads vectors of tokens; read-only."""
    from train.loop import train

    folder = tmp_path_factory.mktemp("reads") / "run"
    train(TrainJob(from_toml(reads(CONFIG), "test"), toy_tokens, str(folder), device="cpu", curves=False))
    return str(folder)


@pytest.mark.slow
def test_evaluate(run, toy_tokens, finished_run, write_tokens, tmp_path):
    job = EvaluateJob(run, toy_tokens.captions, toy_tokens.features, ("test",), token_features=toy_tokens.token_features)
    scores = evaluate_run(job)
    assert {score.language for score in scores} == {"en", "de"}
    mapped = evaluate_run(replace(job, memory_map=str(tmp_path / "maps"), cross_lingual=True))
    assert [score.retrieval for score in mapped] == [score.retrieval for score in scores]
    with pytest.raises(UsageError, match="give --token-features FOLDER"):
        evaluate_run(replace(job, token_features=""))
    with pytest.raises(UsageError, match="is given, but the model has vectors of words of its own"):
        evaluate_run(replace(job, run=str(finished_run[0])))
    # An ensemble may have members of both sorts.
    assert evaluate_run(replace(job, run=(run, str(finished_run[0]))))
    other = write_tokens(tmp_path, model="0" * 64)
    with pytest.raises(DatasetError, match="the vectors of tokens were made by another model"):
        evaluate_run(replace(job, token_features=other))


@pytest.mark.slow
def test_embed(run, toy_tokens, tmp_path):
    job = EmbedJob(run, str(tmp_path / "out"), toy_tokens.features, toy_tokens.captions, "cpu")
    with pytest.raises(UsageError, match="give --token-features FOLDER"):
        embed(job)
    manifest = embed(replace(job, token_features=toy_tokens.token_features))[1]
    assert {source["name"] for source in manifest.inputs} == {"encoded", "token-features"}
    opened, tokens = open_run(run), {}
    for row in open_dataset(toy_tokens.token_features):
        tokens[row["image_id"], row["language"], row["portion"], row["index"]] = row["vectors"]
    from tests.train.models.test_encoders import batch_with

    for row in list(open_dataset(tmp_path / "out" / "captions"))[::17]:
        vectors = torch.from_numpy(tokens[row["image_id"], row["language"], row["portion"], row["index"]].copy())
        expected = opened.model.encode_captions(batch_with([vectors]), row["language"]).values[0].detach().numpy()
        np.testing.assert_allclose(row["embedding"], expected, atol=1e-6)
    assert len(embed(replace(job, captions="", output=str(tmp_path / "images")))) == 1


def test_a_text_has_no_vectors(run, toy_tokens, tmp_path):
    with pytest.raises(UsageError, match=r"of a text there are none\. evaluate, embed and figures take them"):
        search(SearchJob(run, "en1", "en", toy_tokens.features, device="cpu", tokenized=True))
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("score\tsentence1\tsentence2\n1\ten1\ten2\n2\ten3\ten2\n")
    with pytest.raises(UsageError, match="of a text there are none"):
        sts(StsJob((str(pairs), run), tokenized=True))


@pytest.mark.cluster
def test_figures(toy_tokens, region_tokens, train_toy, tmp_path):
    train_toy(reads(MHA_D, 2), corpus=region_tokens)
    job = FiguresJob(
        *(str(tmp_path / "run"), str(tmp_path / "figures"), region_tokens.captions, region_tokens.features),
        split="test",
        points=6,
        device="cpu",
        token_features=region_tokens.token_features,
    )
    assert set(draw_figures(job).names) >= {"retrieval.png", "map.png", "attention-1.png"}
    shown = json.loads((tmp_path / "figures" / "figures.json").read_text())["attention"][0]["captions"][0]
    assert all(len(head) == len(shown["tokens"]) + 2 or len(head) == len(shown["tokens"]) for head in shown["words"])
    with pytest.raises(UsageError, match="give --token-features FOLDER"):
        draw_figures(replace(job, token_features=""))


# --- tables ----------------------------------------------------------------------------------------------------------

HUANG = {**SMALL, "model.num_heads": "2", "model.attention_dim": "5", "model.context_dim": "7", "schedule.max_epochs": "0"}


def huang(corpus, output, *rows) -> ReproduceJob:
    return reproduce_job("huang2019", str(output), corpus, rows=rows, seeds=1, overrides=HUANG, workers=1, device="cpu")


def test_rows_that_read_vectors_are_trained_where_these_are_given(toy_regions, toy_tokens, tmp_path):
    toy, toy_tokens = toy_regions, replace(toy_tokens, features=toy_regions.features)
    rows = ("mha-d", "mha-d-bert")
    without, given = huang(toy, tmp_path / "o", *rows), huang(toy_tokens, tmp_path / "o", *rows)
    lacking = "vectors of tokens (--token-features FOLDER, which imagepivot token-features makes)"
    assert (list(corpora_of(without)), left_out(without)) == (
        ["huang2019/mha-d"],
        [f"left out for want of {lacking}: huang2019/mha-d-bert"],
    )
    assert (list(corpora_of(given)), left_out(given)) == (["huang2019/mha-d", "huang2019/mha-d-bert"], [])
    assert [corpus.token_features for corpus in corpora_of(given).values()] == ["", toy_tokens.token_features]
    with pytest.raises(UsageError, match=r"nothing to train: left out for want of vectors of tokens \(--token-features FOLDER"):
        corpora_of(huang(toy, tmp_path / "o", "mha-d-bert"))
    with pytest.raises(UsageError, match=r"--token-features .* is given, but no row that is chosen reads vectors of tokens"):
        corpora_of(huang(toy_tokens, tmp_path / "o", "mha-d"))


@pytest.mark.cluster
def test_the_row_of_bert_is_trained(four_languages_regions, write_tokens, tmp_path):
    """The preset in both languages, small, beside the row with words."""
    tokens = write_tokens(tmp_path, corpus=four_languages_regions)
    rows = ("mha-d", "mha-d-bert")
    job = huang(replace(four_languages_regions, token_features=tokens), tmp_path / "o", *rows)
    assert reproduce(job) == ()
    random, read = (read_result(tmp_path / "o" / "results" / "huang2019" / name / "seed-0.json") for name in rows)
    assert set(read["fingerprints"]) - set(random["fingerprints"]) == {"token_features"}
    assert {score["language"] for score in read["scores"]} == {"en", "de"}
