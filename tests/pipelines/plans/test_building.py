"""Builds: nothing twice, only what depends on a change, nothing lost, and differences from the lock file by their cause."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from pipelines.plans.job import LockError, StepError
from pipelines.plans.records import hold_build
from schemas.dataset import open_dataset
from schemas.errors import DatasetError, InputError
from tests.pipelines.plans.conftest import WORDS, ForkedStep, write_table

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(900)]

ALL = ["captions", "vocabulary", "encode"]


def content(folder: Path) -> dict[str, bytes]:
    """Everything but what the build remembers for itself."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".plan" not in path.parts
    }


def test_the_result_of_a_changed_parameter_is_that_of_a_fresh_build(folder, built):
    built()
    changed = {"steps.captions.recipe": "raw"}
    built(settings=changed)
    fresh, _ = built(settings=changed, output=str(folder / "fresh"))
    assert [end.done for end in fresh.steps] == ["made"] * 3
    for name in ("captions", "vocabulary", "encoded"):
        assert content(folder / "build/plan" / name) == content(folder / "fresh" / name)


def test_what_changes_nothing_in_the_result_starts_nothing(folder, built):
    built()
    os.utime(folder / "captions.tsv")
    assert built(settings={"steps.captions.workers": "2", "steps.captions.max-failures": "3"})[1] == []


def test_dependants_of_a_step_whose_result_is_the_same_do_not_run(folder, built):
    built()
    _, ran = built(settings={"steps.captions.splits": '["train"]'})
    assert "captions" in ran
    before = content(folder / "build/plan/vocabulary")
    write_table(folder / "captions.tsv", (*WORDS[:-1], "the dog and the bird"))  # The same counts of the same tokens.
    _, ran = built(settings={"steps.captions.splits": '["train"]'})
    assert ran.count("captions") == 2
    assert content(folder / "build/plan/vocabulary").keys() == before.keys()


def test_what_other_values_made_is_kept_and_taken_back(folder, built):
    built()
    before = content(folder / "build/plan")
    built(settings={"steps.vocabulary.min-count": "2"})
    build, ran = built()
    assert ran == []
    assert [end.done for end in build.steps] == ["up to date", "taken back", "taken back"]
    assert content(folder / "build/plan") == before
    assert {path.parent.name for path in (folder / "build/plan/.plan/earlier").glob("*/*")} == {"vocabulary", "encoded"}
    built(prune=True)
    assert not list((folder / "build/plan/.plan/earlier").glob("*/*"))


def test_replace_keeps_nothing(folder, built):
    built()
    built(settings={"steps.vocabulary.min-count": "2"}, replace=True)
    assert not (folder / "build/plan/.plan/earlier").exists()
    assert open_dataset(folder / "build/plan/vocabulary").manifest.parameters["min_count"] == 2


@pytest.mark.parametrize("name", ["_manifest.json", "part-00000-of-00001.parquet"])
def test_a_result_that_is_gone_is_made_again_and_nothing_else(folder, built, name):
    built()
    before = content(folder / "build/plan")
    (folder / "build/plan/vocabulary" / name).unlink()
    assert built()[1] == ["vocabulary"]
    assert content(folder / "build/plan") == before


def test_without_its_memory_a_build_asks_every_command_and_makes_nothing_anew(folder, built):
    built()
    shards = {path: path.stat().st_mtime_ns for path in (folder / "build/plan").rglob("*.parquet")}
    shutil.rmtree(folder / "build/plan/.plan")
    assert built()[1] == ALL
    assert {path: path.stat().st_mtime_ns for path in (folder / "build/plan").rglob("*.parquet")} == shards
    assert built()[1] == []


