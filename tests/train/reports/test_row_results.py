import json

import pyarrow as pa
import pytest

from schemas.errors import DatasetError
from schemas.storage.folder import Folder
from train.evaluation.ranks import SCHEMA, write_ranks
from train.reports.row_results import Failure, read_failure, read_result, read_row, write_failure, write_result


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


@pytest.fixture
def write_seed(tmp_path):
    """Write a result and its ranks: image and rank of each query, in any order."""

    def write(seed: int, ranks: dict[str, tuple[str, int]] | None) -> None:
        folder = tmp_path / "results" / "p" / f"seed-{seed}"
        write_result(folder.with_suffix(".json"), {"scores": []})
        rows = [
            {"split": "s", "language": "en", "portion": "comparable", "direction": "text_to_image", "query_id": query}
            | {"image_id": image, "rank": rank}
            for query, (image, rank) in (ranks or {}).items()
        ]
        if ranks is not None:
            write_ranks(Folder(str(folder)), pa.Table.from_pylist(rows, schema=SCHEMA))

    return write


def test_ranks_of_seeds_have_one_order_of_queries(write_seed, tmp_path):
    write_seed(0, {"b": ("y", 2), "a": ("x", 1), "c": ("x", 3)})
    write_seed(1, {"c": ("x", 6), "b": ("y", 5), "a": ("x", 4)})
    ((place, row),) = read_row(str(tmp_path), "p").ranks.items()
    assert (place, list(row.ids)) == (("en", "comparable", "s", "text_to_image"), ["a", "b", "c"])
    assert row.ranks.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert list(row.images) == ["x", "y", "x"]


@pytest.mark.parametrize("second", [{"a": ("x", 1)}, {"a": ("x", 1), "z": ("y", 1)}, {}, None])
def test_runs_with_other_queries_or_without_ranks_have_none(write_seed, tmp_path, second):
    assert read_row(str(tmp_path), "p").ranks == {}
    write_seed(0, {"a": ("x", 1), "b": ("y", 2)})
    write_seed(1, second)
    assert read_row(str(tmp_path), "p").ranks == {}
