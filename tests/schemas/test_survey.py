"""What is damaged is found: by its size always, by its digest on demand, before the manifest is there and after."""

import shutil

import pytest

from schemas.dataset import open_dataset
from schemas.writing.dataset_writer import commit, write_dataset
from schemas.writing.output import ReusePolicy
from schemas.writing.output_state import OutputState
from schemas.writing.validation import validate

KINDS = [
    *("captions", "encoded", "vocabulary", "features", "features16", "regions", "embeddings", "word-vectors"),
    *("token-features", "token-features16"),
]


def flip(path, position=None):
    data = bytearray(path.read_bytes())
    data[len(data) // 3 if position is None else position] ^= 4
    path.write_bytes(data)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def grow(path):
    path.write_bytes(path.read_bytes() + b"\n")


@pytest.fixture(params=[True, False], ids=["committed", "killed"])
def copy_run(copy_toy, request):
    """Makes a copy of a dataset, with its manifest or as a run leaves it that is killed right before its commit."""

    def copy(name):
        toy = copy_toy(name)
        if not request.param:
            (toy.path / "_manifest.json").unlink()
        return toy

    return copy


def all_but(toy, *numbers):
    return frozenset(range(toy.identity.shards)) - set(numbers)


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_dataset_is_finished(copy_run, kind):
    toy = copy_run(kind)
    for verify in (False, True):
        assert (
            OutputState(toy.output, ReusePolicy(verify=verify)).finished()
            == OutputState(toy.output, ReusePolicy(verify=verify)).whole()
            == all_but(toy)
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", [0, 2])
def test_a_flipped_byte_is_found_by_its_digest(copy_run, kind, number):
    toy = copy_run(kind)
    number = min(number, toy.identity.shards - 1)
    flip(toy.path / toy.output.name(number), 200)
    assert OutputState(toy.output).finished() == all_but(toy)
    assert OutputState(toy.output, ReusePolicy(verify=True)).finished() == all_but(toy, number)
    assert OutputState(toy.output, ReusePolicy(verify=True)).whole() == all_but(toy, number)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", [cut, grow, lambda path: path.write_bytes(b""), lambda path: path.unlink()])
def test_another_size_is_found_at_once(copy_run, kind, change):
    toy = copy_run(kind)
    change(toy.path / toy.output.name(0))
    for verify in (False, True):
        assert OutputState(toy.output, ReusePolicy(verify=verify)).finished() == all_but(toy, 0)
        assert OutputState(toy.output, ReusePolicy(verify=verify)).complete() is None


@pytest.mark.parametrize("kind", ["captions", "features"])
@pytest.mark.parametrize("change", [cut, grow, lambda path: path.write_bytes(b""), lambda path: path.unlink()])
def test_failures_of_another_size_are_found_at_once(copy_run, kind, change):
    toy = copy_run(kind)
    number = toy.failure_shard(toy.failures[0])
    change(toy.path / "_failures" / f"part-0000{number}-of-00003.jsonl")
    for verify in (False, True):
        assert OutputState(toy.output, ReusePolicy(verify=verify)).finished() == all_but(toy, number)


@pytest.mark.parametrize("kind", ["captions", "features"])
def test_a_flipped_byte_of_failures_is_found_by_its_digest(copy_run, kind):
    toy = copy_run(kind)
    number = toy.failure_shard(toy.failures[0])
    flip(toy.path / "_failures" / f"part-0000{number}-of-00003.jsonl")
    assert OutputState(toy.output).finished() == all_but(toy)
    assert OutputState(toy.output, ReusePolicy(verify=True)).finished() == all_but(toy, number)


@pytest.mark.parametrize("kind", ["captions", "features"])
def test_failures_that_a_shard_knows_nothing_of(copy_run, kind):
    toy = copy_run(kind)
    number = next(number for number in range(3) if number not in map(toy.failure_shard, toy.failures))
    (toy.path / "_failures" / f"part-0000{number}-of-00003.jsonl").write_bytes(b"{}\n")
    # Left over by an attempt: it goes, and the shard stays.
    state = OutputState(toy.output)
    assert (state.finished(), state.complete()) == (all_but(toy), None)
    state.clear()
    assert not (toy.path / "_failures" / f"part-0000{number}-of-00003.jsonl").exists()


def test_a_shard_whose_digest_is_nowhere_on_record_is_made_again(copy_toy):
    toy = copy_toy("features")
    (toy.path / ".records/part-00001-of-00003.jsonl").unlink()
    assert OutputState(toy.output, ReusePolicy(verify=True)).finished() == {0, 1, 2}, "the manifest has it"
    (toy.path / "_manifest.json").unlink()
    assert OutputState(toy.output).finished() == {0, 2}
    assert OutputState(toy.output, ReusePolicy(verify=True)).finished() == {0, 2}


def test_a_record_of_another_shard_is_not_believed(copy_toy):
    toy = copy_toy("features")
    (toy.path / "_manifest.json").unlink()
    records = toy.path / ".records"
    shutil.copy(records / "part-00000-of-00003.jsonl", records / "part-00001-of-00003.jsonl")
    assert OutputState(toy.output).finished() == {0, 2}
    assert OutputState(toy.output, ReusePolicy(verify=True)).finished() == {0, 2}


def test_damaged_side_files_are_found(copy_toy):
    toy = copy_toy("vocabulary")
    flip(toy.path / "_vocabulary.txt")
    assert OutputState(toy.output).complete() is not None
    assert OutputState(toy.output, ReusePolicy(verify=True)).complete() is None


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("vocabulary", "word-vectors")])
def test_a_run_that_verifies_makes_what_is_damaged_and_nothing_else(copy_run, toys, kind):
    toy, made = copy_run(kind), []
    flip(toy.path / toy.output.name(1), 200)

    def make(number, shard):
        made.append(number)
        shard.write(toy.table(toy.shard(number)))
        shard.add_failures(failure for failure in toy.failures if toy.failure_shard(failure) == number)
        shard.statistics = {"rows_written": len(toy.shard(number))}

    manifest = write_dataset(toy.output, make, ReusePolicy(verify=True))
    assert made == [1]
    assert manifest == open_dataset(toys[kind].path).manifest
    assert validate(toy.path) == []


def test_the_digests_of_the_manifest_outlive_it(copy_toy):
    # Records may be lost; before a run deletes the manifest it puts on record what only the manifest knows.
    toy = copy_toy("features")
    shutil.rmtree(toy.path / ".records")
    (toy.path / toy.output.name(2)).unlink()
    state = OutputState(toy.output)
    state.refuse()
    state.clear()
    assert not (toy.path / "_manifest.json").exists()
    flip(toy.path / toy.output.name(0), 200)
    assert OutputState(toy.output, ReusePolicy(verify=True)).finished() == {1}
    toy.write_shard(2)
    toy.write_shard(0)
    commit(toy.output)
    assert validate(toy.path) == []


@pytest.mark.parametrize("kind", ["captions", "features"])
def test_a_damaged_record_is_written_again_where_digests_are_compared(copy_toy, toys, kind):
    toy = copy_toy(kind)
    flip(toy.path / ".records/part-00001-of-00003.jsonl")
    assert OutputState(toy.output).complete() is not None
    state = OutputState(toy.output, ReusePolicy(verify=True))
    assert state.complete() is None
    assert state.finished() == {0, 1, 2}
    state.clear()
    toy.commit()
    assert OutputState(toy.output, ReusePolicy(verify=True)).complete() is not None
    for name in toys[kind].output.folder.names():
        assert toy.output.folder.read(name) == toys[kind].output.folder.read(name), name
