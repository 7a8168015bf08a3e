"""The plan of an array job: the same from every task, read back as it was, refused where it is damaged or another job's."""

import json
from dataclasses import replace

import pytest

from schemas.errors import DatasetError
from schemas.fingerprints import Identity
from schemas.storage.folder import Folder
from schemas.writing.output import OutputDataset
from schemas.writing.survey import Survey
from schemas.writing.task_plan import TaskPlan


@pytest.fixture
def output(tmp_path) -> OutputDataset:
    parameters = {"feature": {"name": "x", "shape": (4,), "dtype": "float32"}, "a": 1}
    identity = Identity("features", parameters, inputs=({"name": "y", "fingerprint": "z"},), shards=2)
    return OutputDataset(
        Folder(str(tmp_path / "data")), identity, ("l0", "l1"), ("s0", "s1"), {"_names/classes": b"cat\n"}, "_names/.*"
    )


def plan_of(output: OutputDataset, *, tasks: int = 2, updates: bool = False) -> TaskPlan:
    return TaskPlan.of(output, tasks=tasks, libraries=("pillow",), updates=updates)


@pytest.mark.parametrize("updates", [False, True])
def test_the_commit_learns_from_it_what_the_tasks_write(output, updates):
    plan_of(output, updates=updates).write(output.folder)
    plan = TaskPlan.read(output.folder)
    assert plan == plan_of(output, updates=updates)
    output.folder.write("_names/classes", b"cat\n")
    known = plan.output(output.folder)
    assert known == replace(output, identity=known.identity, states=output.states if updates else None)
    assert known.identity.fingerprint == output.identity.fingerprint
    assert known.schema == output.schema


def test_a_folder_without_one(output):
    assert TaskPlan.read(output.folder) is None


def test_data_tools_skip_it_and_runs_know_it(output):
    plan_of(output).write(output.folder)
    assert output.folder.names() == ["_tasks.json"]
    Survey(output).refuse()
    Survey(output).clear(frozenset())
    assert output.folder.names() == ["_names/classes"]


@pytest.mark.parametrize("damage", [b"", b"{}", b"[1]", b'{"format": "array job 2"}', b"\xff"])
def test_a_damaged_plan_is_named(output, damage):
    output.folder.write("_tasks.json", damage)
    with pytest.raises(DatasetError, match=r"_tasks\.json is damaged \(.*\): delete it, and give any of the tasks again"):
        TaskPlan.read(output.folder)


def test_a_plan_that_was_edited_is_damaged(output):
    plan_of(output).write(output.folder)
    content = json.loads(output.folder.read("_tasks.json"))
    content["libraries"]["numpy"] = "0"
    output.folder.write("_tasks.json", json.dumps(content).encode())
    with pytest.raises(DatasetError, match="its content does not have the sha256 that it names"):
        TaskPlan.read(output.folder)


@pytest.mark.parametrize("data", [None, b"dog\n"])
def test_a_file_besides_the_shards_is_missing_or_another(output, data):
    if data is not None:
        output.folder.write("_names/classes", data)
    with pytest.raises(DatasetError, match=r"_names/classes is missing or damaged: give any of the 2 tasks again"):
        plan_of(output).output(output.folder)


def test_another_number_of_tasks_takes_the_place_of_the_first(output):
    assert plan_of(output, tasks=1).joined(plan_of(output), output, updates=False) == plan_of(output, tasks=1)


def test_a_task_that_does_not_update_keeps_what_the_updating_ones_wrote(output):
    stored = plan_of(output, updates=True)
    assert plan_of(output).joined(stored, output, updates=False) == stored


def test_an_update_takes_the_place_of_what_was_there(output):
    stored = plan_of(replace(output, listings=("l0", "old")))
    assert plan_of(output, updates=True).joined(stored, output, updates=True) == plan_of(output, updates=True)


@pytest.mark.parametrize(("listings", "states"), [(("l0", "x"), ("s0", "s1")), (("l0", "l1"), ("s0", "x"))])
def test_images_that_changed_since_the_first_task(output, listings, states):
    now = replace(output, listings=listings, states=states)
    with pytest.raises(DatasetError, match=r"the images have changed since it began.* give all tasks again with --update"):
        plan_of(now).joined(plan_of(output, updates=True), now, updates=False)


def test_copies_of_the_images_may_have_other_times(output):
    """Machines may each have a copy of the images: only an update looks at modification times across tasks."""
    now = replace(output, states=("other", "times"))
    assert plan_of(now).joined(plan_of(output), now, updates=False) == plan_of(output)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"files": {"_names/classes": b"dog\n"}},
            r"with other files: there _names/classes \w{12}, here _names/classes \w{12};",
        ),
        ({"files": {}}, r"with other files: there _names/classes \w{12}, here none;"),
    ],
)
def test_tasks_with_other_files(output, changes, message):
    now = replace(output, **changes)
    with pytest.raises(DatasetError, match=message):
        plan_of(now).joined(plan_of(output), now, updates=False)


@pytest.mark.parametrize(
    ("parameters", "shards", "message"),
    [({"a": 2}, 2, r"\(a: there 1, now 2\)"), ({}, 3, r"\(made from other inputs, or with another number of shards\)")],
)
def test_the_tasks_of_another_dataset(output, parameters, shards, message):
    identity = replace(output.identity, parameters={**output.identity.parameters, **parameters}, shards=shards)
    now = replace(output, identity=identity)
    with pytest.raises(DatasetError, match=f"for another dataset {message}: nothing was written. Choose another folder; or"):
        plan_of(now).joined(plan_of(output), now, updates=False)
