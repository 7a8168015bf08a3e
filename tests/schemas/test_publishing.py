"""Two attempts of one shard that differ in their rows and failures, in every order in which their steps can follow each other."""

from __future__ import annotations

import hashlib
import os
import threading
from collections import Counter
from pathlib import Path

import pytest

from schemas.dataset import open_dataset
from schemas.errors import DatasetError
from schemas.fingerprints import sha256_of_bytes
from schemas.storage import object_store
from schemas.storage.folder import Folder
from schemas.storage.object_store import ANY, Bucket, Entry, Page, RefusedError, Written
from schemas.writing import shard_writer
from schemas.writing.dataset_writer import commit
from schemas.writing.output_state import OutputState
from schemas.writing.validation import validate
from tests.stages import Choose, attempt, bytes_of, every_order, output_in, staged


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


@pytest.mark.cluster
@pytest.mark.parametrize("names", ["AB", "AC"])
@pytest.mark.parametrize("commits", ["after the first", "after both"])
def test_two_attempts_at_once_publish_one_of_them(monkeypatch, tmp_path, alone, names, commits):
    outcomes: Counter[str] = Counter()

    def play(choose: Choose) -> None:
        output = output_in(tmp_path / str(sum(outcomes.values())))
        committed = None
        with staged(monkeypatch, names) as stage:
            for _ in stage.steps(output, choose):
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

    assert every_order(play) > 20
    assert set(outcomes) == set(names)


class DiskBucket(Bucket):
    """A disk with the tags and the conditions of a store, in place of locks."""

    def exists(self) -> bool:
        return True

    def page(self, prefix: str, *, after: str, by_folder: bool) -> Page:
        written = {f"{prefix}{name}": data for name, data in bytes_of(Path("/", prefix)).items()}
        return Page([Entry(key, len(data), tag=sha256_of_bytes(data)) for key, data in written.items()], [], "")

    def head(self, key: str) -> Written | None:
        found = self.get(key)
        return None if found is None else Written(found[1], "")

    def get(self, key: str) -> tuple[bytes, str] | None:
        path = Path("/", key)
        return (path.read_bytes(), sha256_of_bytes(path.read_bytes())) if path.is_file() else None

    def part(self, key: str, start: int, stop: int) -> bytes | None:
        found = self.get(key)
        return None if found is None else found[0][start:stop]

    def write(self, key: str, data: bytes | Path, replaces: str | None, writer: str) -> str:
        found = self.head(key)
        if replaces != ANY and replaces != (found and found.tag):
            raise RefusedError(404 if found is None else 412)
        path = Path("/", key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data if isinstance(data, bytes) else data.read_bytes())
        return sha256_of_bytes(path.read_bytes())

    def delete(self, key: str, tag: str) -> None:
        if self.head(key) == Written(tag, ""):
            Path("/", key).unlink()


@pytest.fixture
def tags(monkeypatch):
    monkeypatch.setattr(object_store, "has_tags", lambda location: True)
    monkeypatch.setattr(object_store, "open_bucket", lambda location: DiskBucket())


@pytest.mark.cluster
@pytest.mark.parametrize(("names", "commits"), [("AB", True), ("AC", True)])
def test_two_attempts_at_once_publish_one_of_them_where_there_are_tags(monkeypatch, tmp_path, tags, names, commits):
    outcomes: Counter[str] = Counter()
    monkeypatch.setattr(os, "fsync", lambda handle: None)

    def play(choose: Choose) -> None:
        output = output_in(tmp_path / str(sum(outcomes.values())))
        committed = None
        with staged(monkeypatch, names) as stage:
            for _ in stage.steps(output, choose):
                if commits and stage.ended() and committed is None and OutputState(output).whole():
                    commit(output)
                    committed = bytes_of(output.folder.local_path)
        assert stage.unforeseen == []
        commit(output)  # A second one changes nothing.
        result = bytes_of(output.folder.local_path)
        assert committed in (None, result)
        assert validate(output.folder.local_path) == []
        assert all("is committed: part-00000-of-00001.parquet was not written" in str(error) for error in stage.errors.values())
        rows, failed = (len(open_dataset(output.folder.local_path)), "_failures/part-00000-of-00001.jsonl" in result)
        assert (rows, failed) in ((2, False), (1, True))
        outcomes[hashlib.sha256(result["part-00000-of-00001.parquet"]).hexdigest()] += 1

    assert every_order(play) > 80
    assert len(outcomes) == 2


@pytest.mark.slow
def test_who_publishes_waits_for_who_does(tmp_path):
    folder, order = Folder(str(tmp_path)), []

    def publish() -> None:
        with shard_writer.publishing(folder):
            order.append("second")

    thread = threading.Thread(target=publish)
    with shard_writer.publishing(folder):
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
