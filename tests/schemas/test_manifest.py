from __future__ import annotations

import hashlib
import json
import pickle
import re
from importlib import metadata
from pathlib import Path

import pytest

from schemas.dataset import open_dataset
from schemas.errors import DatasetError
from schemas.features import FeatureSpec
from schemas.fingerprints import fingerprint_of
from schemas.manifest import MANIFEST_NAME, FileEntry, Manifest, ShardEntries, ShardEntry, diagnose
from schemas.storage.folder import Folder
from tests.builders import sign, write_rows


def example(**changes):
    parameters, inputs = {"tokenizer": "moses", "ü": [1, 2.5]}, ({"name": "x"},)
    values = {
        "kind": "captions",
        "fingerprint": fingerprint_of("captions", parameters, inputs, shards=2),
        "parameters": parameters,
        "inputs": inputs,
        "libraries": {"numpy": "2.0"},
        "shards": tuple(ShardEntry(f"part-0000{n}-of-00002.parquet", 10 + n, f"{n:064d}", 3 + n, "a" * 64) for n in range(2)),
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


def test_entries_are_a_sequence():
    entries = [ShardEntry(f"part-{n:05d}-of-09000.parquet", n, f"{n:064d}", n, "a" * 64 * (n % 2)) for n in range(9000)]
    shards = ShardEntries(iter(entries))
    assert list(shards) == entries
    assert (len(shards), shards[7], shards[-1]) == (9000, entries[7], entries[-1])
    assert shards[5:7] == ShardEntries(entries[5:7]) == pickle.loads(pickle.dumps(shards[5:7]))
    assert shards[5:7] != shards[6:8]
    assert shards.column("rows") == list(range(9000))
    with pytest.raises(IndexError, match="out of range"):
        shards[9000]


@pytest.mark.parametrize("kind", ["captions", "encoded", "vocabulary", "features", "regions"])
def test_manifest_lists_the_files_of_the_folder(toys, kind):
    toy = toys[kind]
    content = json.loads((toy.path / "_manifest.json").read_text(encoding="utf-8"))
    entries = [*content["shards"], *content["failures"], *content["files"]]
    for entry in entries:
        data = (toy.path / entry["path"]).read_bytes()
        assert (entry["bytes"], entry["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
        if entry["path"].endswith(".parquet"):
            footer = data[-8 - int.from_bytes(data[-8:-4], "little") :]
            assert entry["footer_sha256"] == hashlib.sha256(footer).hexdigest()
    there = {str(path.relative_to(toy.path)) for path in toy.path.rglob("*") if path.is_file()}
    records = {f".records/{Path(entry['path']).stem}.jsonl" for entry in content["shards"]}
    assert {entry["path"] for entry in entries} == there - records - {"_manifest.json"}
    assert records <= there
    names = [f"part-{number:05d}-of-{toy.output.shards:05d}.parquet" for number in range(toy.output.shards)]
    assert [entry["path"] for entry in content["shards"]] == names
    assert [entry["rows"] for entry in content["shards"]] == [len(toy.shard(number)) for number in range(len(names))]
    assert content["statistics"] == {"rows_written": len(toy.rows)}
    assert content["libraries"] == {name: metadata.version(name) for name in ("imagepivot", "numpy", "pyarrow")}


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        *(
            (text.encode(), r"is not the manifest of a dataset")
            for text in ("", "[]", "null", "{}", '{"format": "other", "version": 1}', "[" * 100_000, '{"format": "\\ud800"}')
        ),
        (b'{"format": "imagepivot", "version": 1, "statistics": NaN}', "is (damaged|not the manifest)"),
        (b"\xff\xfe\x00", r"is damaged \('utf-8' codec .*\): copy it again, or delete it and run"),
        (example().to_json().replace('"version": 2', '"version": 3').encode(), "is damaged"),
        # What a newer version holds is not known: it must not be read as far as possible.
        (edited(version=3, shards="elsewhere").encode(), "has format version 3, .* reads version 2: update imagepivot"),
    ],
    ids=range(11),
)
def test_other_files_are_refused(tmp_path, data, problem):
    (tmp_path / "_manifest.json").write_bytes(data)
    with pytest.raises(DatasetError, match=rf"_manifest\.json {problem}"):
        Manifest.read(Folder(str(tmp_path)))


# --- every value may be damaged --------------------------------------------------------------------------------------


def places(value):
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from places(value[key])


OTHERS = [None, True, -1, 1.5, 2**70, "", "x", "../x", [], {}, [None], {"a": None}]


@pytest.mark.slow
@pytest.mark.parametrize("other", OTHERS, ids=repr)
def test_any_changed_value_is_refused(other):
    count = len(list(places(json.loads(example().to_json()))))
    for number in range(count):
        content = json.loads(example().to_json())
        container, key = list(places(content))[number]
        if container[key] == other:
            continue
        container[key] = other
        with pytest.raises(DatasetError, match=r"^data/_manifest\.json (is damaged|is not the manifest|has format version)"):
            read(json.dumps(content))


@pytest.mark.parametrize("other", OTHERS, ids=repr)
def test_values_of_another_type_are_refused_by_themselves(other):
    """As if written so, as far as a digest tells: what is read has the types that it must have."""
    base = json.loads(example(failures=()).to_json())
    for number in range(len(list(places(base)))):
        content = json.loads(json.dumps(base))
        container, key = list(places(content))[number]
        container[key] = other
        try:
            manifest = read(json.dumps(sign(content)))
        except DatasetError:
            continue
        assert isinstance(manifest.kind, str)
        for entry in (*manifest.shards, *manifest.files):
            assert isinstance(entry.path, str)
            assert ".." not in entry.path
            assert isinstance(entry.sha256, str)
            assert type(entry.bytes) is int
            assert entry.bytes >= 0
        assert manifest.rows >= 0
        assert manifest.failed == 0
        assert all(isinstance(text, str) for text in manifest.libraries.values())
        assert all(type(count) is int for count in manifest.failure_reasons.values())
        assert isinstance(manifest.statistics, dict)
        assert all(isinstance(entry, dict) for entry in manifest.inputs)
        assert manifest.version == 2


ENTRY = {"path": "part-00000-of-00002.parquet", "bytes": 10, "sha256": "0" * 64, "rows": 3, "footer_sha256": "1" * 64}
SECOND = {**ENTRY, "path": "part-00001-of-00002.parquet"}
FILE = {"path": "_names/classes", "bytes": 1, "sha256": "0" * 64}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"shards": [ENTRY, {**SECOND, "rows": True}]}, r"shards\[1\]\.rows is True, expected a whole number"),
        ({"shards": [ENTRY, {**SECOND, "sha256": "0" * 63}]}, r"shards\[1\]\.sha256 is '0+'"),
        ({"shards": [{k: v for k, v in ENTRY.items() if k != "footer_sha256"}, SECOND]}, "listed without the footer_sha256"),
        ({"shards": [ENTRY, {**SECOND, "path": "../x.parquet"}]}, r"shard 1 is called '../x.parquet', expected"),
        ({"shards": []}, "it lists no shards"),
        *(({"version": version}, f"version is {version!r}") for version in ("1", 0, True, 2.0)),
        ({"failures": [ENTRY]}, r"failures 'part-00000-of-00002.parquet' belong to no shard"),
        ({"failures": [{**ENTRY, "path": "_failures/part-00000-of-00002.jsonl"}] * 2}, "is listed twice"),
        ({"files": [{**FILE, "path": "../x"}]}, r"'../x' is not a valid name of a file beside the shards"),
        *(
            ({"files": [{**FILE, "path": path}]}, "is not a valid name of a file")
            for path in ("a/./b", "", "a\x00b", "_manifest.json", ENTRY["path"])
        ),
        ({"files": [FILE, FILE]}, "a file is listed twice"),
        *(
            (changes, r"it was changed by hand: its fingerprint is \w{12}\.\.\., its parameters and inputs give")
            for changes in (
                {"parameters": {"tokenizer": "none", "ü": [1, 2.5]}},
                {"inputs": [{"name": "y"}]},
                {"inputs": []},
                {"kind": "encoded"},
                {"fingerprint": "0" * 64},
            )
        ),
    ],
)
def test_invalid_content_is_named(changes, problem):
    with pytest.raises(
        DatasetError, match=rf"data/_manifest.json is (damaged|not the manifest).*{problem}.*: copy it again, or"
    ):
        read(edited(**changes))


