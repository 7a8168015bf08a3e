import hashlib
import json
from importlib import metadata
from pathlib import Path

import pytest

from schemas.errors import DatasetError
from schemas.fingerprints import Identity
from schemas.manifest import FileEntry, Manifest, ShardEntry
from schemas.storage import Folder
from tests.builders import sign


def example(**changes):
    identity = Identity(kind="captions", parameters={"tokenizer": "moses", "ü": [1, 2.5]}, inputs=({"name": "x"},), shards=2)
    values = {
        "kind": identity.kind,
        "fingerprint": identity.fingerprint,
        "parameters": identity.parameters,
        "inputs": identity.inputs,
        "libraries": {"numpy": "2.0"},
        "shards": tuple(ShardEntry(f"part-0000{n}-of-00002.parquet", 10 + n, f"{n:064d}", 3 + n) for n in range(2)),
        "failures": (ShardEntry("_failures/part-00001-of-00002.jsonl", 5, "f" * 64, 4),),
        "failure_reasons": {"empty_caption": 4},
        "files": (FileEntry("_truecaser/en.model", 3, "e" * 64),),
        "statistics": {"captions": {"en": 7}},
    }
    return Manifest(**{**values, **changes})


def edited(**changes):
    content = json.loads(example().to_json())
    return json.dumps(sign({key: value for key, value in {**content, **changes}.items() if value is not ...}))


def read(text):
    return Manifest.from_json(text, "data/_manifest.json")


def test_round_trip():
    manifest = example()
    assert read(manifest.to_json()) == manifest
    assert (manifest.rows, manifest.failed) == (7, 4)


def test_the_text_is_plain_json_for_people_and_other_tools():
    text = example().to_json()
    content = json.loads(text)
    assert text == json.dumps(content, sort_keys=True, indent=2, ensure_ascii=False) + "\n"
    assert '"ü"' in text
    assert (content["format"], content["version"]) == ("imagepivot", 2)
    assert content["shards"][1] == {"path": "part-00001-of-00002.parquet", "bytes": 11, "sha256": f"{1:064d}", "rows": 4}


def test_numbers_that_json_cannot_hold_are_refused():
    with pytest.raises(ValueError, match="not JSON compliant"):
        example(statistics={"mean": float("nan")}).to_json()


@pytest.mark.parametrize("kind", ["captions", "encoded", "vocabulary", "features", "regions"])
def test_a_manifest_lists_what_lies_there(toys, kind):
    toy = toys[kind]
    content = json.loads((toy.path / "_manifest.json").read_text(encoding="utf-8"))
    entries = [*content["shards"], *content["failures"], *content["files"]]
    for entry in entries:
        data = (toy.path / entry["path"]).read_bytes()
        assert (entry["bytes"], entry["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
    there = {str(path.relative_to(toy.path)) for path in toy.path.rglob("*") if path.is_file()}
    records = {f".records/{Path(entry['path']).stem}.jsonl" for entry in content["shards"]}
    assert {entry["path"] for entry in entries} == there - records - {"_manifest.json"}
    assert records <= there
    names = [f"part-{number:05d}-of-{toy.identity.shards:05d}.parquet" for number in range(toy.identity.shards)]
    assert [entry["path"] for entry in content["shards"]] == names
    assert [entry["rows"] for entry in content["shards"]] == [len(toy.shard(number)) for number in range(len(names))]
    assert content["statistics"] == {"rows_written": len(toy.rows)}
    assert content["libraries"] == {name: metadata.version(name) for name in ("imagepivot", "numpy", "pyarrow")}


def test_failures_are_counted_by_reason(toys):
    content = json.loads((toys["features"].path / "_manifest.json").read_text(encoding="utf-8"))
    assert content["failure_reasons"] == {"truncated": 2, "not_an_image": 1}
    assert sum(entry["rows"] for entry in content["failures"]) == 3


def test_a_newer_version_is_refused():
    with pytest.raises(DatasetError, match=r"data/_manifest.json has format version 3, .* reads up to 2: update imagepivot"):
        # What a newer version holds is not known: it must not be read as far as possible.
        read(edited(version=3, shards="elsewhere"))


@pytest.mark.parametrize(
    "changes",
    [
        {"parameters": {"tokenizer": "none", "ü": [1, 2.5]}},
        {"parameters": {"tokenizer": "moses"}},
        {"inputs": [{"name": "y"}]},
        {"inputs": []},
        {"kind": "encoded"},
        {"fingerprint": "0" * 64},
    ],
)
def test_an_edited_manifest_is_refused(changes):
    with pytest.raises(
        DatasetError, match=r"data/_manifest.json is damaged \(it was changed by hand: its fingerprint is \w{12}\.\.\., .* give"
    ):
        read(edited(**changes))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"text"', "7", "{}", '{"format": "other", "version": 1}', "\x00"])
def test_what_is_no_manifest(text):
    with pytest.raises(DatasetError, match=r"data/_manifest.json is not the manifest of a dataset"):
        read(text)


@pytest.mark.parametrize(
    "changes",
    [
        {"shards": ...},
        {"shards": 3},
        {"shards": ["part-00000-of-00001.parquet"]},
        {"shards": [{"path": "part-00000-of-00001.parquet"}]},
        {"failures": ...},
        {"files": None},
        {"inputs": None},
        {"kind": ...},
        {"surprise": 1},
        {"version": "1"},
        {"version": None},
    ],
)
def test_a_damaged_manifest_is_refused(changes):
    with pytest.raises(DatasetError, match=r"data/_manifest.json is (damaged|not the manifest)"):
        read(edited(**changes))


def test_an_unknown_kind_is_refused():
    identity = Identity(kind="audio", parameters={}, shards=2)
    text = edited(kind="audio", parameters={}, inputs=[], fingerprint=identity.fingerprint)
    with pytest.raises(DatasetError, match=r"is damaged \(kind is 'audio', expected one of captions, encoded, vocabulary"):
        read(text)


def test_a_kind_that_is_no_text_is_refused():
    with pytest.raises(DatasetError, match=r"is damaged \(kind is \['captions'\], expected one of captions"):
        read(edited(kind=["captions"]))


def test_a_folder_without_a_manifest_is_no_dataset(tmp_path):
    with pytest.raises(
        DatasetError, match=r"is not a dataset: it holds no _manifest.json\. Either the path is wrong or the run"
    ):
        Manifest.read(Folder(str(tmp_path)))
    with pytest.raises(DatasetError, match=r"'.*/nowhere' is not a dataset: it holds no _manifest.json"):
        Manifest.read(Folder(str(tmp_path / "nowhere")))


def test_a_manifest_of_other_bytes_is_refused(tmp_path):
    (tmp_path / "_manifest.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(
        DatasetError, match=r"_manifest.json is damaged \('utf-8' codec .*\): copy it again, or delete it and run"
    ):
        Manifest.read(Folder(str(tmp_path)))
