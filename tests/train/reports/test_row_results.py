import json

import pytest

from schemas.errors import DatasetError
from train.reports.row_results import Failure, read_failure, read_result, write_failure, write_result


def test_failure_is_written_and_read(tmp_path):
    path = tmp_path / "row" / "failed-seed-0.json"
    assert read_failure(path) is None
    write_failure(path, Failure("killed", "gone", "trace"), {"seed": 0})
    assert json.loads(path.read_text()) == {"kind": "killed", "reason": "gone", "seed": 0}
    assert read_failure(path) == Failure("killed", "gone")


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"kind": "bored", "reason": "x"}', '{"kind": "killed"}', "[" * 100_000, "\xff"]
)
def test_damaged_failure_is_still_a_failure(tmp_path, text):
    path = tmp_path / "failed-seed-0.json"
    path.write_bytes(text.encode("latin-1"))
    failure = read_failure(path)
    assert failure.kind == "refused"
    assert "is damaged: the next command replaces it" in failure.reason


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: "[" * 100_000,
        lambda text: text.replace("1.5", "2.5"),
        lambda text: text.replace('"sha256"', '"sha"'),
    ],
)
def test_read_result_of_a_damaged_file_is_refused(tmp_path, damage):
    path = tmp_path / "seed-1.json"
    write_result(path, {"scores": [1.5]})
    assert read_result(path) == {"scores": [1.5]}
    path.write_text(damage(path.read_text()))
    with pytest.raises(DatasetError, match=r"seed-1\.json' is damaged, or not a result of imagepivot reproduce .*delete it"):
        read_result(path)
