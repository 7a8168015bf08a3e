"""A stage on which attempts of one shard play every order in which their steps can follow each other."""

from __future__ import annotations

import threading
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
from schemas.writing import open_shard

SPEC = FeatureSpec("x", (2,))


def output_in(location: Path | str) -> Output:
    return Output(Folder(str(location)), Identity("features", {"feature": SPEC.to_json()}, shards=1))


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
        self.unforeseen: list[BaseException] = []

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
            except Exception as error:  # noqa: BLE001 -- in a thread nobody else would see it
                self.unforeseen.append(error)
            finally:
                self._ended.add(name)
                self._stopped[name].release()

        threading.Thread(target=run, name=name, daemon=True).start()
        self._stopped[name].acquire()

    def steps(self, output: Output, choose: Callable[[list[str]], str]) -> Iterator[None]:
        """Start all attempts, and let one after the other take a step, as chosen among those that can; yield after each step."""
        for name in self._turns:
            self.start(name, output)
        while choices := self.can_go():
            self.go(choose(choices))
            yield

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
            if MANIFEST_NAMES[0] not in arguments and MANIFEST_NAMES[1] not in arguments:
                stage.stop()
            return function(folder, *arguments)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(publishing, "publishing", stage.publishing)
        for name in ("state", "_publish", "delete", "tag", "read_tagged", "swap"):
            patch.setattr(Folder, name, stopping(getattr(Folder, name)))
        yield stage


def every_order(play: Callable[[Callable[[list[str]], str]], None]) -> int:
    """Play every order of choices; `play` gets the function that chooses. Return the number of orders."""
    orders, todo = 0, [[]]
    while todo:
        first: list[str] = todo.pop()
        chosen: list[tuple[str, list[str]]] = []

        def choose(choices: list[str], first: list[str] = first, chosen: list[tuple[str, list[str]]] = chosen) -> str:
            choice = first[len(chosen)] if len(chosen) < len(first) else choices[0]
            chosen.append((choice, choices))
            return choice

        play(choose)
        orders += 1
        for number in range(len(first), len(chosen)):
            choice, choices = chosen[number]
            todo += [[*(name for name, _ in chosen[:number]), other] for other in choices if other != choice]
    return orders
