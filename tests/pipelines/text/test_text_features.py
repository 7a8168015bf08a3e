import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipelines.running.execution import Execution
from pipelines.text.text_features import TextFeaturesJob, extract_text_features, text_vector_rows, token_feature_rows
from schemas.dataset import open_dataset
from schemas.errors import DatasetError, InputError, UsageError
from schemas.kinds import schema_of
from schemas.parameters import FeaturesParameters
from schemas.storage.folder import Folder
from schemas.writing.output import OutputDataset
from schemas.writing.validation import validate
from tests.builders import tree, write_rows
from tests.extractors.tokens.test_sentence_encoders import write_model
from tests.pipelines.text.captions import tokenized
from tests.tiny_bert import make_tiny_bert

pytestmark = pytest.mark.slow  # Importing transformers alone takes seconds.

ONE = Execution(workers=1)
KEY = ("image_id", "language", "portion", "index", "split")
WORDS = {"en": ["a", "man", "&apos;s", "dog", "runs", "snowboards", "."], "de": ["ein", "grüner", "hund", "läuft"]}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_bert(tmp_path_factory.mktemp("models") / "bert")


@pytest.fixture(scope="module")
def captions(tmp_path_factory):
    rng = np.random.default_rng(5)
    rows = []
    for number in range(30):
        for language, words in WORDS.items():
            for index in range(1 + number % 2):
                tokens = [words[n] for n in rng.integers(0, len(words), rng.integers(1, 7))]
                key = {"image_id": f"img{number:02d}", "language": language, "portion": "comparable", "index": index}
                rows.append({**key, "split": "train", "text": " ".join(tokens), "tokens": tokens})
    folder = tmp_path_factory.mktemp("captions") / "captions"
    write_rows(folder, "captions", rows, shards=4)
    return str(folder)


@pytest.fixture
def job(captions, model, tmp_path):
    return TextFeaturesJob(captions, str(tmp_path / "bert"), str(model), device="cpu")


def test_each_caption_has_the_vectors_of_its_tokens(job):
    manifest = extract_text_features(job, ONE)
    dataset, captions = open_dataset(job.output, kind="token-features"), open_dataset(job.captions)
    assert validate(job.output) == []
    assert (manifest.rows, dataset.num_shards, dataset.spec.shape) == (90, 4, (16,))
    extractor = job.request().load()
    for row, caption in zip(dataset, captions, strict=True):
        for name in ("image_id", "language", "portion", "index", "split"):
            assert row[name] == caption[name]
        words = [token.replace("&apos;", "'") for token in caption["tokens"]]
        (expected,) = extractor.extract(extractor.read([words])[0])
        assert row["length"] == len(words) + 2
        np.testing.assert_array_equal(row["vectors"], expected)
    tokens = [caption["tokens"] for caption in captions if caption["language"] == "de"]
    found = manifest.statistics["de"]
    assert (found["captions"], found["tokens"]) == (45, sum(map(len, tokens)))
    assert found["unknown_sub_words"] == sum(of_caption.count("läuft") for of_caption in tokens)
    assert found["sub_words"] == found["tokens"] + sum(of_caption.count("grüner") for of_caption in tokens)


def test_manifest_holds_model_and_captions(job):
    manifest = extract_text_features(job, ONE)
    assert manifest.inputs == ({"name": "captions", "fingerprint": open_dataset(job.captions).fingerprint},)
    assert manifest.parameters["max_length"] == 100
    assert manifest.parameters["feature"]["name"] == "bert"
    assert manifest.parameters["model"]["sub_words"] == "mean"
    assert manifest.parameters["model_fingerprint"] == job.request().load().description.fingerprint
    assert {"torch", "transformers", "tokenizers"} <= set(manifest.libraries)
    assert job.model not in json.dumps(dict(manifest.parameters))


