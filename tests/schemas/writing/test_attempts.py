"""Two attempts of one shard on a disk that differ in rows and failures, in every order in which their steps can follow.

tests/integration/test_overlapping_attempts.py plays them in stores.
"""

from __future__ import annotations

import threading
from collections import Counter

import pytest

from schemas.errors import DatasetError
from schemas.storage.folder import Folder
from schemas.writing import locks
from schemas.writing.dataset_writer import commit
from schemas.writing.validation import validate
from tests.builders import tree
from tests.stages import Choose, attempt, every_order, output_in, staged


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict[str, dict[str, bytes]]:
    made = {}
    for name in "ABC":
        path = tmp_path_factory.mktemp(name) / "x"
        attempt(output_in(path), name)
        commit(output_in(path))
        made[name] = tree(path)
    return made


@pytest.mark.cluster
@pytest.mark.parametrize("names", ["AB", "AC"])
@pytest.mark.parametrize("commits", ["after the first", "after both"])
def test_concurrent_attempts_publish_one(monkeypatch, tmp_path, alone, names, commits):
    outcomes: Counter[str] = Counter()

    def play(choose: Choose) -> None:
        output = output_in(tmp_path / str(sum(outcomes.values())))
        committed = None
        with staged(monkeypatch, names) as stage:
            for _ in stage.steps(output, choose):
                if commits == "after the first" and stage.ended() and committed is None and stage._publishing is None:
                    commit(output)
                    committed = tree(output.folder.local_path)
        if commits == "after both":
            commit(output)
        result = tree(output.folder.local_path)
        assert committed in (None, result)
        assert validate(output.folder.local_path) == []
        [winner] = [name for name in names if alone[name] == result]
        assert all("is committed: part-00000-of-00001.parquet was not written" in str(error) for error in stage.errors.values())
        outcomes[winner] += 1

    assert every_order(play) > 20
    assert set(outcomes) == set(names)


@pytest.mark.slow
def test_publishers_take_turns(tmp_path):
    folder, order = Folder(str(tmp_path)), []

    def publish() -> None:
        with locks.publishing(folder):
            order.append("second")

    thread = threading.Thread(target=publish)
    with locks.publishing(folder):
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
    assert folder.names() == []


def test_committed_dataset_is_not_written_to(tmp_path):
    output = output_in(tmp_path / "x")
    attempt(output, "A")
    commit(output)
    before = tree(tmp_path / "x")
    with pytest.raises(DatasetError, match=r"x' is committed: part-00000-of-00001\.parquet was not written"):
        attempt(output, "B")
    assert tree(tmp_path / "x") == before
