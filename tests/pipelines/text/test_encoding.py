import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from pipelines.running.execution import Execution
from pipelines.text.captions import CaptionsJob, prepare_captions
from pipelines.text.encoding import EncodeJob, encode_captions, encode_table
from pipelines.text.vocabulary import VocabularyJob, build_vocabulary
from schemas.dataset import Dataset, open_dataset
from schemas.errors import DatasetError
from schemas.kinds import ENCODED
from schemas.vocabulary import Vocabulary
from schemas.writing.validation import validate
from tests.builders import tree, write_rows
from tests.pipelines.text.captions import tokenized

ONE = Execution(workers=1)
WORDS = ["a", "b", "c", "d", "e"]


def brute(tokens: list[str], known: list[str], max_length: int) -> list[int]:
    ids = [1]
    for token in tokens[:max_length]:
        ids.append(4 + known.index(token) if token in known else 3)
    return [*ids, 2]


@pytest.mark.parametrize("max_length", [1, 4, 100])
def test_encode_table_equals_a_plain_loop(max_length):
    generator = random.Random(11)
    captions = [generator.choices(WORDS, k=generator.randrange(1, 9)) for _ in range(101)]
    vocabulary = Vocabulary.from_counts({"en": {"a": 9, "b": 8, "d": 7}}, min_count=1)
    rows = tokenized(*captions)
    table, statistics = encode_table(rows, vocabulary, max_length)
    expected = [brute(tokens, ["a", "b", "d"], max_length) for tokens in captions]
    assert table.schema.equals(ENCODED, check_metadata=True)
    assert table["token_ids"].to_pylist() == expected
    assert table["length"].to_pylist() == [len(ids) for ids in expected]
    assert statistics == {
        "captions": 101,
        "tokens": sum(len(ids) - 2 for ids in expected),
        "unknown_tokens": sum(ids.count(3) for ids in expected),
        "captions_cut": sum(len(tokens) > max_length for tokens in captions),
    }
    for name in ("image_id", "language", "portion", "index", "split"):
        assert table[name].to_pylist() == rows[name].to_pylist()