@pytest.mark.cluster
@pytest.mark.parametrize("kind", ["job", "sentence_job"])
def test_bytes_do_not_depend_on_workers_and_batches(kind, request, tmp_path):
    job = request.getfixturevalue(kind)
    extract_text_features(job, ONE)
    other = replace(job, output=str(tmp_path / "other"), batch_size=1)
    extract_text_features(other, Execution(workers=2))
    assert tree(Path(job.output)) == tree(Path(other.output))


def test_captions_are_cut_like_those_of_encode(job):
    extractor = job.request().load()
    table, failures, statistics = token_feature_rows(tokenized(["a", "dog", "runs", "."], ["dog"], []), extractor, 3)
    assert table.schema.equals(schema_of("token-features", extractor.description.spec), check_metadata=True)
    assert table["length"].to_pylist() == [5, 3, 2]
    assert [len(values) for values in table["vectors"].to_pylist()] == [80, 48, 32]
    assert failures == []
    assert (statistics["en"]["tokens"], statistics["en"]["captions_cut"]) == (3, 1)
    assert (statistics["de"]["tokens"], statistics["de"]["captions_cut"]) == (1, 0)


def test_vectors_beyond_float16_are_failures(captions, model, tmp_path):
    import torch

    job = TextFeaturesJob(captions, str(tmp_path / "x"), str(model), dtype="float16", device="cpu")
    extractor = job.request().load()
    with torch.no_grad():  # What follows the last product is a norm with a bias.
        extractor._model.encoder.layer[-1].output.LayerNorm.bias.fill_(70_000.0)
    table, failures, _ = token_feature_rows(tokenized(["a"], ["dog"]), extractor, 100)
    assert table.num_rows == 0
    assert [(failure["key"], failure["reason"]) for failure in failures] == [
        ("img000/en/translation/0", "not_finite"),
        ("img001/de/translation/1", "not_finite"),
    ]


def test_resume_with_another_version_of_the_model_code_is_refused(job, monkeypatch, tmp_path):
    from extractors.tokens.transformer import TokenExtractor

    extract_text_features(job, ONE)
    for name in ("_manifest.json", "part-00001-of-00004.parquet"):
        (Path(job.output) / name).unlink()
    forward = TokenExtractor._forward
    monkeypatch.setattr(TokenExtractor, "_forward", lambda model, ids: forward(model, ids) * 1.01)
    monkeypatch.setenv("IMAGEPIVOT_CACHE", str(tmp_path / "cache of another version"))
    with pytest.raises(DatasetError, match="another version"):
        extract_text_features(job, ONE)


# --- a vector per caption --------------------------------------------------------------------------------------------


@pytest.fixture
def sentence_job(captions, model, tmp_path):
    folder = write_model(tmp_path / "tiny", model, pooling={"pooling_mode": "mean"}, sentence_bert_config={"max_seq_length": 7})
    return TextFeaturesJob(captions, str(tmp_path / "vectors"), f"sentence:{folder}", device="cpu")


def test_each_caption_has_the_vector_of_its_text(sentence_job):
    manifest = extract_text_features(sentence_job, ONE)
    dataset, captions = open_dataset(sentence_job.output, kind="embeddings"), open_dataset(sentence_job.captions)
    assert validate(sentence_job.output) == []
    rows, texts = list(dataset), list(captions)
    assert [[row[name] for name in KEY] for row in rows] == [[row[name] for name in KEY] for row in texts]
    encoder = sentence_job.request().load()
    np.testing.assert_array_equal([row["embedding"] for row in rows], encoder.encode([row["text"] for row in texts]))
    lengths = [encoder.read([row["text"]])[1][0] for row in texts if row["language"] == "de"]
    counts = manifest.statistics["de"]
    assert (counts["captions"], counts["captions_cut"]) == (45, sum(length > 7 for length in lengths))
    assert {int(length): count for length, count in counts["lengths"].items()} == Counter(lengths)
    assert max(lengths) > 7


