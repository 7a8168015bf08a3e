import json

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
def test_all_failures(call, folder, tmp_path):
    code, out, _ = call("inspect", folder, "--failures")
    assert code == 0
    assert "│ x   │ truncated │ x.jpg │ ends «x» │" in out
    assert "│ y   │ truncated │ y.jpg │ ends «y» │" in out
    assert "fingerprint" not in out

    code, out, _ = call("inspect", folder, "--failures", "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert (code, [row["key"] for row in rows]) == (0, ["x", "y"])
    assert rows[0]["message"] == "ends «x»"
    assert rows[0]["reason"] == "truncated"

    write_rows(tmp_path / "g", "features", [], SPEC)
    assert call("inspect", tmp_path / "g", "--failures")[:2] == (0, f"{tmp_path / 'g'}: nothing failed\n")
    assert call("inspect", tmp_path / "g", "--failures", "--json")[:2] == (0, "")


def test_validate_as_json(call, folder):
    assert json.loads(call("validate", folder, "--json")[1]) == {
        "dataset": str(folder),
        "holds": True,
        "problems": [],
        "remarks": [],
    }
    path = next(folder.glob("part-*"))
    data = bytearray(path.read_bytes())
    data[8] ^= 1
    path.write_bytes(data)
    code, out, err = call("validate", folder, "--json")
    found = json.loads(out)
    assert (code, err, found["holds"]) == (1, "", False)
    assert found["problems"]
    assert any("part-" in problem for problem in found["problems"])
