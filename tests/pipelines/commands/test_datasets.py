import json
from contextlib import nullcontext

import numpy as np
import pytest

from schemas.features import FeatureSpec
from tests.builders import write_rows

SPEC = FeatureSpec("fake", (2,))


@pytest.fixture
def folder(tmp_path):
    failures = [
        {"key": key, "uri": f"{key}.jpg", "stage": "decode", "reason": "truncated", "message": f"ends «{key}»"} for key in "xy"
    ]
    write_rows(tmp_path / "f", "features", [{"image_id": "a", "feature": np.zeros(2, np.float32)}], SPEC, failures=failures)
    return tmp_path / "f"


def test_inspect_as_json(call, folder):
    code, out, err = call("inspect", folder, "--json", "--rows", "1")
    described = json.loads(out)
    assert (code, err) == (0, "")
    assert (described["kind"], described["rows"], described["failed"]) == ("features", 1, 2)
    assert described["first_rows"] == [{"image_id": "a", "feature": {"first": [0.0, 0.0], "length": 2}}]


@pytest.mark.slow
def test_all_failures(call, folder):
    code, out, _ = call("inspect", folder, "--failures")
    assert code == 0
    assert "│ x   │ truncated │ x.jpg │ ends «x» │" in out

    code, out, _ = call("inspect", folder, "--failures", "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert (code, [row["key"] for row in rows]) == (0, ["x", "y"])
    assert rows[0]["message"] == "ends «x»"


def test_validate_as_json(call, folder):
    assert json.loads(call("validate", folder, "--json")[1]) == {
        "dataset": str(folder),
        "valid": True,
        "problems": [],
        "remarks": [],
    }
    path = next(folder.glob("part-*"))
    data = bytearray(path.read_bytes())
    data[8] ^= 1
    path.write_bytes(data)
    code, out, err = call("validate", folder, "--json")
    found = json.loads(out)
    assert (code, err, found["valid"]) == (1, "", False)
    assert found["problems"]
    assert any("part-" in problem for problem in found["problems"])


def test_diff_ends_with_code_1_for_differences_beyond_the_tolerance(call, folder, tmp_path):
    code, out, _ = call("diff", folder, folder)
    assert (code, f"{folder} and {folder} hold the same rows" in out) == (0, True)
    write_rows(tmp_path / "g", "features", [{"image_id": "a", "feature": np.full(2, 0.5, np.float32)}], SPEC)
    assert [call("diff", folder, tmp_path / "g", *options)[0] for options in ((), ("--tolerance", "0.6"))] == [1, 0]


def test_duplicates_prints_counts_and_writes_the_list(call, tmp_path):
    features, key = (
        np.random.default_rng(0).standard_normal((4, 16)).astype(np.float32),
        {"language": "en", "portion": "translation"},
    )
    rows = [{"image_id": name, "feature": features[n]} for name, n in zip("abcde", (0, 0, 1, 2, 3), strict=True)]
    write_rows(tmp_path / "features", "features", rows, FeatureSpec("fake", (16,)))
    splits = {"a": "train", "b": "test", "c": "train", "d": "val", "e": "val"}
    texts = [
        {
            "image_id": name,
            **key,
            "index": 0,
            "split": split,
            "text": f"a dog {'' if split == 'val' else name}",
            "tokens": ["dog"],
        }
        for name, split in splits.items()
    ]
    write_rows(tmp_path / "captions", "captions", texts)
    code, _, err = call("duplicates", tmp_path / "features", tmp_path / "captions", "--output", tmp_path / "list.csv")
    assert code == 0
    assert "5 of 5 images, e.g. 'a', have no digest of the file in" in " ".join(err.split())
    assert (tmp_path / "list.csv").read_text().splitlines()[1:] == [
        "0,cosine,1.0,a,train,,,",
        "0,cosine,1.0,b,test,,,",
        "1,text,1.0,d,val,en,translation,0",
        "1,text,1.0,e,val,en,translation,0",
    ]
    shown = json.loads(call("duplicates", tmp_path / "features", tmp_path / "captions", "--json")[1])
    assert [(row["split"], row["and split"], row["groups"]) for row in shown] == [("val", "val", 1), ("test", "train", 1)]


@pytest.mark.parametrize(("size", "workers"), [(1, 3), (1 << 30, 1)])
def test_vocabulary_is_counted_by_as_many_workers_as_captions_pay_for(call, tmp_path, monkeypatch, size, workers):
    (tmp_path / "t.tsv").write_text("image_id\tlanguage\ttext\na\ten\ta dog\n")
    assert call("captions", tmp_path / "t.tsv", tmp_path / "c", "--format", "table", "--workers", "1")[0] == 0
    started: list[int] = []
    monkeypatch.setattr("pipelines.text.token_counts._BYTES_OF_WORKER", size)
    monkeypatch.setattr("pipelines.running.execution.usable_cores", lambda: 3)
    monkeypatch.setattr("pipelines.running.job.open_workers", lambda count: nullcontext(started.append(count) or map))
    assert call("vocabulary", tmp_path / "c", tmp_path / "v", "--min-count", "1")[0] == 0
    assert started == [workers]
