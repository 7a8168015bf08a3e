"""What a step is made from, compared: a second build does nothing, and a changed parameter concerns its dependants alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipelines.plans.deciding import changes
from pipelines.plans.records import Record
from pipelines.plans.states import Found, Result
from schemas.dataset import open_dataset
from tests.pipelines.plans.test_building import ALL, content


@pytest.mark.cluster
@pytest.mark.slow
def test_a_plan_built_twice_does_nothing_the_second_time(folder, built):
    build, ran = built()
    assert ran == ALL
    assert [end.done for end in build.steps] == ["made"] * 3
    before, lock = content(folder), (folder / "plan.lock").stat().st_mtime_ns
    again, ran = built()
    assert ran == []
    assert [end.done for end in again.steps] == ["up to date"] * 3
    assert content(folder) == before
    assert (folder / "plan.lock").stat().st_mtime_ns == lock


@pytest.mark.cluster
@pytest.mark.slow
def test_after_a_changed_parameter_only_its_dependants_run(folder, built):
    built()
    captions = content(folder / "build/plan/captions")
    _, ran = built(settings={"steps.vocabulary.min-count": "2"})
    assert ran == ["vocabulary", "vocabulary", "encode", "encode"]  # The first of each refuses what is there.
    assert open_dataset(folder / "build/plan/vocabulary").manifest.parameters["min_count"] == 2
    assert content(folder / "build/plan/captions") == captions
    assert built(settings={"steps.vocabulary.min-count": "2"})[1] == []


def record(options=None, version="1", **inputs) -> Record:
    return Record("captions", options or {}, {name: Found(*found) for name, found in inputs.items()}, version)


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        (record({"min-count": 4}), record({"min-count": 4}), []),
        (record({"min-count": 4}), record({"min-count": 5}), ["min-count: was 4, now 5"]),
        (record({}), record({"grid": True}), ["grid: was not given, now True"]),
        (record(source=("then", "a")), record(source=("later", "a")), []),
        (record(source=("then", "a")), record(source=("later", "b")), ["source changed"]),
        (record(images=("then", "a", True)), record(images=("later", "a", True)), ["images changed"]),
        (record(), record(version="2"), ["imagepivot: was 1, now 2"]),
    ],
)
def test_what_differs_is_said(before, now, said):
    assert changes(before, now) == said


def test_inputs_that_could_not_be_read_are_tried_again():
    result = Result("features", "f", "c", "s", rows=1, bytes=1, weights={}, libraries={}, unread=2)
    assert changes(replace(record(), result=result), record()) == ["2 inputs could not be read"]
    assert changes(replace(record(), result=replace(result, unread=0)), record()) == []


def test_the_version_is_no_part_of_the_key_and_neither_are_times():
    assert record(source=("then", "a")).key == record(version="2", source=("later", "a")).key
    assert record(source=("then", "a")).key != record(source=("then", "b")).key