def test_damage_that_no_size_tells_is_found_by_check(folder, built):
    built()
    before = content(folder / "build/plan")
    [shard] = (folder / "build/plan/vocabulary").glob("*.parquet")
    data = bytearray(shard.read_bytes())
    data[len(data) // 3] ^= 1
    shard.write_bytes(data)
    assert built()[1] == []
    assert built(check=True)[1] == ALL
    assert content(folder / "build/plan") == before


def test_targets_are_made_with_what_they_need(folder, built):
    assert built(targets=("vocabulary",))[1] == ["captions", "vocabulary"]
    assert not (folder / "build/plan/encoded").exists()
    assert built()[1] == ["encode"]


def test_a_step_that_fails_stops_its_dependants_and_names_itself(folder, built):
    (folder / "captions.tsv").write_text("image_id\tlanguage\tportion\tindex\tsplit\ttext\nx\ten\tp\t0\ttrain\t\n")
    with pytest.raises(StepError, match=r"step captions \(captions\) failed") as error:
        built()
    assert error.value.code in (1, 3)
    assert [words[0] for words in ForkedStep.started] == ["captions"]
    write_table(folder / "captions.tsv")
    assert built()[1][-2:] == ["vocabulary", "encode"]


def test_an_input_that_is_missing_shows_before_anything_is_made(folder, built):
    with pytest.raises(InputError, match=r"steps\.captions\.source is '.*none\.tsv', and nothing is there"):
        built(settings={"paths.table": str(folder / "none.tsv")})
    assert not (folder / "build").exists()


def test_two_builds_do_not_mix(folder, built, monkeypatch):
    monkeypatch.setattr("pipelines.plans.records._PATIENCE", 0.1)
    with hold_build(str(folder / "build/plan")), pytest.raises(DatasetError, match="another build is at work there"):
        built()


def test_variables_of_options_are_not_for_steps(folder, built, monkeypatch):
    seen = []
    monkeypatch.setenv("IMAGEPIVOT_CAPTIONS_RECIPE", "raw")
    monkeypatch.setattr(ForkedStep, "__init__", _recording(ForkedStep.__init__, seen))
    monkeypatch.setattr(ForkedStep, "run", _looked)
    with pytest.raises(AssertionError, match="looked"):
        built()
    assert "PATH" in seen[0]
    assert "IMAGEPIVOT_CAPTIONS_RECIPE" not in seen[0]


def _recording(init, seen):
    def record(self, words, environment, *rest):
        seen.append(environment)
        init(self, words, environment, *rest)

    return record


def _looked(self):
    raise AssertionError("looked")


# --- the lock file ---------------------------------------------------------------------------------------------------


def test_the_lock_file_says_the_same_wherever_a_plan_is_built(folder, built, tmp_path_factory):
    built()
    other = tmp_path_factory.mktemp("other")
    for name in ("plan.toml", "captions.tsv", "plan.lock"):
        shutil.copy(folder / name, other / name)
    build, ran = built(plan=str(other / "plan.toml"), locked=True)
    assert ran == ALL
    assert Path(build.output) == other / "build/plan"
    built(plan=str(other / "plan.toml"))
    assert (other / "plan.lock").read_bytes() == (folder / "plan.lock").read_bytes()
    assert str(folder) not in (folder / "plan.lock").read_text()


def test_a_parameter_that_differs_is_named_before_anything_is_made(folder, built):
    built()
    before = content(folder)
    with pytest.raises(LockError, match=r"(?s)nothing was made:\s+steps.vocabulary: parameter min-count: locked 1, here 3"):
        built(settings={"steps.vocabulary.min-count": "3"}, locked=True)
    assert content(folder) == before


def test_an_input_that_differs_is_named(folder, built):
    built()
    write_table(folder / "captions.tsv", ("another text",))
    with pytest.raises(LockError, match=r"1 differences .*\n  steps.captions: input source: locked [0-9a-f]{12}, here"):
        built(locked=True)


def test_a_result_that_differs_is_named_and_what_follows_from_it(folder, built):
    built()
    lock = json.loads((folder / "plan.lock").read_text())
    lock["steps"]["captions"]["content"] = "0" * 64
    lock["steps"]["captions"]["libraries"]["pyarrow"] = "1.0"
    lock["steps"]["encoded"]["content"] = "1" * 64
    (folder / "plan.lock").write_text(json.dumps(lock))
    with pytest.raises(LockError, match=r"(?s)steps.captions: result: locked 000000000000, here .*pyarrow: locked 1.0.*"):
        built(locked=True)
    with pytest.raises(LockError, match=r"steps\.encoded: result: follows from captions"):
        built(locked=True)


def test_weights_that_differ_are_named(folder, built):
    built()
    lock = json.loads((folder / "plan.lock").read_text())
    lock["steps"]["captions"] |= {"content": "0" * 64, "weights": {"weights_sha256": "abc"}}
    (folder / "plan.lock").write_text(json.dumps(lock))
    with pytest.raises(LockError, match=r"steps\.captions: weights: locked weights_sha256 abc, here none"):
        built(locked=True)


def test_a_damaged_lock_file_is_named(folder, built):
    (folder / "plan.lock").write_text("{")
    with pytest.raises(DatasetError, match=r"plan\.lock' is not a lock file"):
        built()
