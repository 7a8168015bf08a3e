"""What files were made from: by content, whatever the inputs are called and wherever they are."""

from __future__ import annotations

import numpy as np
import pytest

from schemas.features import FeatureSpec
from schemas.storage.folder import Folder
from schemas.writing.made_from import MADE_FROM_NAME, differences, is_current, made_from, write_made_from
from tests.builders import write_rows


def features(path, value: float = 0.0) -> str:
    row = {"image_id": "a", "feature": np.full(2, value, "float32")}
    write_rows(path, "features", [row], FeatureSpec("toy", (2,)))
    return str(path)


def test_inputs_are_described_by_content_not_by_place(tmp_path):
    for name in ("one", "two"):
        features(tmp_path / name / "features")
        (tmp_path / name / "run").mkdir()
        (tmp_path / name / "run/best.pt").write_bytes(b"weights")
        (tmp_path / name / "run/log.jsonl").write_text(name)
        (tmp_path / name / "lists").mkdir()
        (tmp_path / name / "lists/train.txt").write_text("a\n")
    one, two = (
        made_from("evaluate", {"folds": 1}, {key: (str(tmp_path / name / key),) for key in ("features", "run", "lists")})
        for name in ("one", "two")
    )
    assert one == two
    assert str(tmp_path) not in str(one)
    assert set(one["inputs"]["features"][0]) == {"fingerprint", "content_sha256"}


def test_made_from_detects_added_features_at_equal_fingerprint(tmp_path):
    before = made_from("export", {}, {"dataset": (features(tmp_path / "one"),)})
    after = made_from("export", {}, {"dataset": (features(tmp_path / "two", 1.0),)})
    fingerprints = [described["inputs"]["dataset"][0]["fingerprint"] for described in (before, after)]
    assert fingerprints[0] == fingerprints[1]
    assert differences(before, after) == ["dataset changed"]


def test_images_are_described_by_names_and_sizes(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.jpg").write_bytes(name.encode())
    table = tmp_path / "images.csv"
    table.write_text("image_id\n")
    one, two, other = (made_from("figures", {}, {}, images=str(path)) for path in (tmp_path / "one", tmp_path / "two", table))
    assert one == two
    assert other["inputs"] == {"images": [9]}
    (tmp_path / "two/b.jpg").write_bytes(b"")
    assert differences(one, made_from("figures", {}, {}, images=str(tmp_path / "two"))) == ["images changed"]


def test_differences_are_named():
    before = made_from("export", {"l2": False, "language": "en"}, {})
    assert differences(before, made_from("export", {"l2": True, "language": "en"}, {})) == ["l2: was False, now True"]
    assert differences(before, made_from("figures", {}, {})) == ["command: was export, now figures"]
    assert differences(before, before) == []
    named_alike = [{"command": "sts", "options": {}, "inputs": {"runs": n}, "modules": {"runs": 0}} for n in (1, 2)]
    assert differences(*named_alike) == ["runs changed"]


def test_is_current_compares_file_sizes(tmp_path):
    folder, now = Folder(str(tmp_path)), made_from("figures", {"names": ("a", "b")}, {"run": ("",)})
    assert now["inputs"] == {}
    assert not is_current(folder, now)
    (tmp_path / "map.png").write_bytes(b"12")
    write_made_from(folder, now, {"map.png": 2})
    assert is_current(folder, now)
    assert not is_current(folder, made_from("figures", {}, {"run": ("",)}))
    (tmp_path / "map.png").write_bytes(b"1")
    assert not is_current(folder, now)


@pytest.mark.parametrize("text", ["", "[]", "[" * 100_000, '{"read": {"data": 1}, ', '{"read": {"data": [{}, {}]}, '])
def test_damaged_description_is_not_current(tmp_path, text):
    (tmp_path / "pairs.txt").write_text("a")
    now, output = made_from("sts", {}, {"data": (str(tmp_path / "pairs.txt"),)}), Folder(str(tmp_path / "out"))
    write_made_from(output, now, {})
    assert is_current(output, now)
    stored = output.read(MADE_FROM_NAME).decode()
    output.put(MADE_FROM_NAME, (text + stored[1:] if text.startswith("{") else text).encode())
    assert not is_current(output, now)


def test_is_current_with_changed_file_beside_an_input_returns_false(tmp_path):
    pairs, output = tmp_path / "pairs", Folder(str(tmp_path / "out"))
    pairs.mkdir()
    (pairs / "STS.input.x.txt").write_text("a red circle\ta circle\n")
    (pairs / "STS.gs.x.txt").write_text("5\n")
    inputs = {"data": (str(pairs / "STS.input.x.txt"),)}
    now = made_from("sts", {}, inputs)
    Folder(str(pairs)).read("STS.gs.x.txt")
    assert Folder(str(pairs)).stat("later.txt") is None
    write_made_from(output, now, {})
    assert str(tmp_path) not in output.read(MADE_FROM_NAME).decode()
    assert is_current(output, made_from("sts", {}, inputs))
    (pairs / "later.txt").write_text("new")
    assert not is_current(output, made_from("sts", {}, inputs))
    (pairs / "later.txt").unlink()
    (pairs / "STS.gs.x.txt").write_text("0\n")
    assert not is_current(output, made_from("sts", {}, inputs))


def test_made_from_with_changed_user_module_differs(monkeypatch):
    monkeypatch.setattr("schemas.user_code._digests", {"own": "1"})
    before = made_from("evaluate", {}, {})
    monkeypatch.setattr("schemas.user_code._digests", {"own": "2"})
    assert differences(before, made_from("evaluate", {}, {})) == ["own changed"]
