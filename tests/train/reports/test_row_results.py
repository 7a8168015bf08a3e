from __future__ import annotations

import json

import pytest

from train.reports.row_results import Failure, read_failure, write_failure


def test_a_failure_is_written_and_read(tmp_path):
    path = tmp_path / "row" / "failed-seed-0.json"
    assert read_failure(path) is None
    write_failure(path, Failure("killed", "gone", "trace"), {"seed": 0})
    assert json.loads(path.read_text()) == {"kind": "killed", "reason": "gone", "seed": 0}
    assert read_failure(path) == Failure("killed", "gone")


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"kind": "bored", "reason": "x"}', '{"kind": "killed"}', "[" * 100_000, "\xff"]
)
def test_a_damaged_failure_is_still_a_failure(tmp_path, text):
    path = tmp_path / "failed-seed-0.json"
    path.write_bytes(text.encode("latin-1"))
    failure = read_failure(path)
    assert failure.kind == "refused"
    assert "is damaged: the next command replaces it" in failure.reason