def written(kind, parameters):
    shards = example().shards
    fingerprint = fingerprint_of(kind, parameters, (), shards=2)
    manifest = example(kind=kind, parameters=parameters, inputs=(), fingerprint=fingerprint, shards=shards)
    return manifest.to_json()


FEATURE = {"name": "pool", "shape": [2048], "dtype": "float32", "source": ""}


@pytest.mark.parametrize(
    ("kind", "parameters", "problem"),
    [
        ("features", {}, "the manifest does not specify the feature: write the dataset again"),
        ("features", {"feature": {**FEATURE, "shape": 2048}}, "feature.shape is 2048, expected a list"),
        ("features", {"feature": {**FEATURE, "shape": [2**40]}}, "the feature has no shape of kind features"),
        ("captions", {"recipe": "raw", "lowercase": 1}, "lowercase is 1, expected true or false or null"),
    ],
)
def test_parameters_of_another_type_are_refused(kind, parameters, problem):
    with pytest.raises(DatasetError, match=rf"data/_manifest.json is damaged \({problem}"):
        read(written(kind, parameters))


SPEC = FeatureSpec("toy", (2,))


def refused(folder) -> str:
    with pytest.raises(DatasetError, match=re.escape(f"'{folder}' is not a dataset")) as caught:
        open_dataset(folder)
    assert str(caught.value) == diagnose(Folder(str(folder)))
    return str(caught.value).partition("is not a dataset")[2]


def test_shards_without_a_manifest(tmp_path):
    write_rows(tmp_path, "features", [], SPEC)
    (tmp_path / MANIFEST_NAME).unlink()
    assert refused(tmp_path).startswith(f": it holds no {MANIFEST_NAME}, which is written last, but shards. Run the")


def test_nothing_a_file_and_anything_else(tmp_path):
    assert refused(tmp_path / "none").endswith("the folder does not exist. Check the path")
    (tmp_path / "photo.jpg").touch()
    assert refused(tmp_path).startswith(f": it holds no {MANIFEST_NAME}. Either the path is wrong or the run")
    assert diagnose(Folder(str(tmp_path / "photo.jpg"))).endswith(
        "but a file: give the folder of a dataset, as imagepivot captions, features or import writes it"
    )
