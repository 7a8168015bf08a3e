"""Array jobs on toy datasets: the tasks write, the commit ends, and what is missing, damaged or another job's is named."""

import os
import signal
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest

from schemas import events
from schemas.dataset import open_dataset
from schemas.errors import DatasetError, UsageError
from schemas.storage.folder import Folder
from schemas.writing.dataset_writer import commit, write_dataset
from schemas.writing.output import OutputDataset, ReusePolicy, UpdatePolicy, hold
from schemas.writing.task_plan import TaskPlan
from schemas.writing.tasks import ArrayTask, commit_tasks, complete_task, survey_task
from schemas.writing.validation import validate
from tests.schemas.conftest import prepare

SHARD = "part-{:05d}-of-00003.parquet".format
FAILURE = {"key": "lost-01", "uri": "lost-01.jpg", "stage": "decode", "reason": "empty", "message": "0 bytes"}


def tree(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def run(
    toy, index: int, count: int = 3, output: OutputDataset | None = None, during=None, libraries: tuple[str, ...] = (), **policy
):
    """Runs a task as the pipelines do."""
    output = output or toy.output

    def make_missing(finished: frozenset[int]) -> None:
        if during is not None:
            during()
        for number in sorted(set(range(output.shards)) - finished):
            replace(toy, identity=output.identity).write_shard(number)

    return complete_task(output, ArrayTask(index, count), make_missing, ReusePolicy(**policy), libraries=libraries)


@pytest.fixture
def plain(new_features) -> dict[str, bytes]:
    """The files of one plain run."""
    toy = new_features("plain", failures=[FAILURE])
    toy.write()
    return tree(toy.path)


@pytest.fixture
def toy(new_features):
    return new_features("tasks", failures=[FAILURE])


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


def test_a_task_as_the_command_takes_it():
    assert ArrayTask.parse("3/64") == ArrayTask(3, 64)
    assert str(ArrayTask.parse("03/064")) == "3/64"  # Some schedulers pad their numbers.


@pytest.mark.parametrize("text", ["3", "/64", "3/", "-1/4", "1.5/4", "a/b", "1/2/3", " 1/2", "٣/٤"])
def test_what_is_no_task(text):
    with pytest.raises(UsageError, match=r"--task is '.*', expected I/N, e\.g\. 0/64 for the first of 64 tasks"):
        ArrayTask.parse(text)


@pytest.mark.parametrize("text", ["64/64", "65/64", "0/0"])
def test_tasks_are_numbered_from_zero(text):
    with pytest.raises(
        UsageError, match=rf"--task is '{text}', expected I/N with I from 0 to N - 1: tasks are numbered from 0"
    ):
        ArrayTask.parse(text)


def test_more_tasks_than_shards():
    with pytest.raises(UsageError, match=r"--task is '0/64', and there are 16 shards.* 48 of the 64 tasks would have nothing"):
        ArrayTask(0, 64).shards(16)


# --- tasks and the commit --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_tasks_and_a_commit_make_the_bytes_of_a_plain_run(toy, plain, order):
    for done, index in enumerate(order, 1):
        summary = run(toy, index)
        assert (summary.shards, summary.made, summary.rows) == ((index,), 1, len(toy.shard(index)))
        assert not (toy.path / "_manifest.json").exists()
        assert len(list(toy.path.glob("part-*"))) == done
    manifest = commit_tasks(toy.path)
    assert tree(toy.path) == plain
    assert manifest == open_dataset(toy.path).manifest
    assert validate(toy.path) == []


def test_a_task_counts_its_own_failures(toy):
    number = toy.failure_shard(FAILURE)
    for index in range(3):
        summary = run(toy, index)
        assert summary.failure_reasons == ({"empty": 1} if index == number else {})
        assert summary.failed == (index == number)
    assert commit_tasks(toy.path).failure_reasons == {"empty": 1}


def test_fewer_tasks_than_shards(toy, plain):
    assert run(toy, 0, 2).shards == (0, 2)
    assert run(toy, 1, 2).shards == (1,)
    commit_tasks(toy.path)
    assert tree(toy.path) == plain


def test_the_number_of_tasks_may_change_on_the_way(toy, plain):
    run(toy, 0, 3)
    run(toy, 0, 1)
    commit_tasks(toy.path)
    assert tree(toy.path) == plain


def test_a_task_that_is_given_again_continues(toy, plain):
    def die():
        toy.write_shard(0)
        raise ZeroDivisionError("killed")

    with pytest.raises(ZeroDivisionError, match="killed"):
        run(toy, 0, 2, during=die)
    stamp = (toy.path / SHARD(0)).stat().st_mtime_ns
    assert run(toy, 0, 2).made == 1
    assert (toy.path / SHARD(0)).stat().st_mtime_ns == stamp
    assert run(toy, 0, 2, during=lambda: pytest.fail("everything is finished")).made == 0
    run(toy, 1, 2)
    commit_tasks(toy.path)
    assert tree(toy.path) == plain


def test_a_task_leaves_temporary_files_to_the_commit(toy, plain):
    left = [f".{SHARD(1)}.tmp-7", f"_failures/.{SHARD(1)[:-8]}.jsonl.tmp-8", "._tasks.json.tmp-9"]
    run(toy, 0)
    for name in left:
        toy.output.folder.write(name, b"half")
    run(toy, 1)
    run(toy, 2)
    assert set(left) <= set(tree(toy.path))
    commit_tasks(toy.path)
    assert tree(toy.path) == plain


def test_a_plain_run_goes_on_where_tasks_stopped(toy, plain):
    run(toy, 0)
    prepare(toy.output, overwrite=False)
    for number in (1, 2):
        toy.write_shard(number)
    toy.commit()
    assert tree(toy.path) == plain


def test_tasks_go_on_where_a_plain_run_stopped(toy, plain):
    prepare(toy.output, overwrite=False)
    for number in range(3):
        toy.write_shard(number)
    run(toy, 1, during=lambda: pytest.fail("everything is finished"))
    commit_tasks(toy.path)
    assert tree(toy.path) == plain


def test_a_task_of_a_finished_dataset_does_nothing(toy, plain):
    toy.write()
    assert run(toy, 1, during=lambda: pytest.fail("everything is finished")).made == 0
    assert tree(toy.path) == plain


def test_a_damaged_shard_of_a_finished_dataset_is_made_again_by_its_task_alone(toy, plain):
    toy.write()
    (toy.path / SHARD(1)).write_bytes(b"torn")
    before = tree(toy.path)
    run(toy, 0)
    assert tree(toy.path) == before
    run(toy, 1)
    assert not (toy.path / "_manifest.json").exists()
    commit_tasks(toy.path)
    assert tree(toy.path) == plain


def test_digests_that_only_the_manifest_knows_are_put_on_record_before_it_is_deleted(toy, plain):
    toy.write()
    for record in (toy.path / ".records").iterdir():
        record.unlink()
    (toy.path / SHARD(1)).unlink()
    run(toy, 1)
    commit_tasks(toy.path)
    assert tree(toy.path) == plain


# --- checking --------------------------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[1000] ^= 1
    path.write_bytes(data)


def test_a_task_that_checks_makes_its_damaged_shard_again(toy, plain):
    for index in range(3):
        run(toy, index)
    flip(toy.path / SHARD(1))
    assert run(toy, 1).made == 0
    assert run(toy, 0, verify=True).made == 0
    assert run(toy, 1, verify=True).made == 1
    commit_tasks(toy.path)
    assert tree(toy.path) == plain


def test_nothing_of_a_damaged_shard_is_there_when_it_is_made_again(toy):
    run(toy, 1)
    (toy.path / f".records/{SHARD(1)[:-8]}.jsonl").unlink()  # Nothing tells any more whether the bytes are right.
    run(toy, 1, during=lambda: (toy.path / SHARD(1)).exists() and pytest.fail("the shard may be damaged"))


# --- the commit refuses ----------------------------------------------------------------------------------------------


def test_a_commit_before_the_end_names_the_tasks_to_give_again(by_hand, tmp_path):
    toy = by_hand.features(tmp_path / "many", shards=40)
    for index in (0, 1, 2, 6):
        run(toy, index, 8)
    before = tree(toy.path)
    with pytest.raises(DatasetError) as caught:
        commit_tasks(toy.path)
    assert str(caught.value) == (
        f"'{toy.path}' cannot be committed, 20 of 40 shards are not there (missing: 3-5,7,11-13,15,19-21,23,27-29,31,35-37,39). "
        "Give 4 of the 8 tasks again, numbered from 0: 3-5,7; then give this command again"
    )
    assert tree(toy.path) == before


def test_a_commit_tells_damaged_shards_from_missing_ones(toy, plain):
    run(toy, 0)
    run(toy, 1)
    (toy.path / SHARD(1)).write_bytes(b"torn")
    with pytest.raises(DatasetError, match=r"2 of 3 shards are not there \(damaged, or of another dataset: 1; missing: 2\)"):
        commit_tasks(toy.path)
    for index in (1, 2):
        run(toy, index)
    commit_tasks(toy.path)
    assert tree(toy.path) == plain


def test_a_commit_finds_every_flipped_bit_at_once(toy, plain):
    for index in range(3):
        run(toy, index)
    flip(toy.path / SHARD(0))
    flip(toy.path / SHARD(2))
    with pytest.raises(DatasetError, match=r"2 of 3 shards are not there.*Give 2 of the 3 tasks again, numbered from 0: 0,2"):
        commit_tasks(toy.path)
    assert not (toy.path / "_manifest.json").exists()
    for index in (0, 2):
        assert run(toy, index).made == 1
    commit_tasks(toy.path)
    assert tree(toy.path) == plain


def test_a_shard_of_another_identity_is_not_committed(toy):
    for index in range(3):
        run(toy, index)
    replace(toy, identity=replace(toy.identity, parameters={**toy.identity.parameters, "weights": "x"})).write_shard(1)
    with pytest.raises(DatasetError, match=r"damaged, or of another dataset: 1\)\. Give 1 of the 3 tasks again.*: 1;"):
        commit_tasks(toy.path)


def test_a_commit_is_refused_while_a_task_runs(toy):
    run(toy, 0)

    def refused():
        with pytest.raises(DatasetError, match="is in use: another run is writing it"):
            commit_tasks(toy.path)
        with pytest.raises(DatasetError, match="is in use: another run is writing it"):
            write_dataset(toy.output, lambda number, shard: pytest.fail("a plain run writes"))

    run(toy, 1, during=refused)


@pytest.mark.slow
def test_a_task_is_refused_while_a_plain_run_writes(toy):
    with hold(toy.output.folder), pytest.raises(DatasetError, match="is in use: another run is writing it"):
        run(toy, 0)


def test_a_commit_of_a_finished_dataset_changes_nothing(toy, plain):
    manifest = toy.write()
    assert commit_tasks(toy.path) == manifest
    assert tree(toy.path) == plain


def test_a_commit_of_nothing(toy, tmp_path):
    with pytest.raises(DatasetError, match=r"is not a dataset: it holds no _manifest\.json, because it does not exist"):
        commit_tasks(tmp_path / "none")
    assert not (tmp_path / "none").exists()
    toy.write_shard(0)
    with pytest.raises(DatasetError, match=r"is not a dataset: .* Run the command that writes it again to finish it"):
        commit_tasks(toy.path)


def test_before_the_commit_the_folder_says_what_it_lacks(toy):
    run(toy, 0)
    with pytest.raises(
        DatasetError, match=r"is not a dataset yet: the tasks of an array job are writing it.* imagepivot commit"
    ):
        open_dataset(toy.path)


@pytest.mark.parametrize("writes", range(1, 6))
def test_a_commit_that_is_killed_is_given_again(toy, plain, writes):
    """It ends before one of its writes or deletions, without any cleaning up; from some number on it ends well."""
    for index in range(3):
        run(toy, index)
    toy.output.folder.write(f".{SHARD(1)}.tmp-7", b"half")
    child = os.fork()
    if not child:
        try:
            left = iter(range(writes - 1))
            for name in ("_publish", "delete"):
                operation = getattr(Folder, name)

                def act(*arguments, operation=operation):
                    if next(left, None) is None:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return operation(*arguments)

                setattr(Folder, name, act)
            commit_tasks(toy.path)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    commit_tasks(toy.path)
    (toy.path / ".lock").unlink(missing_ok=True)  # All that is left where everything else was done.
    assert tree(toy.path) == plain


# --- other jobs ------------------------------------------------------------------------------------------------------


def test_a_task_of_another_dataset_is_refused(toy):
    run(toy, 0)
    before = tree(toy.path)
    other = replace(toy.output, identity=replace(toy.identity, parameters={**toy.identity.parameters, "weights": "new"}))
    with pytest.raises(DatasetError, match=r"for another dataset \(weights: there nothing, now 'new'\): nothing was written"):
        run(toy, 1, output=other)
    assert tree(toy.path) == before
    (toy.path / "_tasks.json").unlink()  # Then the shards say the same, as to a plain run.
    with pytest.raises(DatasetError, match=r"holds another dataset \(weights: there nothing, now 'new'\): nothing was written"):
        run(toy, 1, output=other)


def test_foreign_files_are_refused(toy):
    toy.output.folder.write("notes.txt", b"mine")
    with pytest.raises(DatasetError, match=r"holds files that do not belong to a dataset, e\.g\. 'notes\.txt'"):
        run(toy, 0)
    assert tree(toy.path) == {"notes.txt": b"mine"}


def test_files_of_other_tools_are_left_alone(toy, monkeypatch):
    remarks = []
    monkeypatch.setattr(events, "_show", remarks.append)
    run(toy, 0)
    toy.output.folder.write("index.json", b"{}")
    for index in (1, 2):
        run(toy, index)
    commit_tasks(toy.path)
    assert (toy.path / "index.json").read_bytes() == b"{}"
    assert remarks == [f"left alone in {str(toy.path)!r}, because it is not of the dataset: 'index.json'"]
    assert validate(toy.path) == []


def test_a_task_with_other_versions_is_refused(toy):
    run(toy, 0, libraries=("pillow",))
    plan = TaskPlan.read(toy.output.folder)
    replace(plan, libraries={**plan.libraries, "pillow": "1.0"}).write(toy.output.folder)
    with pytest.raises(
        DatasetError, match=r"with other libraries: there pillow 1\.0, here pillow [0-9.]+; nothing was written"
    ):
        run(toy, 1, libraries=("pillow",))


def test_the_manifest_names_the_versions_of_the_tasks(toy):
    for index in range(3):
        run(toy, index, libraries=("pillow",))
    plan = TaskPlan.read(toy.output.folder)
    replace(plan, libraries={**plan.libraries, "pillow": "1.0"}).write(toy.output.folder)
    assert commit_tasks(toy.path).libraries["pillow"] == "1.0"


def test_files_besides_shards_are_written_by_every_task_and_committed(toy, new_features):
    output = replace(toy.output, files={"_names/classes": b"cat\ndog\n"})
    for index in range(3):
        run(toy, index, output=output)
    (toy.path / "_names/classes").unlink()
    with pytest.raises(DatasetError, match=r"_names/classes is missing or damaged: give any of the 3 tasks again"):
        commit_tasks(toy.path)
    run(toy, 0, output=output)
    commit_tasks(toy.path)
    expected = new_features("named", failures=[FAILURE])
    named = replace(expected.output, files=output.files)
    named.folder.write("_names/classes", b"cat\ndog\n")
    for number in range(3):
        expected.write_shard(number)
    commit(named)
    assert tree(toy.path) == tree(expected.path)
    renamed = replace(output, files={"_names/classes": b"cat\nbird\n"})
    run(toy, 0, output=renamed)  # Nothing but the names has changed: there is something to commit.
    with pytest.raises(DatasetError, match=r"with other files: there _names/classes [0-9a-f]{12}, here _names/classes"):
        run(toy, 1, output=output)
    commit_tasks(toy.path)
    assert (toy.path / "_names/classes").read_bytes() == b"cat\nbird\n"
    assert validate(toy.path) == []


# --- changed inputs --------------------------------------------------------------------------------------------------


def listed(toy, *listings: str, states: tuple[str, ...] | None = None) -> OutputDataset:
    return replace(toy.output, listings=listings, states=states)


def test_tasks_that_list_other_images_are_refused(toy):
    TaskPlan.of(listed(toy, "a", "b", "c"), tasks=3, libraries=(), updates=False).write(toy.output.folder)
    with pytest.raises(DatasetError, match=r"the images have changed since it began: .* or give all tasks again with --update"):
        survey_task(listed(toy, "a", "b", "d"), ArrayTask(0, 3))
    survey_task(listed(toy, "a", "b", "d", states=("x", "y", "z")), ArrayTask(0, 3), ReusePolicy(update=UpdatePolicy()))


@pytest.mark.parametrize(
    "update",
    [UpdatePolicy(keep_removed=True), UpdatePolicy(only_add=True), UpdatePolicy(check_content=True)],
    ids=["keep", "add", "content"],
)
def test_updates_that_leave_no_trace_are_refused(toy, update):
    with pytest.raises(UsageError, match="the commit must see which tasks have brought their shards up to date"):
        run(toy, 0, output=listed(toy, "a", "b", "c", states=("x", "y", "z")), update=update)
    with pytest.raises(UsageError, match="Listing these images does not tell when they changed"):
        run(toy, 0, output=listed(toy, "a", "b", "c"), update=UpdatePolicy())
    assert tree(toy.path) == {}


# --- the plan --------------------------------------------------------------------------------------------------------


def test_every_task_writes_the_same_plan(toy):
    run(toy, 0)
    first = (toy.path / "_tasks.json").read_bytes()
    (toy.path / "_tasks.json").unlink()
    run(toy, 2)
    assert (toy.path / "_tasks.json").read_bytes() == first
