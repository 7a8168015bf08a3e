"""Two attempts of one shard in a store, in orders in which their requests can follow each other.

The emulator of Google's store ignores conditions: a proxy before it keeps to them, see `tests.stores`.
"""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from schemas.errors import DatasetError
from schemas.fingerprints import sha256_of_bytes
from schemas.manifest import MANIFEST_NAME, Manifest
from schemas.storage.folder import TEMPORARY_MARK, Folder
from schemas.storage.google_storage import GoogleBucket
from schemas.storage.s3 import S3Bucket
from schemas.writing.dataset_writer import commit
from schemas.writing.output_state import OutputState
from schemas.writing.records import record_name
from schemas.writing.validation import validate
from tests.builders import stored
from tests.stages import attempt, output_in, staged
from tests.stores import untagged

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

NAME = "part-00000-of-00001.parquet"


@pytest.fixture
def alone(store) -> dict[str, dict[str, bytes]]:
    """The dataset that each attempt makes alone."""
    made = {}
    for name in "ABC":
        output = output_in(store.address(f"alone/{name}"))
        if OutputState(output).committed_manifest() is None:
            attempt(output, name)
            commit(output)
        made[name] = stored(output.folder.location)
    return made


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("names", "commits"), [("AB", True), ("AC", True), ("AC", False)])
def test_concurrent_attempts_publish_one(monkeypatch, store, alone, names, commits, seed):
    """Orders by chance; tests/schemas/writing/test_attempts.py plays all of them on a disk."""
    output = output_in(store.address(f"{names}/{commits}/{seed}"))
    committed, chance = None, random.Random(seed)
    with staged(monkeypatch, names) as stage:
        for _ in stage.steps(output, lambda choices, state: chance.choice(choices)):
            if commits and stage.ended() and committed is None and OutputState(output).intact_shards():
                commit(output)
                committed = stored(output.folder.location)
    assert stage.unforeseen == []
    commit(output)  # A second one changes nothing.
    result = stored(output.folder.location)
    assert committed in (None, result)
    assert validate(output.folder.location) == []
    kept = untagged if store.scheme == "gs" else dict  # Tags of S3 are of the content, of Google of the write.
    assert kept(result) in [kept(alone[name]) for name in names]
    assert all(f"is committed: {NAME} was not written" in str(error) for error in stage.errors.values())


@pytest.mark.parametrize("committed", [False, True])
def test_attempt_overtaken_during_upload_is_discarded(store, alone, monkeypatch, committed):
    output = output_in(store.address(f"overtaken/{committed}"))
    kind = S3Bucket if store.scheme == "s3" else GoogleBucket
    before, others = kind.write, iter("C")

    def overtaken(bucket, target, *rest):
        if NAME in target and record_name(NAME) not in target and (other := next(others, None)):
            attempt(output, other)
            commit(output)
            if not committed:
                output.folder.delete(MANIFEST_NAME)
        return before(bucket, target, *rest)

    monkeypatch.setattr(kind, "write", overtaken)
    if committed:
        with pytest.raises(DatasetError, match=rf"overtaken/True' is committed: {NAME} was not written"):
            attempt(output, "A")
    else:
        attempt(output, "A")  # The first one that ends is published.
        commit(output)
    assert next(others, None) is None
    assert OutputState(output).committed_manifest() is not None
    assert validate(output.folder.location) == []
    assert [name for name in output.folder.names() if TEMPORARY_MARK in name] == []
    assert output.folder.read(NAME) == alone["C"][NAME]


def test_record_of_another_attempt_is_not_believed(store):
    """Of the same size, as where who overtook was killed: the commit and the next run look at the shard itself."""
    outputs = {name: output_in(store.address(f"mixed/{name}")) for name in "AC"}
    for name, output in outputs.items():
        attempt(output, name)
    folder, other = outputs["A"].folder, outputs["C"].folder
    assert folder.stat(NAME).size == other.stat(NAME).size
    folder.put(record_name(NAME), other.read(record_name(NAME)))
    assert OutputState(outputs["A"]).finished_shards() == set()
    with pytest.raises(DatasetError, match=rf"1 of 1 shards were damaged .* \({NAME} .*\): run the same command again"):
        commit(outputs["A"])
    assert folder.names() == [record_name(NAME)]
    attempt(outputs["A"], "A")
    manifest = commit(outputs["A"])
    assert manifest.shards[0].sha256 == sha256_of_bytes(folder.read(NAME)) != sha256_of_bytes(other.read(NAME))
    before = folder.read(MANIFEST_NAME)
    assert OutputState(outputs["A"]).committed_manifest() is not None
    folder.put(NAME, other.read(NAME))
    assert OutputState(outputs["A"]).committed_manifest() is None
    assert folder.read(MANIFEST_NAME) == before


def test_shard_replaced_during_commit_withdraws_the_manifest(store, monkeypatch):
    output = output_in(store.address("during"))
    attempt(output, "A")
    put = Folder.put

    def late(folder, name, data, if_match=""):
        tag = put(folder, name, data, if_match)
        if name == MANIFEST_NAME:
            put(folder, record_name(NAME), b"claimed by somebody\n", folder.stat(record_name(NAME)).tag)
        return tag

    monkeypatch.setattr(Folder, "put", late)
    with pytest.raises(DatasetError, match=rf"{NAME[:4]}.* was replaced during the commit: run the same command again"):
        commit(output)
    assert MANIFEST_NAME not in output.folder.names()


def test_concurrent_commits_write_the_same_manifest(store):
    output = output_in(store.address("commits"))
    attempt(output, "A")
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda _: commit(output).to_json(), range(4)))
    assert set(made) == {Manifest.read(output.folder).to_json()}
    with pytest.raises(DatasetError, match=r"was committed by another run: run the same command again"):
        commit(output, libraries=("pytest",))


def test_concurrent_creation_of_a_file_succeeds_once(store):
    folder = Folder(store.address("created"))
    with ThreadPoolExecutor(8) as pool:
        tags = list(pool.map(lambda number: folder.put("a/job.json", b"%d" % number, None), range(8)))
    [created] = (number for number, tag in enumerate(tags) if tag is not None)
    assert folder.read("a/job.json") == b"%d" % created
    assert folder.names() == ["a/job.json"]
