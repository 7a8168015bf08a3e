"""Array jobs on toy datasets: tasks write their shards, the last one commits, and what is missing or damaged is named."""

import os
import signal
from dataclasses import replace
from itertools import chain, permutations

import pytest

from schemas.dataset import open_dataset
from schemas.errors import DatasetError, UsageError
from schemas.manifest import Manifest
from schemas.process.shutdown import DetachedError
from schemas.storage.folder import Folder
from schemas.writing.dataset_writer import complete_dataset, write_dataset
from schemas.writing.output import OutputDataset
from schemas.writing.reuse_policy import ArrayTask, ReusePolicy
from schemas.writing.shard_writer import open_shard
from schemas.writing.validation import validate
from tests.builders import tree
from tests.schemas.conftest import flip, make_features

SHARD = "part-{:05d}-of-00003.parquet".format
FAILURE = {"key": "lost-01", "uri": "lost-01.jpg", "stage": "decode", "reason": "empty", "message": "0 bytes"}


def run(
    toy, index: int, count: int = 3, output: OutputDataset | None = None, during=None, made: list[int] | None = None, **policy
) -> Manifest | str:
    """Run a task as the pipelines do; return the manifest, or the message about missing shards."""
    output = output or toy.output

    def write_missing(finished: frozenset[int]) -> None:
        if during is not None:
            during()
        for number in sorted(set(range(output.shards)) - finished):
            replace(toy, output=output).write_shard(number)
            if made is not None:
                made.append(number)

    try:
        return complete_dataset(
            output, write_missing, ReusePolicy(**policy), task=ArrayTask(index, count), libraries=("pillow",)
        )
    except DetachedError as error:
        return str(error)


def nothing() -> None:
    pytest.fail("everything is finished")


@pytest.fixture
def plain(new_features) -> dict[str, bytes]:
    toy = new_features("plain", failures=[FAILURE])
    write_dataset(toy.output, toy.fill, libraries=("pillow",))
    return tree(toy.path)


@pytest.fixture
def toy(new_features):
    return new_features("tasks", failures=[FAILURE])


@pytest.fixture
def committed(toy, plain):
    for index in range(3):
        run(toy, index)
    assert tree(toy.path) == plain
    return toy


# --- which shards ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3, 16, 17, 64])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 16, 64])
def test_every_shard_belongs_to_one_task_and_tasks_differ_by_one_shard(shards, count):
    if count > shards:
        return
    parts = [list(ArrayTask(index, count).shards(shards)) for index in range(count)]
    assert sorted(chain(*parts)) == list(range(shards))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert parts[count - 1][0] == count - 1


@pytest.mark.parametrize("text", ["3", "/64", "-1/4", "1.5/4", "1/2/3", " 1/2", "٣/٤", "64/64", "65/64", "0/0"])
def test_array_task_invalid_values_are_refused(text):
    with pytest.raises(UsageError, match=rf"--task is '{text}', expected I/N"):
        ArrayTask.parse(text)


# --- the last task commits -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_tasks_in_any_order_make_the_bytes_of_a_plain_run(toy, plain, order):
    for done, index in enumerate(order[:2], 1):
        named = {(0, 1): "0-1", (1, 2): "1-2", (0, 2): "0,2"}.get(tuple(sorted(order[done:])), str(order[-1]))
        word = "task" if done == 2 else "tasks"
        assert run(toy, index) == f"{done} of 3 shards are done; missing {named}: run {word} {named} of 3 again"
        assert not (toy.path / "_manifest.json").exists()
        assert len(list(toy.path.glob("part-*"))) == done
    manifest = run(toy, order[2])
    assert tree(toy.path) == plain
    assert manifest == open_dataset(toy.path).manifest
    assert manifest.failure_reasons == {"empty": 1}
    assert validate(toy.path) == []


def test_rerun_task_continues(toy, plain):
    def die():
        toy.write_shard(0)
        raise ZeroDivisionError("killed")

    with pytest.raises(ZeroDivisionError, match="killed"):
        run(toy, 0, 2, during=die)
    made = []
    run(toy, 0, 2, made=made)
    assert made == [2]
    assert "missing 1: run task 1 of 2 again" in run(toy, 0, 2, during=nothing)
    run(toy, 1, 2)
    assert tree(toy.path) == plain


def test_copy_of_a_task_still_writing_at_the_commit(toy, plain):
    run(toy, 0)
    run(toy, 1)
    others = []

    def write_missing(finished):
        for number in sorted({0, 1, 2} - finished):
            with open_shard(toy.output, number) as shard:
                toy.fill(number, shard)
                others.append(run(toy, 2))

    manifest = complete_dataset(toy.output, write_missing, task=ArrayTask(2, 3), libraries=("pillow",))
    assert others == [manifest]
    assert tree(toy.path) == plain


def test_damaged_shard_of_a_finished_dataset_is_made_again_by_its_task_alone(committed, plain):
    (committed.path / SHARD(1)).write_bytes(b"torn")
    before = tree(committed.path)
    with pytest.raises(DatasetError, match=r"2 of 3 shards are done; damaged 1: run task 1 of 3 again"):
        run(committed, 0, during=nothing)
    assert tree(committed.path) == before
    made = []
    run(committed, 1, made=made)
    assert made == [1]
    assert tree(committed.path) == plain


