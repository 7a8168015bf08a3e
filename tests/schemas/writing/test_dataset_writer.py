"""Writing a dataset from the start of a run to its commit, and going on where one stopped."""

import os
import re
import signal
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest

from schemas.dataset import open_dataset
from schemas.errors import DatasetError
from schemas.storage.folder import Folder
from schemas.writing.dataset_writer import commit, write_dataset
from schemas.writing.locks import lock_folder
from schemas.writing.output import OutputDataset
from schemas.writing.output_state import OutputState
from schemas.writing.reuse_policy import ReusePolicy
from schemas.writing.validation import validate
from tests.builders import tree
from tests.schemas.conftest import blocked_process, prepare


def test_failures_come_before_their_shard_its_record_after_it_and_the_manifest_last(toys, tmp_path, monkeypatch):
    published = []
    publish = Folder.put

    def record(self, name, data, **options):
        if isinstance(data, Path):
            published.append(name)
        publish(self, name, data, **options)

    monkeypatch.setattr(Folder, "put", record)
    toys["vocabulary"].at(tmp_path / "vocabulary").write()
    shard = "part-00000-of-00001"
    assert published == [f"{shard}.parquet", f".records/{shard}.jsonl", "_vocabulary.txt", "_manifest.json"]
    published.clear()
    toy = toys["captions"].at(tmp_path / "captions")
    toy.write()
    failed = set(map(toy.failure_shard, toy.failures))
    shards = [f"part-0000{number}-of-00003" for number in range(3)]
    expected = [
        (*([f"_failures/{shard}.jsonl"] * (number in failed)), f"{shard}.parquet", f".records/{shard}.jsonl")
        for number, shard in enumerate(shards)
    ]
    assert published == [*chain(*expected), "_manifest.json"]


# --- going on where a run was killed ---------------------------------------------------------------------------------

KILLED = """
import sys
from schemas.storage.folder import Folder
from schemas.writing.output import OutputDataset
from schemas.writing.output_state import OutputState
from schemas.writing.locks import lock_folder
from schemas.writing.shard_writer import open_shard

output = OutputDataset(Folder(sys.argv[1]), kind="captions", parameters={"a": 1}, shards=2)
with lock_folder(output.folder):
    state = OutputState(output)
    state.check_compatible()
    state.clear()
    with open_shard(output, 0) as shard:
        shard.add_failures([{"key": "a", "uri": "b", "stage": "prepare", "reason": "empty_caption", "message": ""}])
    with open_shard(output, 1) as shard:
        shard.write(output.schema.empty_table())
        print("ready", flush=True)
        sys.stdin.read()
"""


@pytest.mark.slow
def test_killed_run_is_cleaned_up_and_goes_on(folder):
    output = OutputDataset(folder, kind="captions", parameters={"a": 1}, shards=2)
    finished = [".records/part-00000-of-00002.jsonl", "_failures/part-00000-of-00002.jsonl", "part-00000-of-00002.parquet"]
    with blocked_process(KILLED, folder.location) as process:
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    torn = sorted(set(folder.names()) - {".lock", *finished})
    assert len(torn) == 1
    assert re.fullmatch(r"\.part-00001-of-00002\.parquet\.tmp-\d+", torn[0])
    assert OutputState(output).finished_shards() == {0}
    assert OutputState(output).committed_manifest() is None
    with pytest.raises(DatasetError, match=r"is not a dataset: it holds no _manifest.json"):
        open_dataset(folder.location)
    with lock_folder(folder):
        prepare(output, overwrite=False)
        assert folder.names() == sorted([".lock", *finished])
        assert OutputState(output).finished_shards() == {0}
    assert folder.names() == finished


def test_files_known_before_the_run_are_committed(copy_toy):
    toy = copy_toy("features")
    before = {path.name: path.read_bytes() for path in toy.path.glob("part-*")}
    named = replace(toy.output, files={"_names/classes": b"sky\n", "_names/attributes": b"red\n"})
    assert OutputState(toy.output).committed_manifest() is not None
    assert OutputState(named).committed_manifest() is None, "all but the names is there"
    prepare(named, overwrite=False)
    manifest = commit(named, libraries=("pytest",))
    assert [(entry.path, entry.bytes) for entry in manifest.files] == [("_names/attributes", 4), ("_names/classes", 4)]
    assert sorted(manifest.libraries) == ["imagepivot", "numpy", "pyarrow", "pytest"]
    assert OutputState(named).committed_manifest() == OutputState(toy.output).committed_manifest() == manifest
    assert manifest.fingerprint == toy.output.fingerprint
    assert {path.name: path.read_bytes() for path in toy.path.glob("part-*")} == before
    assert OutputState(replace(named, files={**named.files, "_names/classes": b"man\n"})).committed_manifest() is None
    commit(toy.output)
    assert not (toy.path / "_names/classes").exists()


@pytest.mark.parametrize("old", ["captions", "vocabulary", "features16", "regions"])
def test_overwriting_leaves_nothing_of_the_old_dataset(copy_toy, toys, old):
    toy = toys["features"].at(copy_toy(old).path)
    prepare(toy.output, overwrite=True)
    assert OutputState(toy.output).finished_shards() == set()
    for number in range(3):
        toy.write_shard(number)
    toy.commit()
    assert tree(toy.path) == tree(toys["features"].path)
    assert validate(toy.path) == []


# --- in one call -----------------------------------------------------------------------------------------------------


def test_write_dataset_writes_missing_shards_and_checks_once(toys, tmp_path):
    toy = toys["features"].at(tmp_path / "features")
    toy.write_shard(1)
    made, checks = [], []

    def make(number, shard):
        made.append(number)
        toy.fill(number, shard)

    for _ in range(2):
        write_dataset(toy.output, make, check=lambda: checks.append(list(made)))
    assert (made, checks) == ([0, 2], [[]])


def test_failing_check_replaces_nothing(copy_toy):
    toy = copy_toy("features")
    before = tree(toy.path)

    def check():
        raise ZeroDivisionError("unusable")

    with pytest.raises(ZeroDivisionError, match="unusable"):
        write_dataset(replace(toy.output, shards=2), toy.fill, ReusePolicy(overwrite=True), check=check)
    assert tree(toy.path) == before


def test_nested_statistics_are_summed(tmp_path):
    def make(number, shard):
        shard.statistics = {"captions": {"de": {"tokens": 3 + number}, f"only {number}": 1}, "failed": 0.5}

    manifest = write_dataset(OutputDataset(Folder(str(tmp_path)), "captions", {}, shards=2), make)
    assert manifest.statistics == {"captions": {"de": {"tokens": 7}, "only 0": 1, "only 1": 1}, "failed": 1.0}
