"""Two attempts of one shard that differ in their rows and failures, in every order in which their steps can follow each other."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from schemas import publishing
from schemas.errors import DatasetError
from schemas.features import FeatureSpec
from schemas.fingerprints import Identity
from schemas.manifest import MANIFEST_NAMES
from schemas.output import Output
from schemas.storage import Folder
from schemas.validation import validate
from schemas.writing import commit, open_shard

SPEC = FeatureSpec("x", (2,))


def output_in(path: Path) -> Output:
    return Output(Folder(str(path)), Identity("features", {"feature": SPEC.to_json()}, shards=1))


def attempt(output: Output, name: str) -> None:
    """As on a GPU: bits differ. A has read an image that B could not read; C has the same bytes as A but other bits in them."""
    with open_shard(output, 0) as shard:
        ids = ["a"] if name == "B" else ["a", "b"]
        values = np.full(2 * len(ids), {"A": 1.0, "B": 1.0 + 2**-20, "C": 1.0 + 2**-21}[name], np.float32)
        features = pa.FixedSizeListArray.from_arrays(values, type=shard._schema.field("feature").type)
        shard.write(pa.table({"image_id": ids, "feature": features}, schema=shard._schema))
        if name == "B":
            failure = {"key": "b", "uri": "b.jpg", "stage": "read", "reason": "unreadable", "message": "gone"}
            shard.add_failures([failure])
        shard.statistics = {"images": len(ids)}


class Stage:
    """Lets attempts go on one at a time, each from one look at or change of the folder to the next."""

    def __init__(self, names: str) -> None:
        self._turns = {name: threading.Semaphore(0) for name in names}
        self._stopped = {name: threading.Semaphore(0) for name in names}
        self._publishing: str | None = None
        self._waiting: set[str] = set()
        self._ended: set[str] = set()
        self.errors: dict[str, BaseException] = {}

    def stop(self) -> None:
        if (name := threading.current_thread().name) in self._turns:
            self._stopped[name].release()
            self._turns[name].acquire()

    @contextmanager
    def publishing(self, folder: Folder) -> Iterator[None]:
        name = threading.current_thread().name
        while self._publishing is not None:
            self._waiting.add(name)
            self.stop()
        self._waiting.discard(name)
        self._publishing = name
        try:
            yield
        finally:
            self._publishing = None

    def start(self, name: str, output: Output) -> None:
        def run() -> None:
            self.stop()
            try:
                attempt(output, name)
            except DatasetError as error:
                self.errors[name] = error
            finally:
                self._ended.add(name)
                self._stopped[name].release()

        threading.Thread(target=run, name=name, daemon=True).start()
        self._stopped[name].acquire()

    def can_go(self) -> list[str]:
        return [name for name in self._turns if name not in self._ended and (not self._publishing or name not in self._waiting)]

    def ended(self) -> list[str]:
        return sorted(self._ended)

    def go(self, name: str) -> None:
        self._turns[name].release()
        self._stopped[name].acquire()


@contextmanager
def staged(monkeypatch: pytest.MonkeyPatch, names: str) -> Iterator[Stage]:
    stage = Stage(names)

    def stopping(function):
        def call(folder, *arguments):
            if not set(arguments) & set(MANIFEST_NAMES):
                stage.stop()
            return function(folder, *arguments)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(publishing, "publishing", stage.publishing)
        for name in ("state", "_publish", "delete"):
            patch.setattr(Folder, name, stopping(getattr(Folder, name)))
        yield stage


def every_order(play: Callable[[list[str]], list[tuple[str, list[str]]]]) -> int:
    """Play every order of choices; `play` gets the first ones, and returns what it chose from what. Return the number of orders."""
    orders, todo = 0, [[]]
    while todo:
        first: list[str] = todo.pop()
        chosen = play(first)
        orders += 1
        for number in range(len(first), len(chosen)):
            choice, choices = chosen[number]
            todo += [[*(name for name, _ in chosen[:number]), other] for other in choices if other != choice]
    return orders


def bytes_of(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict[str, dict[str, bytes]]:
    """The dataset that each attempt makes alone."""
    made = {}
    for name in "ABC":
        path = tmp_path_factory.mktemp(name) / "x"
        attempt(output_in(path), name)
        commit(output_in(path))
        made[name] = bytes_of(path)
    return made


@pytest.mark.parametrize("names", ["AB", "AC"])
@pytest.mark.parametrize("commits", ["after the first", "after both"])
def test_two_attempts_at_once_publish_one_of_them(monkeypatch, tmp_path, alone, names, commits):
    outcomes: Counter[str] = Counter()

    def play(first: list[str]) -> list[tuple[str, list[str]]]:
        output = output_in(tmp_path / str(sum(outcomes.values())))
        committed, chosen = None, []
        with staged(monkeypatch, names) as stage:
            for name in names:
                stage.start(name, output)
            while choices := stage.can_go():
                choice = first[len(chosen)] if len(chosen) < len(first) else choices[0]
                chosen.append((choice, choices))
                stage.go(choice)
                if commits == "after the first" and stage.ended() and committed is None and stage._publishing is None:
                    commit(output)
                    committed = bytes_of(output.folder.local_path)
        if commits == "after both":
            commit(output)
        result = bytes_of(output.folder.local_path)
        assert committed in (None, result)
        assert validate(output.folder.local_path) == []
        [winner] = [name for name in names if alone[name] == result]
        assert all("is committed: part-00000-of-00001.parquet was not written" in str(error) for error in stage.errors.values())
        outcomes[winner] += 1
        return chosen

    assert every_order(play) > 40
    assert set(outcomes) == set(names)


def test_who_publishes_waits_for_who_does(tmp_path):
    folder, order = Folder(str(tmp_path)), []

    def publish() -> None:
        with publishing.publishing(folder):
            order.append("second")

    thread = threading.Thread(target=publish)
    with publishing.publishing(folder):
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
    assert folder.names() == []


def test_a_committed_dataset_is_not_written_to(tmp_path):
    output = output_in(tmp_path / "x")
    attempt(output, "A")
    commit(output)
    before = bytes_of(tmp_path / "x")
    with pytest.raises(DatasetError, match=r"x' is committed: part-00000-of-00001\.parquet was not written"):
        attempt(output, "B")
    assert bytes_of(tmp_path / "x") == before