def test_task_with_something_to_write_deletes_nothing_but_the_manifest(committed):
    before = tree(committed.path)
    flip(committed.path / SHARD(1), 1000)
    seen, made = [], []
    assert run(committed, 1, during=nothing) == open_dataset(committed.path).manifest
    assert run(committed, 0, verify=True, during=nothing)
    run(committed, 1, verify=True, made=made, during=lambda: seen.append(set(tree(committed.path))))
    assert made == [1]
    assert seen == [set(before) - {"_manifest.json"} | {".lock"}]
    assert tree(committed.path) == before


# --- what is missing or damaged --------------------------------------------------------------------------------------


def test_each_task_names_those_to_give_again(tmp_path):
    toy = make_features(tmp_path / "many", shards=40)
    for index in (0, 1, 2, 6):
        told = run(toy, index, 8)
    assert told == ("20 of 40 shards are done; missing 3-5,7,11-13,15,19-21,23,27-29,31,35-37,39: run tasks 3-5,7 of 8 again")


def test_last_task_finds_every_flipped_bit(toy, plain):
    run(toy, 0)
    run(toy, 1)
    flip(toy.path / SHARD(0), 1000)
    flip(toy.path / SHARD(1), 1000)
    with pytest.raises(DatasetError, match=r"cannot be committed, 1 of 3 shards are done; damaged 0-1: run tasks 0-1 of 3"):
        run(toy, 2)
    assert not (toy.path / "_manifest.json").exists()
    made = []
    for index in (0, 1):
        run(toy, index, made=made)
    assert made == [0, 1]
    assert tree(toy.path) == plain


@pytest.mark.parametrize("writes", range(1, 9))
def test_task_killed_during_commit_is_rerun(toy, plain, writes):
    """It ends before one of its writes or deletions, without any cleaning up; from some number on it ends well."""
    for index in range(2):
        run(toy, index)
    toy.output.folder.put(f".{SHARD(1)}.tmp-7", b"half")
    child = os.fork()
    if not child:
        try:
            left = iter(range(writes - 1))
            for name in ("put", "delete"):
                operation = getattr(Folder, name)

                def act(*arguments, operation=operation):
                    if not isinstance(arguments[-1], bytes) and next(left, None) is None:  # Bytes are then put as a file.
                        os.kill(os.getpid(), signal.SIGKILL)
                    return operation(*arguments)

                setattr(Folder, name, act)
            run(toy, 2)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    run(toy, 2)
    (toy.path / ".lock").unlink(missing_ok=True)  # All that is left where everything else was done.
    assert tree(toy.path) == plain


# --- other jobs ------------------------------------------------------------------------------------------------------


def test_another_dataset_is_refused_and_its_shard_found_by_the_last_task(toy):
    run(toy, 0)
    other = replace(toy, output=replace(toy.output, parameters={**toy.output.parameters, "weights": "x"}))
    before = tree(toy.path)
    for index in (0, 1):  # Whether or not a shard of its own is there.
        with pytest.raises(
            DatasetError, match=r"holds another dataset \(weights: stored nothing, now 'x'\): nothing was written"
        ):
            run(toy, index, output=other.output)
    assert tree(toy.path) == before
    run(toy, 2)
    with pytest.raises(DatasetError, match=r"stored 'x', now nothing\): this task has written shards 1, which stay\."):
        run(toy, 1, during=lambda: other.write_shard(2))
    assert not (toy.path / "_manifest.json").exists()


def test_files_besides_shards_are_written_by_every_task_and_committed(toy, new_features):
    output = replace(toy.output, files={"_names/classes": b"cat\ndog\n"}, other_files=r"_names/\w+")
    for index in range(2):
        run(toy, index, output=output)
    toy.output.folder.put("index.json", b"{}")  # Of another tool: neither deleted nor committed.
    (toy.path / "_names/classes").unlink()
    run(toy, 2, output=output)
    expected = new_features("named", failures=[FAILURE])
    named = replace(expected.output, files=output.files)
    write_dataset(named, expected.fill, libraries=("pillow",))
    named.folder.put("index.json", b"{}")
    assert tree(toy.path) == tree(expected.path)
    renamed = replace(output, files={"_names/classes": b"cat\nbird\n"})
    run(toy, 0, output=renamed, during=nothing)  # Nothing but the names has changed: they are written, and committed.
    assert (toy.path / "_names/classes").read_bytes() == b"cat\nbird\n"
    assert validate(toy.path) == []
    run(toy, 1, output=replace(output, files={}), during=nothing)  # What another task brought stays.
    assert (toy.path / "_names/classes").read_bytes() == b"cat\nbird\n"
    assert validate(toy.path) == []


# --- changed inputs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", ["keep_removed", "only_add", "check_content"])
def test_updates_without_trace_are_refused(toy, setting):
    listed = replace(toy.output, listings=("a", "b", "c"))
    with pytest.raises(UsageError, match="the task that commits must see which tasks have brought their shards up to date"):
        run(toy, 0, output=replace(listed, version_digests=("x", "y", "z")), update=True, **{setting: True})
    with pytest.raises(UsageError, match="Listing these images does not tell when they changed"):
        run(toy, 0, output=listed, update=True)
    assert tree(toy.path) == {}
