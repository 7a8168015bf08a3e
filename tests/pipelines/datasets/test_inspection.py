import json

import numpy as np

from pipelines.datasets.inspection import describe_dataset, describe_json, failures_table, statistics_tables
from schemas.dataset import open_dataset
from schemas.features import FeatureSpec
from schemas.manifest import Manifest
from tests.builders import region_row, write_rows

SPEC = FeatureSpec("fake", (6,))


def make_features(folder, *, untrained=False, failures=(), names=("b", "a", "c"), statistics=None):
    write_rows(
        folder,
        "features",
        [{"image_id": name, "feature": np.arange(6, dtype=np.float32) / 8} for name in names],
        SPEC,
        parameters={"extractor": {"name": "fake", "weights": {"name": "random:0", "sha256": "0" * 64}, "untrained": untrained}},
        inputs=[{"name": f"file{n}", "bytes": n} for n in range(8)],
        shards=2,
        failures=failures,
        statistics=statistics,
    )
    return open_dataset(folder)


def failure(key: str, reason: str, message: str) -> dict[str, str]:
    return {"key": key, "uri": f"folder/[bold]{key}.jpg", "stage": "decode", "reason": reason, "message": message}


def test_overview_has_every_value_of_the_manifest(tmp_path):
    dataset = make_features(tmp_path / "[red]f", untrained=True)
    overview, columns, *_ = describe_dataset(dataset)
    assert overview.title == str(tmp_path / "[red]f")
    rows = overview.values
    assert rows[0] == ["note", "untrained: the weights of fake (random:0) are random, the features mean nothing"]
    assert rows[1:4:2] == [["kind", "features"], ["fingerprint", dataset.fingerprint]]
    assert rows[2][1].startswith("3 in 2 shards, ")
    extractor = rows.index(["extractor", ""])
    assert rows[extractor + 1 : extractor + 6] == [
        ["  name", "fake"],
        ["  untrained", "yes"],
        ["  weights", ""],
        ["    name", "random:0"],
        ["    sha256", "0" * 64],
    ]
    assert rows[rows.index(["from file0", ""]) + 1] == ["  bytes", "0"]
    assert ["from", "2 more files, all in the manifest"] in rows
    assert "pyarrow" in rows[-1][1]
    assert [row[:2] for row in columns.rows] == [("image_id", "string"), ("feature", "float[6]")]
    assert describe_dataset(make_features(tmp_path / "trained"))[0].values[0] == ["kind", "features"]


def test_failures_are_counted_by_reason_with_the_first_of_each(tmp_path):
    failures = [failure("x", "empty", "no bytes"), failure("y", "truncated", "ends"), failure("z", "truncated", "ends")]
    dataset = make_features(tmp_path / "f", failures=failures)
    table = describe_dataset(dataset)[3]
    assert (table.title, table.rows[0]) == ("3 failures", ("empty", 1, "folder/[bold]x.jpg", "no bytes"))
    assert table.rows[1] in [("truncated", 2, f"folder/[bold]{key}.jpg", "ends") for key in "yz"]
    assert table.notes == [f"all of them: imagepivot inspect {tmp_path}/f --failures"]
    every = failures_table(dataset)
    assert every.title == "3 failures"
    assert sorted(every.rows) == [(row["key"], row["reason"], row["uri"], row["message"]) for row in failures]


def test_statistics_of_captions_and_of_other_kinds(tmp_path):
    statistics = {
        "captions": {
            "translation/val/fr": {"captions": 2, "tokens": 12345},
            "comparable/train/en": {"captions": 1000, "tokens": 7},
        }
    }
    (table,) = statistics_tables(Manifest("captions", "0" * 64, {}, (), {}, (), statistics=statistics))
    assert table.rows == [("comparable", "train", "en", "1,000", "7"), ("translation", "val", "fr", "2", "12,345")]
    (table,) = statistics_tables(make_features(tmp_path / "f", statistics={"captions_cut": 1234}).manifest)
    assert table.values == [["captions cut", "1,234"]]