@pytest.mark.slow
def test_vocabulary_and_encode_agree_on_text_with_reserved_names(tmp_path):
    texts = [
        ("en", "train", "a dog a dog a dog runs"),
        ("en", "train", "a cat <unk> <unk> sits"),
        ("en", "train", "a dog <start> runs <end> a cat"),
        ("en", "train", "<pad> <pad> <pad> x y z"),
        ("de", "train", "ein hund a hund <unk>"),
        ("de", "train", "ein a b c d e f g h"),
        ("en", "val", "<unk> <unk> q w"),
        ("de", "val", "a dog <end>"),
    ]
    rows = [f"i{number}\t{language}\t{split}\t{text}" for number, (language, split, text) in enumerate(texts)]
    (tmp_path / "captions.tsv").write_text("\n".join(["image_id\tlanguage\tsplit\ttext", *rows]) + "\n")
    captions, vocabulary, encoded = (str(tmp_path / name) for name in ("captions", "vocabulary", "encoded"))
    prepare_captions(CaptionsJob(str(tmp_path / "captions.tsv"), captions, "table", recipe="raw", shards=2), ONE)
    statistics = build_vocabulary(VocabularyJob(captions=captions, output=vocabulary, min_count=2), ONE).statistics
    words = ["a", "dog", "cat", "ein", "hund", "runs"]
    assert open_dataset(vocabulary).vocabulary().tokens[4:] == tuple(words)
    assert statistics["tokens"] == {"de": 3, "en": 4}
    assert (statistics["sum"], statistics["union"]) == (7, 6)
    assert statistics["jaccard"] == {"de/en": (1 + 4) / (6 + 4)}
    assert statistics["unknown"] == {"de": {"train": 8 / 14, "val": 1 / 3}, "en": {"train": 11 / 25, "val": 4 / 4}}
    assert statistics["reserved"] == {"de": {"train": 1, "val": 1}, "en": {"train": 7, "val": 2}}
    manifest = encode_captions(EncodeJob(captions=captions, vocabulary=vocabulary, output=encoded), ONE)
    expected = {f"i{number}": brute(text.split(), words, 100) for number, (_, _, text) in enumerate(texts)}
    table = open_dataset(encoded).table()
    assert dict(zip(table["image_id"].to_pylist(), table["token_ids"].to_pylist(), strict=True)) == expected
    assert manifest.statistics == {
        "captions": 8,
        "captions_cut": 0,
        "tokens": 14 + 3 + 25 + 4,
        "unknown_tokens": 8 + 1 + 11 + 4,
        "reserved_tokens": 11,
    }


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Folder with ``captions`` in 5 shards, some of them empty, and ``vocabulary``."""
    folder = tmp_path_factory.mktemp("encoding")
    generator = random.Random(12)
    lines = ["image_id\ttext"]
    lines += [f"img{n}\t{' '.join(generator.choices(WORDS, [16, 8, 4, 2, 1], k=6))}" for n in range(4)]
    (folder / "captions.tsv").write_text("\n".join(lines) + "\n")
    job = CaptionsJob(str(folder / "captions.tsv"), str(folder / "captions"), "table", recipe="raw", shards=5)
    prepare_captions(job, ONE)
    build_vocabulary(VocabularyJob(str(folder / "captions"), str(folder / "vocabulary"), min_count=3), ONE)
    return folder


def job_of(inputs, output, **more) -> EncodeJob:
    return EncodeJob(str(inputs / "captions"), str(inputs / "vocabulary"), str(output), **more)


@pytest.fixture(scope="module")
def encoded(inputs) -> Path:
    """Folder of the captions, encoded once with the default length; tests that change it take a copy."""
    encode_captions(job_of(inputs, inputs / "encoded"), ONE)
    return inputs / "encoded"


@pytest.mark.slow
def test_pipeline_encodes_each_caption_in_its_place(inputs, tmp_path):
    manifest = encode_captions(job_of(inputs, tmp_path / "e", max_length=4), ONE)
    captions, vocabulary = open_dataset(inputs / "captions"), open_dataset(inputs / "vocabulary")
    known = [token for token in vocabulary.table()["token"].to_pylist() if not token.startswith("<")]
    encoded = open_dataset(tmp_path / "e")
    assert 0 < len(known) < len(WORDS), "some tokens are unknown"
    for number in range(5):
        rows = captions.shard(number).to_pylist()
        expected = [brute(row["tokens"], known, 4) for row in rows]
        assert encoded.shard(number)["token_ids"].to_pylist() == expected
        assert encoded.shard(number)["image_id"].to_pylist() == [row["image_id"] for row in rows]
    assert validate(tmp_path / "e") == []
    assert manifest.parameters == {
        "max_length": 4,
        "vocabulary_size": len(known) + 4,
        "text": {"recipe": "raw", "lowercase": False, "normalize": False, "tokenizer": "whitespace", "truecase": False},
    }
    assert [source["fingerprint"] for source in manifest.inputs] == [captions.fingerprint, vocabulary.fingerprint]
    assert manifest.statistics["captions"] == len(captions)
    assert manifest.statistics["captions_cut"] == 4


@pytest.mark.slow
def test_encode_captions_with_changed_content_needs_overwrite(inputs, encoded, tmp_path):
    shutil.copytree(encoded, tmp_path / "e")
    captions = open_dataset(inputs / "captions")
    rows = [{**row, "tokens": ["a"]} for row in captions.table().to_pylist()]  # As another version might cut the text.
    more = {"parameters": captions.manifest.parameters, "inputs": captions.manifest.inputs, "shards": 5}
    assert write_rows(tmp_path / "captions", "captions", rows, **more).fingerprint == captions.fingerprint
    job = replace(job_of(inputs, tmp_path / "e"), captions=str(tmp_path / "captions"))
    message = r"was made from other content than '.*captions' and '.*vocabulary' now: 5 of 5 shards"
    with pytest.raises(DatasetError, match=message):
        encode_captions(job, ONE)
    assert open_dataset(tmp_path / "e").manifest == open_dataset(encoded).manifest
    shutil.rmtree(tmp_path / "e" / ".records")  # As a copy without them, or of an earlier version, which noted no content.
    assert encode_captions(job, ONE) == open_dataset(encoded).manifest
    encode_captions(replace(job, overwrite=True), ONE)
    one = [1, open_dataset(inputs / "vocabulary").vocabulary().ids["a"], 2]
    assert open_dataset(tmp_path / "e").table()["token_ids"].to_pylist() == [one] * len(rows)


@pytest.mark.slow
def test_shards_are_read_in_batches_of_any_size(inputs, encoded, tmp_path, monkeypatch):
    monkeypatch.setattr("pipelines.text.encoding.BATCH_ROWS", 1)
    read = Dataset.shard
    whole = []
    monkeypatch.setattr(Dataset, "shard", lambda self, *more: whole.append(self.kind) or read(self, *more))
    encode_captions(job_of(inputs, tmp_path / "e"), ONE)
    assert tree(tmp_path / "e") == tree(encoded)
    assert set(whole) == {"vocabulary"}
