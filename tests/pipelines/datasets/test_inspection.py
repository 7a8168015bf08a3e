import io
import json

import numpy as np
import pytest
from rich.console import Console

from pipelines.datasets.inspection import describe, failures_table, statistics_table
from pipelines.datasets.inspection_json import describe_json
from schemas.dataset import open_dataset
from schemas.features import FeatureSpec
from schemas.keys import shard_of
from schemas.manifest import Manifest
from tests.builders import write_rows

SPEC = FeatureSpec("fake", (6,))


def shown(renderable, width: int = 160) -> str:
    file = io.StringIO()
    Console(file=file, width=width).print(renderable)
    return file.getvalue()


def squeezed(text: str) -> str:
    return " ".join(text.split())


def make_features(folder, *, untrained=False, failures=(), names=("b", "a", "c"), statistics=None):
    rows = []
    for number in range(2):
        ids = sorted(name for name in names if shard_of(name, 2) == number)
        values = np.arange(6 * len(ids), dtype=np.float32).reshape(-1, 6) / 8
        rows += [{"image_id": name, "feature": vector} for name, vector in zip(ids, values, strict=True)]
    write_rows(
        folder,
        "features",
        rows,
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


def test_an_overview_says_what_it_is(tmp_path):
    text = squeezed(shown(describe(make_features(tmp_path / "f"))))
    assert str(tmp_path / "f") in text
    assert "kind │ features" in text
    assert "rows │ 3 in 2 shards, " in text
    assert open_dataset(tmp_path / "f").fingerprint in text
    assert "float[6]" in text
    assert "stable key of the image" in text
    assert "from file0 │ │ │ bytes │ 0 │" in text
    assert "2 more files, all in the manifest" in text
    assert "pyarrow" in text


def test_sample_rows_are_those_of_the_first_shards(tmp_path):
    dataset = make_features(tmp_path / "f", names=[f"image{n}" for n in range(9)])
    ids = dataset.image_ids()
    text = shown(describe(dataset, rows=7))
    sample = text[text.index("first rows") :]
    assert [name for name in ids if f" {name} " in sample] == ids[:7]
    assert "[0.000, 0.125, 0.250, 0.375, ...] 6 values" in sample
    assert "first rows" not in shown(describe(dataset, rows=0))


@pytest.mark.parametrize("untrained", [True, False])
def test_untrained_features_are_marked(tmp_path, untrained):
    text = shown(describe(make_features(tmp_path / "f", untrained=untrained)))
    assert ("untrained: the weights are random, the features mean nothing" in text) == untrained


def test_failures_are_counted_by_reason_with_the_first_of_each(tmp_path):
    failures = [failure("x", "empty", "no bytes"), failure("y", "truncated", "ends"), failure("z", "truncated", "ends")]
    text = shown(describe(make_features(tmp_path / "f", failures=failures)))
    assert "3 failures" in text
    lines = {reason: squeezed(next(line for line in text.splitlines() if reason in line)) for reason in ("empty", "truncated")}
    assert "│ empty │ 1 │ folder/[bold]x.jpg │ no bytes │" in lines["empty"]
    assert "│ truncated │ 2 │ folder/[bold]" in lines["truncated"]


def test_a_dataset_without_rows(tmp_path):
    text = squeezed(shown(describe(make_features(tmp_path / "f", names=()))))
    assert "rows │ 0 in 2 shards" in text


def test_a_folder_whose_name_is_markup(tmp_path):
    assert "[red]f" in shown(describe(make_features(tmp_path / "[red]f")))


def test_a_narrow_terminal_loses_nothing_of_the_fingerprint(tmp_path):
    dataset = make_features(tmp_path / "f")
    text = shown(describe(dataset), width=60)
    assert dataset.fingerprint in text.replace("\n", "").replace(" ", "").replace("│", "")


def test_statistics_of_captions(tmp_path):
    statistics = {
        "captions": {
            "translation/val/fr": {"captions": 2, "tokens": 12345},
            "comparable/train/en": {"captions": 1000, "tokens": 7},
        }
    }
    manifest = make_features(tmp_path / "f", statistics=statistics).manifest
    object.__setattr__(manifest, "kind", "captions")
    lines = [squeezed(line) for line in shown(statistics_table(manifest)).splitlines()]
    rows = [line for line in lines if "train" in line or "val" in line]
    assert rows == ["│ comparable │ train │ en │ 1,000 │ 7 │", "│ translation │ val │ fr │ 2 │ 12,345 │"]


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
    manifest = write_rows(tmp_path / "v", "vocabulary", [], statistics=statistics)
    lines = [squeezed(line) for line in shown(statistics_table(manifest)).splitlines()]
    assert "│ tokens in the vocabulary │ 2 │ 3 │ 5 │ 4 │" in lines
    assert "│ different tokens counted │ 3,000 │ 4 │ │ │" in lines
    assert "│ Jaccard with de │ │ 0.6250 │ │ │" in lines
    assert "│ <unk> in train │ 5.00% │ 12.50% │ │ │" in lines
    assert "│ <unk> in val │ │ 50.00% │ │ │" in lines
    assert "│ reserved tokens in val │ 0 │ 1,234 │ │ │" in lines


def test_statistics_of_other_kinds_are_names_and_numbers(tmp_path):
    manifest = make_features(tmp_path / "f", statistics={"captions_cut": 1234}).manifest
    assert "│ captions cut │ 1,234 │" in squeezed(shown(statistics_table(manifest)))


def test_no_statistics_make_no_table(tmp_path):
    assert statistics_table(make_features(tmp_path / "f").manifest) is None


def test_nested_parameters_take_a_row_for_each_value(tmp_path):
    text = squeezed(shown(describe(make_features(tmp_path / "f", untrained=True)), width=100))
    expected = f"│ extractor │ │ │ name │ fake │ │ untrained │ yes │ │ weights │ │ │ name │ random:0 │ │ sha256 │ {'0' * 64} │"
    assert expected in text


def test_nothing_is_cut_at_80_columns(tmp_path):
    failures = [failure(f"{'x' * 70}{n}", "truncated", "it ends " * 20) for n in range(2)]
    dataset = make_features(tmp_path / "f", failures=failures)
    for text in (shown(describe(dataset), width=80), shown(failures_table(dataset), width=80)):
        assert max(map(len, text.splitlines())) <= 80
        assert "…" not in text


def test_the_key_of_a_caption_is_not_broken_into_columns(tmp_path):
    key = {"image_id": "scene-00003", "language": "de", "portion": "translation", "index": 0, "split": "train"}
    write_rows(
        tmp_path / "c", "captions", [{**key, "text": "Eine Katze schläft.", "tokens": ["eine", "katze", "schläft", "."]}]
    )
    text = shown(describe(open_dataset(tmp_path / "c")), width=80)
    sample = squeezed(text[text.index("first rows") :])
    assert "│ scene-00003 │ Eine Katze schläft. │ eine katze schläft . │ │ de │" in sample
    assert "│ translation │" in sample


def test_all_failures_are_listed(tmp_path):
    failures = [failure(name, "truncated", f"message {name}") for name in "zyx"]
    text = shown(failures_table(make_features(tmp_path / "f", failures=failures)))
    assert "3 failures" in text
    for name in "xyz":
        assert f"│ {name} │ truncated │ folder/[bold]{name}.jpg │ message {name} │" in squeezed(text)


# --- JSON ------------------------------------------------------------------------------------------------------------


def test_json_has_everything_that_is_shown(tmp_path):
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


def test_json_of_regions_has_boxes_and_labels(tmp_path):
    boxes = np.zeros((2, 4), np.float32)
    boxes[0] = (1, 2, 30, 40)
    row = {
        "image_id": "cat",
        "width": 60,
        "height": 50,
        "num_regions": 1,
        "boxes": boxes,
        "features": np.zeros((2, 3), np.float32),
        "class_ids": np.array([7, 0], np.int16),
        "class_scores": np.array([0.5, 0], np.float32),
        "attribute_ids": np.zeros(2, np.int16),
        "attribute_scores": np.zeros(2, np.float32),
    }
    write_rows(tmp_path / "r", "regions", [row], FeatureSpec("toy", (2, 3)))
    [shown_row] = describe_json(open_dataset(tmp_path / "r"))["first_rows"]
    assert json.loads(json.dumps(shown_row)) == {
        "image_id": "cat",
        "width": 60,
        "height": 50,
        "num_regions": 1,
        "regions": [{"label": "class 7 0.50", "class_id": 7, "box": [1, 2, 30, 40]}],
    }


@pytest.mark.parametrize("kind", ["captions", "vocabulary", "features"])
@pytest.mark.parametrize(
    "statistics",
    [
        {"captions": 7, "tokens": None},
        {"captions": {"no slashes": {"captions": 1, "tokens": 2}}, "tokens": {"de": "x"}},
        {"captions": {"a/b/c": []}, "tokens": []},
        {"captions": {"a/b/c": {"captions": "many", "tokens": 2}}, "tokens": {"de": 1}, "sum": {}},
        {"rows written": {"a": [1]}, "[bold]": "[/]"},
    ],
)
def test_statistics_of_another_shape_are_shown_as_they_are(kind, statistics):
    manifest = Manifest(kind, "0" * 64, {}, (), {}, (), statistics=statistics)
    text = shown(statistics_table(manifest))
    assert all(name.replace("_", " ") in text for name in statistics)
