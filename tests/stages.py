"""A stage on which attempts of one shard play every order in which their steps can follow each other."""

import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from schemas.errors import DatasetError
from schemas.features import FeatureSpec
from schemas.manifest import MANIFEST_NAME
from schemas.storage.folder import Folder
from schemas.writing import attempts
from schemas.writing.output import OutputDataset
from schemas.writing.shard_writer import open_shard
from tests.builders import tree

Choose = Callable[[list[str], str], str]

SPEC = FeatureSpec("x", (2,))


def output_in(location: Path | str) -> OutputDataset:
    return OutputDataset(Folder(str(location)), "features", {"feature": SPEC.to_json()})


def attempt(output: OutputDataset, name: str) -> None:
    """As on a GPU: bits differ. A has read an image that B could not read; C has the same bytes as A but other bits in them."""
    with open_shard(output, 0) as shard:
        ids = ["a"] if name == "B" else ["a", "b"]
        values = np.full(2 * len(ids), {"A": 1.0, "B": 1.0 + 2**-20, "C": 1.0 + 2**-21}[name], np.float32)
        features = pa.FixedSizeListArray.from_arrays(values, type=output.schema.field("feature").type)
        shard.write(pa.table({"image_id": ids, "feature": features}, schema=output.schema))
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
        self.seen: dict[str, list[str]] = {name: [] for name in names}
        self.errors: dict[str, BaseException] = {}
        self.unforeseen: list[BaseException] = []

    def stop(self) -> None:
        """Wait for one's turn, in an attempt; what is not one, a commit for example, goes on."""
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

    def start(self, name: str, output: OutputDataset) -> None:
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

    def see(self, result: object) -> None:
        """Keep what an attempt got to see: with the turns that it had, all that its next steps depend on."""
        if (name := threading.current_thread().name) in self.seen:
            self.seen[name].append(repr(result))

    def identifier(self) -> uuid.UUID:
        """Return what is another one for each attempt and each of its steps, but the same in each play."""
        name = threading.current_thread().name
        return uuid.uuid5(uuid.NAMESPACE_OID, f"{name} {len(self.seen.get(name, ()))}")

    def steps(self, output: OutputDataset, choose: Choose) -> Iterator[None]:
        """Start all attempts, and let one after the other take a step, as chosen among those that can; yield after each step."""
        for name in self._turns:
            self.start(name, output)
        while choices := self.can_go():
            self.go(choose(choices, repr((tree(output.folder.local_path), self.seen))))
            yield

    def can_go(self) -> list[str]:
        return [name for name in self._turns if name not in self._ended and (not self._publishing or name not in self._waiting)]

    def ended(self) -> list[str]:
        return sorted(self._ended)

    def go(self, name: str) -> None:
        self.seen[name].append("its turn")
        self._turns[name].release()
        self._stopped[name].acquire()


@contextmanager
def staged(monkeypatch: pytest.MonkeyPatch, names: str) -> Iterator[Stage]:
    stage, put = Stage(names), Folder.put

    def stopping(function):
        def call(folder, *arguments, **options):
            is_step = not (folder.is_local and function is put and isinstance(arguments[1], bytes))  # It puts a file, a step.
            if MANIFEST_NAME not in arguments and is_step:
                stage.stop()
            stage.see(result := function(folder, *arguments, **options))
            return result

        return call

    with monkeypatch.context() as patch:
        patch.setattr(attempts, "publishing", stage.publishing)
        patch.setattr(uuid, "uuid4", stage.identifier)
        for name in ("stat", "delete", "read", "put"):
            patch.setattr(Folder, name, stopping(getattr(Folder, name)))
        yield stage


def every_order(play: Callable[[Choose], None]) -> int:
    """Play orders of choices until every one has been played, or has led to where another had been. Return how many were played.

    Args:
        play: gets the function that chooses, and calls it with the choices and all that the rest of the play depends on.
    """
    orders, todo, been = 0, [[]], set()
    while todo:
        first: list[str] = todo.pop()
        chosen: list[str] = []
        others: list[list[str]] = []

        def choose(choices: list[str], state: str, first=first, chosen=chosen, others=others) -> str:
            if len(chosen) < len(first):
                choice = first[len(chosen)]
            else:
                choice = choices[0]
                if state not in been:
                    others += [[*chosen, other] for other in choices[1:]]
                been.add(state)
            chosen.append(choice)
            return choice

        play(choose)
        orders += 1
        todo += others
    return orders
