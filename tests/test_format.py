"""The specification in docs/format.md: its vectors, tables and reader, and datasets as they were once written."""

import hashlib
import json
import re
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from schemas.dataset import open_dataset
from schemas.errors import DatasetError
from schemas.features import FeatureSpec
from schemas.fingerprints import fingerprint_of
from schemas.keys import shard_of
from schemas.kinds import FAILURE_REASONS, KEY_COLUMNS, schema_of
from schemas.writing.validation import validate

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "format.md").read_text(encoding="utf-8")
FIXTURE = ROOT / "tests" / "schemas" / "formats" / "format-2.zip"
SHA256 = "e02637c07fc52761d0fd14e334130558bd9581197803ae20928ae75b17fb73ea"
DATASETS = [
    *("captions", "embeddings", "encoded", "features", "features16", "regions", "token-features", "truecased", "vocabulary"),
    "word-vectors",
]


def code_of_page(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def section_of_page(title):
    return re.search(rf"^#+ {title}\n(.*?)(?=^#|\Z)", PAGE, re.DOTALL | re.MULTILINE)[1]


@pytest.fixture(scope="module")
def reader():
    (code,) = code_of_page("python")
    assert len(code.splitlines()) <= 40
    assert not re.search('imagepivot(?!")|schemas|numpy|torch', code)
    names = {}
    exec(code, names)
    return SimpleNamespace(**names)


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    root = tmp_path_factory.mktemp("formats")
    assert hashlib.sha256(FIXTURE.read_bytes()).hexdigest() == SHA256
    zipfile.ZipFile(FIXTURE).extractall(root)
    assert sorted(folder.name for folder in root.iterdir()) == DATASETS
    return root


def canonical(value):
    """Encode canonical JSON as the page describes it, without the json module."""
    escapes = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f"}
    if isinstance(value, dict):
        return "{" + ",".join(f"{canonical(key)}:{canonical(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(canonical, value)) + "]"
    if isinstance(value, str):
        return '"' + "".join(escapes.get(c) or (c if c >= " " else f"\\u{ord(c):04x}") for c in value) + '"'
    return repr(value)


def test_shard_vectors_equal_blake2b_by_hand():
    rows = re.findall(r"^\| `(.+)` \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", PAGE, re.MULTILINE)
    assert len(rows) == 6
    for text, *expected in rows:
        image_id = re.sub(r"\\u([0-9a-f]{4})", lambda match: chr(int(match[1], 16)), text)
        digest = hashlib.blake2b(image_id.encode("utf-8"), digest_size=64).hexdigest()
        for shards, shard in zip((1, 2, 16, 64, 99999), map(int, expected), strict=True):
            assert int(digest, 16) % shards == shard == shard_of(image_id, shards)


def test_fingerprint_vectors_equal_a_second_encoder():
    (texts,), (digests,) = code_of_page("json"), code_of_page("text")
    pairs = list(zip(texts.splitlines(), digests.splitlines(), strict=True))
    assert len(pairs) == 3
    for text, digest in pairs:
        content = json.loads(text)
        assert canonical(content) == text
        assert hashlib.sha256(text.encode("utf-8")).hexdigest() == digest
        assert content.pop("schema_version") == 1
        assert fingerprint_of(**content) == digest


def test_tables_of_the_page_equal_the_schemas():
    spec = FeatureSpec("name", (2, 3))
    rows = dict(re.findall(r"^\| `([a-z-]+)` \| (.+) \|$", section_of_page("Kinds"), re.MULTILINE))
    assert list(rows) == list(KEY_COLUMNS) or set(rows) == set(KEY_COLUMNS)
    for kind, text in rows.items():
        columns = re.sub(r"\[.*?\]|, fixed-size lists", "", text).split(", ")
        assert [column.split()[0].strip("*") for column in columns] == schema_of(kind, spec).names
        assert tuple(column.split()[0].strip("*") for column in columns if "**" in column) == KEY_COLUMNS[kind]
    reasons = re.search(r"^`reason` is one of (.*?)\.$", PAGE, re.DOTALL | re.MULTILINE)[1]
    assert re.findall(r"`(\w+)`", reasons) == list(FAILURE_REASONS)


@pytest.mark.parametrize("name", DATASETS)
def test_old_dataset_is_valid_and_the_reader_of_the_page_agrees(reader, datasets, name):
    folder = datasets / name
    dataset = open_dataset(folder)
    manifest, rows, failures, files = reader.read(folder)
    assert dataset.manifest.version == manifest["version"] == 2
    assert validate(folder) == []
    assert rows.to_pylist() == dataset.table().to_pylist()
    assert len(rows) > 0
    assert failures == dataset.failures().to_pylist()
    assert list(files) == [entry.path for entry in dataset.manifest.files]
    keys = list(zip(*(rows[column].to_pylist() for column in KEY_COLUMNS[dataset.kind]), strict=True))
    digests = [hashlib.blake2b(key[0].encode()).hexdigest() if "image_id" in rows.column_names else "0" for key in keys]
    shards = [int(digest, 16) % len(manifest["shards"]) for digest in digests]
    assert list(zip(shards, keys, strict=True)) == sorted(set(zip(shards, keys, strict=True)))


@pytest.mark.parametrize("damage", [("version", 3), ("kind", "captions"), ("rows", 1)])
def test_reader_of_the_page_refuses_a_changed_manifest(reader, datasets, tmp_path, damage):
    manifest = json.loads((datasets / "features" / "_manifest.json").read_text("utf-8"))
    (tmp_path / "_manifest.json").write_text(json.dumps({**manifest, damage[0]: damage[1]}), encoding="utf-8")
    with pytest.raises(ValueError, match=r"unknown format or version|the manifest is damaged"):
        reader.read(tmp_path)


def test_unknown_keys_of_a_manifest_are_ignored(reader, datasets, tmp_path):
    manifest = json.loads((datasets / "features" / "_manifest.json").read_text("utf-8"))
    manifest["later"] = {"a": 1}
    manifest["shards"][0]["later"] = 0.5
    manifest["statistics"]["later"] = []
    del manifest["sha256"]
    manifest["sha256"] = hashlib.sha256(canonical(manifest).encode()).hexdigest()
    folder = tmp_path / "features"
    zipfile.ZipFile(FIXTURE).extractall(tmp_path)
    (folder / "_manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    assert open_dataset(folder).table().num_rows == reader.read(folder)[1].num_rows == 12
    manifest["shards"][0]["rows"] = "many"
    del manifest["sha256"]
    manifest["sha256"] = hashlib.sha256(canonical(manifest).encode()).hexdigest()
    (folder / "_manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    with pytest.raises(DatasetError, match=r"is damaged \(shards\[0\]\.rows is 'many'"):
        open_dataset(folder)