def test_manifest_of_sentence_vectors_has_checkpoint_prefix_and_space(sentence_job, tmp_path):
    first = FeaturesParameters.from_json(extract_text_features(sentence_job, ONE).parameters)
    assert first.checkpoint == sentence_job.request().load().parameters.checkpoint
    assert (first.model.similarity, first.space, first.untrained) == ("cosine", None, ())
    assert first.model.encoder.keys() == {"config", "head", "lower_case", "positions", "precision", "tokenizer"}
    others = [replace(sentence_job, output=str(tmp_path / name), **{name: "ein "}) for name in ("prefix", "space")]
    manifests = [extract_text_features(job, ONE) for job in (sentence_job, *others)]
    assert len({manifest.fingerprint for manifest in manifests}) == 3
    prefixed, spaced = (FeaturesParameters.from_json(manifest.parameters) for manifest in manifests[1:])
    assert (prefixed.model.encoder["prefix"], spaced.space, spaced.model) == ("ein ", "ein ", first.model)


def test_resumed_run_writes_missing_shards_only(sentence_job, call):
    extract_text_features(sentence_job, ONE)
    before, kept = tree(Path(sentence_job.output)), Path(sentence_job.output, "part-00001-of-00004.parquet")
    for name in ("_manifest.json", "part-00002-of-00004.parquet"):
        Path(sentence_job.output, name).unlink()
    stamp = kept.stat().st_mtime_ns
    words = (sentence_job.captions, sentence_job.output, "--model", sentence_job.model, "--device", "cpu")
    rows = open_dataset(sentence_job.captions).manifest.shards[2].rows
    _, out, _ = call("text-features", *words, "--dry-run")
    plan = dict(line.rsplit(maxsplit=1) for line in out.splitlines() if line.split())
    assert (plan["captions"], "1 of 4" in out) == (str(rows), True)
    assert int(plan["longest caption, sub-words"]) > 7
    assert int(plan["captions cut after 7 sub-words"]) > 0
    assert not Path(sentence_job.output, "_manifest.json").exists()
    _, out, err = call("text-features", *words)
    assert "longest, sub-words" in out + err
    assert tree(Path(sentence_job.output)) == before
    assert kept.stat().st_mtime_ns == stamp


def test_sentence_vectors_beyond_float16_are_failures(sentence_job):
    import torch

    encoder = replace(sentence_job, dtype="float16").request().load()
    with torch.no_grad():
        encoder._model.encoder.layer[-1].output.LayerNorm.bias.fill_(70_000.0)
    table, failures, statistics = text_vector_rows(tokenized(["a"], ["dog"]), encoder)
    assert (table.num_rows, [failure["reason"] for failure in failures]) == (0, ["not_finite", "not_finite"])
    assert statistics["en"]["captions"] == 1


def test_options_that_do_not_fit_the_model_raise(captions, model, tmp_path):
    for options, message in (
        ({"model": str(model), "prefix": "a "}, "--prefix does not fit --model"),
        ({"model": str(model), "space": "x"}, "--space does not fit --model"),
        ({"model": str(model), "weights": "random:0"}, "--weights does not fit --model"),
        ({"model": f"sentence:{model}", "sub_words": "first"}, "--sub-words does not fit --model 'sentence:"),
        ({"model": f"sentence:{model}", "max_length": 9}, "--max-length does not fit --model 'sentence:"),
    ):
        with pytest.raises(UsageError, match=message):
            TextFeaturesJob(captions, str(tmp_path / "x"), **options)


def test_worker_with_another_sentence_model_raises(sentence_job, tmp_path):
    output = OutputDataset(Folder(str(tmp_path)), "embeddings", sentence_job.parameters(sentence_job.request().describe()))
    other = replace(sentence_job, prefix="a ").request().load()
    with pytest.raises(InputError, match="of a worker differ from the launcher's"):
        sentence_job.check_model(output, other)