def test_statistics_of_a_vocabulary(tmp_path):
    statistics = {
        "tokens": {"de": 2, "en": 3},
        "sum": 5,
        "union": 4,
        "jaccard": {"de/en": 0.625},
        "singletons": {"de": 1, "en": 0},
        "types": {"de": 3000, "en": 4},
        "occurrences": {"de": 8, "en": 9},
        "unknown": {"de": {"train": 0.05}, "en": {"train": 0.125, "val": 0.5}},
        "reserved": {"en": {"val": 1234}},
    }
    table, unknown, overlaps = statistics_tables(write_rows(tmp_path / "v", "vocabulary", [], statistics=statistics))
    assert table.headings == ["language", "tokens", "types", "singletons", "occurrences"]
    assert table.values == [
        ["de", "2", "3,000", "1", "8"],
        ["en", "3", "4", "0", "9"],
        ["sum", "5", None, None, None],
        ["union", "4", None, None, None],
    ]
    assert unknown.headings == ["language", "split", "<unk>", "reserved tokens"]
    assert unknown.values == [
        ["de", "train", "5.00%", None],
        ["en", "train", "12.50%", None],
        ["en", "val", "50.00%", 1234],
    ]
    assert (overlaps.headings, overlaps.values) == (["", "de"], [["en", 0.625]])


# --- JSON ------------------------------------------------------------------------------------------------------------


def test_describe_dataset_json_has_all_content_of_the_tables(tmp_path):
    failures = [failure("x", "empty", "no bytes"), failure("y", "truncated", "ends"), failure("z", "truncated", "ends")]
    dataset = make_features(tmp_path / "f", untrained=True, failures=failures, statistics={"images": 3})
    described = json.loads(json.dumps(describe_json(dataset, rows=2)))
    ids = dataset.image_ids()[:2]
    rows = described.pop("first_rows")
    assert [row["image_id"] for row in rows] == ids
    assert rows[0]["feature"] == {"first": dataset.get(ids[0])["feature"].tolist()[:4], "length": 6}
    manifest = dataset.manifest
    stored = [path for path in (tmp_path / "f").rglob("*") if path.is_file() and path.name != "_manifest.json"]
    stored = [path for path in stored if path.parent.name != ".records"]
    assert described == {
        "dataset": str(tmp_path / "f"),
        "kind": "features",
        "rows": 3,
        "shards": 2,
        "bytes": sum(path.stat().st_size for path in stored),
        "fingerprint": manifest.fingerprint,
        "untrained": True,
        "parameters": manifest.parameters,
        "inputs": [{"name": f"file{n}", "bytes": n} for n in range(8)],
        "libraries": manifest.libraries,
        "notes": {},
        "columns": [
            {"name": column.name, "type": kind, "description": column.metadata[b"description"].decode()}
            for column, kind in zip(dataset.schema, ("string", "float[6]"), strict=True)
        ],
        "statistics": {"images": 3},
        "failed": 3,
        "failures": [
            {"reason": "empty", "inputs": 1, "first": failures[0]},
            {"reason": "truncated", "inputs": 2, "first": described["failures"][1]["first"]},
        ],
    }
    assert described["failures"][1]["first"] in failures[1:]
    assert describe_json(dataset, rows=0)["first_rows"] == []


def test_regions_have_boxes_and_labels(tmp_path):
    boxes, labels = np.float32([[1, 2, 30, 40], [0, 0, 0, 0]]), {"class_ids": [7, 0], "class_scores": [0.5, 0]}
    row = region_row("cat", boxes, np.zeros((2, 3), np.float32), 1, width=60, height=50, **labels)
    write_rows(tmp_path / "r", "regions", [row], FeatureSpec("toy", (2, 3)))
    assert describe_dataset(open_dataset(tmp_path / "r"))[-1].values == [
        ["cat", "60×50", "1", ("class 7 0.50  (1, 2, 30, 40)",)],
    ]
    [shown_row] = describe_json(open_dataset(tmp_path / "r"))["first_rows"]
    assert json.loads(json.dumps(shown_row)) == {
        "image_id": "cat",
        "width": 60,
        "height": 50,
        "num_regions": 1,
        "regions": [{"label": "class 7 0.50", "class_id": 7, "box": [1, 2, 30, 40]}],
    }
