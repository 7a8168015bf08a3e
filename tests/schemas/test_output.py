import os
import re
import signal
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import schemas.writing.output
from schemas.console import events
from schemas.dataset import open_dataset
from schemas.errors import DatasetError
from schemas.footers import Footer
from schemas.storage.folder import Folder
from schemas.writing.dataset_writer import commit
from schemas.writing.output import OutputDataset
from schemas.writing.output_state import OutputState, difference
from schemas.writing.reuse_policy import ReusePolicy
from schemas.writing.shard_writer import lock_folder, open_shard, publishing
from schemas.writing.validation import validate
from tests.builders import tree
from tests.schemas.conftest import prepare

SHARD = "part-{:05d}-of-00003.parquet".format


def with_parameters(output: OutputDataset, **parameters) -> OutputDataset:
    """The same folder, for a dataset of other parameters."""
    return replace(output, parameters={**output.parameters, **parameters})


# --- a run from its start to its commit ------------------------------------------------------------------------------


def test_there_is_no_manifest_before_the_commit(new_features):
    toy = new_features()
    prepare(toy.output, overwrite=False)
    for number in range(3):
        assert OutputState(toy.output).finished() == set(range(number))
        toy.write_shard(number)
        assert not (toy.path / "_manifest.json").exists()
        assert OutputState(toy.output).committed_manifest() is None
    assert OutputState(toy.output).finished() == {0, 1, 2}
    manifest = toy.commit()
    assert OutputState(toy.output).committed_manifest() == manifest == open_dataset(toy.path).manifest
    assert validate(toy.path) == []


def test_the_manifest_is_written_after_everything_else(toys, tmp_path, monkeypatch):
    published = []
    publish = Folder._publish

    def record(self, temporary, name):
        published.append(name)
        publish(self, temporary, name)

    monkeypatch.setattr(Folder, "_publish", record)
    toys["vocabulary"].at(tmp_path / "vocabulary").write()
    shard = "part-00000-of-00001"
    assert published == [f"{shard}.parquet", f".records/{shard}.jsonl", "_vocabulary.txt", "_manifest.json"]


def test_two_runs_give_the_same_bytes(toys, tmp_path):
    for name, toy in toys.items():
        again = toy.at(tmp_path / name)
        again.write()
        assert tree(again.path) == tree(toy.path)


def test_libraries_files_and_statistics_of_a_commit(new_features):
    toy = new_features()
    for number in range(3):
        toy.write_shard(number)
    toy.output.folder.write("_truecaser/en.model", b"model")
    toy.output.folder.write("_truecaser/de.model", b"Modell")
    manifest = commit(
        toy.output,
        statistics=lambda footers: {"rows_by_shard": [footer.rows for footer in footers]},
        libraries=("pytest",),
        files=("_truecaser/en.model", "_truecaser/de.model"),
    )
    assert sorted(manifest.libraries) == ["imagepivot", "numpy", "pyarrow", "pytest"]
    assert [(entry.path, entry.bytes) for entry in manifest.files] == [("_truecaser/de.model", 6), ("_truecaser/en.model", 5)]
    assert manifest.statistics == {"rows_by_shard": [len(toy.shard(number)) for number in range(3)]}
    assert validate(toy.path) == []


# --- going on where a run was killed ---------------------------------------------------------------------------------


KILLED = """
import sys
from schemas.writing.output import OutputDataset
from schemas.writing.shard_writer import open_shard
from schemas.writing.shard_writer import lock_folder
from schemas.storage.folder import Folder
from schemas.writing.output_state import OutputState, difference

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
def test_a_killed_run_is_cleaned_up_and_goes_on(tmp_path, blocked_process):
    folder = Folder(str(tmp_path / "data"))
    output = OutputDataset(folder, kind="captions", parameters={"a": 1}, shards=2)
    finished = [".records/part-00000-of-00002.jsonl", "_failures/part-00000-of-00002.jsonl", "part-00000-of-00002.parquet"]
    with blocked_process(KILLED, folder.location) as process:
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    torn = sorted(set(folder.names()) - {".lock", *finished})
    assert len(torn) == 1
    assert re.fullmatch(r"\.part-00001-of-00002\.parquet\.tmp-\d+", torn[0])
    assert OutputState(output).finished() == {0}
    assert OutputState(output).committed_manifest() is None
    with pytest.raises(DatasetError, match=r"is not a dataset: it holds no _manifest.json"):
        open_dataset(folder.location)
    with lock_folder(folder):
        prepare(output, overwrite=False)
        assert folder.names() == sorted([".lock", *finished])
        assert OutputState(output).finished() == {0}
    assert folder.names() == finished


def test_temporary_files_of_failures_and_truecasers_are_cleaned_up(new_features):
    toy = new_features()
    folder = toy.output.folder
    for name in ("_failures/.part-00001-of-00003.jsonl.tmp-1", "_truecaser/.en.model.tmp-22", "._manifest.json.tmp-3"):
        folder.write(name, b"half")
    prepare(toy.output, overwrite=False)
    assert folder.names() == []


def test_a_complete_dataset_is_found(copy_toy):
    toy = copy_toy("features")
    assert OutputState(toy.output).committed_manifest() == open_dataset(toy.path).manifest
    assert OutputState(with_parameters(toy.output, weights="new")).committed_manifest() is None


def test_files_that_are_known_before_the_run_belong_to_the_dataset(copy_toy):
    toy = copy_toy("features")
    before = {path.name: path.read_bytes() for path in toy.path.glob("part-*")}
    named = replace(toy.output, files={"_names/classes": b"sky\n"})
    assert OutputState(toy.output).committed_manifest() is not None
    assert OutputState(named).committed_manifest() is None, "all but the names is there"
    prepare(named, overwrite=False)
    manifest = commit(named)
    assert [entry.path for entry in manifest.files] == ["_names/classes"]
    assert OutputState(named).committed_manifest() == OutputState(toy.output).committed_manifest() == manifest
    assert manifest.fingerprint == toy.output.fingerprint
    assert {path.name: path.read_bytes() for path in toy.path.glob("part-*")} == before
    assert OutputState(replace(named, files={"_names/classes": b"man\n"})).committed_manifest() is None
    commit(toy.output)
    assert not (toy.path / "_names/classes").exists()


# --- what a run must not touch ---------------------------------------------------------------------------------------


def refuse(output, match, *, overwrite=False):
    before = tree(output.folder.local_path)
    with pytest.raises(DatasetError, match=match):
        prepare(output, overwrite=overwrite)
    assert tree(output.folder.local_path) == before


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        "part-00000.parquet",
        "part-0-of-1.parquet",
        "part-00000-of-00003.parquet.bak",
        "deeper/part-00000-of-00003.parquet",
        "mine.parquet",
    ],
)
def test_foreign_files_that_look_like_shards_are_refused(copy_toy, name, overwrite):
    toy = copy_toy("features")
    (toy.path / name).parent.mkdir(exist_ok=True)
    (toy.path / name).write_bytes(b"mine")
    refuse(
        toy.output,
        rf"holds files that do not belong to a dataset, e.g. '{name}': nothing was written\. Choose a new",
        overwrite=overwrite,
    )


OTHERS = (
    *("index.json", "notes.txt", "thesis/chapter.tex", "_failures/notes", "_truecaser/readme", ".DS_Store"),
    *("_manifest.json.old", "notes.tmp-old/x", "data.tmp-7", "_SUCCESS"),
)
"""Files of other tools, and of people; litdata writes ``index.json``, macOS ``.DS_Store``, Spark ``_SUCCESS``."""


@pytest.fixture
def remarks(monkeypatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(events, "_show", lambda text, style: said.append(text))
    return said


@pytest.mark.parametrize("state", ["missing", "without manifest", "overwrite"])
def test_files_of_other_tools_beside_a_dataset_are_left_alone(copy_toy, remarks, state):
    toy = copy_toy("features")
    for name in OTHERS:
        (toy.path / name).parent.mkdir(exist_ok=True)
        (toy.path / name).write_bytes(b"theirs")
    if state == "missing":
        (toy.path / SHARD(1)).unlink()
    elif state == "without manifest":
        (toy.path / "_manifest.json").unlink()
    prepare(toy.output, overwrite=state == "overwrite")
    for number in set(range(3)) - OutputState(toy.output).finished():
        toy.write_shard(number)
    manifest = toy.commit()
    assert {name: (toy.path / name).read_bytes() for name in OTHERS} == dict.fromkeys(OTHERS, b"theirs")
    assert remarks == [f"left alone in {str(toy.path)!r}, because it is not of the dataset: '.DS_Store' and 9 more"]
    assert validate(toy.path) == []
    assert open_dataset(toy.path).manifest == manifest


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", [*OTHERS, "part-00000-of-00001.parquet", "_failures/part-00000-of-00001.parquet"])
def test_a_folder_with_other_files_and_no_dataset_is_refused(new_features, name, overwrite):
    toy = new_features()
    (toy.path / name).parent.mkdir(parents=True)
    if name.endswith(".parquet"):  # Of other tools, whatever their name.
        pq.write_table(pa.table({"precious": [1, 2, 3]}), toy.path / name)
    else:
        (toy.path / name).write_bytes(b"mine")
        (toy.path / "manifest.json").write_text('{"name": "an extension of a browser", "version": "1"}')
    refuse(toy.output, rf"holds files that do not belong to a dataset, e.g. '{name}'", overwrite=overwrite)


def test_the_content_of_sources_is_noted_in_the_records_alone(toys, new_features):
    captions, vocabulary = (open_dataset(toys[name].path) for name in ("captions", "vocabulary"))
    plain, toy = new_features("plain"), new_features("noted")
    plain.write()
    output = toy.output.made_from(captions, vocabulary)
    for number in range(3):
        with open_shard(output, number) as shard:
            shard.write(toy.table(toy.shard(number)))
            shard.statistics = {"rows_written": shard.rows}
    manifest = commit(output)
    assert OutputState(output).committed_manifest() == manifest
    both = [{name: data for name, data in tree(one.path).items() if ".records" not in name} for one in (plain, toy)]
    assert both[0] == both[1]
    other = toy.output.made_from(captions)
    assert OutputState(other).committed_manifest() is None
    with pytest.raises(DatasetError, match=rf"was not made from what '{toys['captions'].path}' holds now: of 3 of 3 shards"):
        OutputState(other).check_compatible()
    OutputState(other, ReusePolicy(overwrite=True)).check_compatible()
    assert (
        OutputState(plain.output.made_from(captions)).committed_manifest() == open_dataset(plain.path).manifest
    )  # It noted nothing.


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            lambda output: with_parameters(output, weights="sha256:22", precision="fp32"),
            r"holds another dataset \(weights: there nothing, now 'sha256:22'; precision: there nothing, now 'fp32'\): nothing was "
            r"written\. Choose another folder, or give --overwrite to replace it",
        ),
        (  # A spec holds its shape as a tuple, the manifest gives it back as a list: that is no difference.
            lambda output: with_parameters(output, feature={**output.parameters["feature"], "shape": (2048,)}, weights="new"),
            r"holds another dataset \(weights: there nothing, now 'new'\)",
        ),
        (
            lambda output: replace(output, kind="captions", parameters={"tokenizer": "moses"}),
            r"holds another dataset \(kind 'features' instead of 'captions'\)",
        ),
        (lambda output: replace(output, shards=4), "made from other inputs, or with another number of shards"),
        (
            lambda output: replace(output, inputs=({"name": "images", "sha256": "0"},)),
            "made from other inputs, or with another number of shards",
        ),
    ],
)
def test_another_dataset_is_refused_with_what_differs(copy_toy, change, match):
    refuse(change(copy_toy("features").output), match)


def test_another_dataset_is_refused_by_its_shards_alone(copy_toy):
    toy = copy_toy("features")
    (toy.path / "_manifest.json").unlink()
    (toy.path / SHARD(0)).unlink()
    refuse(
        with_parameters(toy.output, weights="sha256:22"), r"holds another dataset \(weights: there nothing, now 'sha256:22'\)"
    )


def test_the_refusal_names_the_nested_value_that_differs(copy_toy):
    toy = copy_toy("features")
    extractor = {"name": "net", "precision": "fp32", "steps": ["a", "b"]}
    before = Footer(toy.kind, "", {**toy.output.parameters, "extractor": extractor, "extractor_fingerprint": "12"})
    now = with_parameters(
        toy.output, extractor={"name": "net", "precision": "bf16", "steps": ["a", "b"]}, extractor_fingerprint="34"
    )
    assert difference(before, now) == "extractor.precision: there 'fp32', now 'bf16'"


def test_long_values_are_shortened_in_the_refusal(copy_toy):
    toy = copy_toy("features")
    with pytest.raises(DatasetError, match=r"notes: there nothing, now '0123456789\S+\.\.\.\)") as caught:
        prepare(with_parameters(toy.output, notes="0123456789" * 100), overwrite=False)
    assert len(str(caught.value)) < 400


def test_a_damaged_manifest_is_refused_and_can_be_replaced(copy_toy):
    toy = copy_toy("features")
    (toy.path / "_manifest.json").write_text("{", encoding="utf-8")
    assert OutputState(toy.output).committed_manifest() is None
    refuse(
        toy.output,
        r"_manifest\.json is not the manifest of a dataset .*: copy it again, or delete it and run the command that made the "
        r"dataset again, which keeps the shards that are whole; or give --overwrite to start anew\. Nothing was written",
    )
    # The advice holds: without the manifest nothing is made again, and with --overwrite everything is.
    manifest = (toy.path / "_manifest.json").read_bytes()
    (toy.path / "_manifest.json").unlink()
    assert OutputState(toy.output).finished() == {0, 1, 2}
    (toy.path / "_manifest.json").write_bytes(manifest)
    prepare(toy.output, overwrite=True)
    assert tree(toy.path) == {}


@pytest.mark.parametrize("old", ["captions", "vocabulary", "features16", "regions"])
def test_overwriting_leaves_nothing_of_the_old_dataset(copy_toy, toys, old):
    toy = toys["features"].at(copy_toy(old).path)
    prepare(toy.output, overwrite=True)
    assert OutputState(toy.output).finished() == set()
    for number in range(3):
        toy.write_shard(number)
    toy.commit()
    assert tree(toy.path) == tree(toys["features"].path)
    assert validate(toy.path) == []


def test_overwriting_with_fewer_truecasers_leaves_none_of_the_others(copy_toy):
    toy = copy_toy("captions")
    for language in ("de", "en"):
        toy.output.folder.write(f"_truecaser/{language}.model", b"model")
    commit(toy.output, files=("_truecaser/de.model", "_truecaser/en.model"))
    assert validate(toy.path) == []
    commit(toy.output, files=("_truecaser/de.model",))
    assert validate(toy.path) == []


# --- two runs at once ------------------------------------------------------------------------------------------------

HOLDER = """
import sys
from schemas.writing.shard_writer import lock_folder
from schemas.storage.folder import Folder

with lock_folder(Folder(sys.argv[1])):
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
def test_a_second_run_is_refused_until_the_first_one_is_killed(tmp_path, blocked_process):
    folder = Folder(str(tmp_path / "data"))
    with blocked_process(HOLDER, folder.location) as process:
        for _ in range(2):
            with pytest.raises(DatasetError, match=r"'.*/data' is in use: another run is writing it"), lock_folder(folder):
                pytest.fail("two runs hold one folder")
        assert folder.names() == [".lock"]  # The refused run did not take the lock of the first away.
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        with lock_folder(folder):
            assert folder.names() == [".lock"]
    assert folder.names() == []


@pytest.mark.slow
def test_a_second_run_is_let_in_when_the_first_one_ends(tmp_path, blocked_process):
    folder = Folder(str(tmp_path / "data"))
    with blocked_process(HOLDER, folder.location) as process:
        process.communicate("go on")
        assert process.returncode == 0
        assert not folder.local_path.exists()
        with lock_folder(folder):
            pass


def test_a_hold_within_one_process(tmp_path):
    folder = Folder(str(tmp_path / "data"))
    with lock_folder(folder):
        with pytest.raises(DatasetError, match="is in use"), lock_folder(folder):
            pytest.fail("two runs hold one folder")
        with lock_folder(Folder(str(tmp_path / "elsewhere"))):
            pass
    with lock_folder(folder):
        pass


def test_a_hold_leaves_the_dataset_without_a_lock(copy_toy):
    toy = copy_toy("features")
    before = tree(toy.path)
    with lock_folder(toy.output.folder):
        assert (toy.path / ".lock").exists()
    assert tree(toy.path) == before


@pytest.mark.parametrize(
    ("name", "left"), [("data", []), ("build/new/data", []), ("own/data", ["own"]), ("own/new/data", ["own"]), ("own", ["own"])]
)
def test_a_refused_run_leaves_the_folders_that_were_there(tmp_path, name, left):
    if name.startswith("own"):
        (tmp_path / "own").mkdir()
    with pytest.raises(ZeroDivisionError, match="refused"), lock_folder(Folder(str(tmp_path / name))):
        raise ZeroDivisionError("refused")
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == left


def test_a_refused_overwrite_leaves_no_lock(copy_toy):
    toy = copy_toy("features")
    (toy.path / "notes.parquet").write_bytes(b"mine")
    before = tree(toy.path)
    with pytest.raises(DatasetError, match=r"notes\.parquet"), lock_folder(toy.output.folder):
        prepare(toy.output, overwrite=True)
    assert tree(toy.path) == before


def test_a_launcher_that_leaves_keeps_the_lock_of_a_worker_that_publishes(tmp_path):
    folder = Folder(str(tmp_path / "data"))
    with lock_folder(folder):
        folder.write(".publishing", b"")  # Of a worker that was killed.
    assert not folder.local_path.exists()
    with publishing(folder):
        with lock_folder(folder):
            assert set(folder.names()) == {".lock", ".publishing"}
        assert folder.names() == [".publishing"]
    assert folder.names() == []


def test_a_lock_that_is_deleted_while_we_wait_is_not_taken(tmp_path, monkeypatch):
    # The other run ends between our opening its lock and our locking it: the file we hold is gone, nobody else sees it.
    folder = Folder(str(tmp_path / "data"))
    flock = schemas.writing.shard_writer.fcntl.flock
    calls = []

    def end_other_run(handle, operation):
        if not calls:
            (folder.local_path / ".lock").unlink()
        calls.append(handle)
        flock(handle, operation)

    monkeypatch.setattr(schemas.writing.shard_writer.fcntl, "flock", end_other_run)
    with lock_folder(folder):
        assert len(calls) == 2
        with pytest.raises(DatasetError, match="is in use"), lock_folder(folder):
            pytest.fail("two runs hold one folder")


@pytest.mark.slow
def test_tasks_share_a_folder_and_keep_runs_out(tmp_path, blocked_process):
    folder = Folder(str(tmp_path / "data"))
    with blocked_process(HOLDER.replace("argv[1])", "argv[1]), shared=True"), folder.location) as process:
        with lock_folder(folder, shared=True):
            assert folder.names() == [".lock"]
        assert folder.names() == [".lock"]  # The other one still holds it.
        with pytest.raises(DatasetError, match=r"'.*/data' is in use: another run is writing it"), lock_folder(folder):
            pytest.fail("a run and a task hold one folder")
        process.communicate("go on")
        assert process.returncode == 0
    assert not folder.local_path.exists()  # The last one deletes it.


@pytest.mark.slow
def test_a_run_keeps_tasks_out(tmp_path, blocked_process):
    folder = Folder(str(tmp_path / "data"))
    with blocked_process(HOLDER, folder.location) as process:
        with pytest.raises(DatasetError, match="is in use"), lock_folder(folder, shared=True):
            pytest.fail("a run and a task hold one folder")
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        with lock_folder(folder, shared=True), lock_folder(folder, shared=True):
            pass
    assert folder.names() == []


def test_of_tasks_that_end_out_of_order_the_last_deletes_the_lock(tmp_path):
    folder = Folder(str(tmp_path / "data"))
    first, second = lock_folder(folder, shared=True), lock_folder(folder, shared=True)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    with pytest.raises(DatasetError, match="is in use"), lock_folder(folder):
        pytest.fail("a run and a task hold one folder")
    second.__exit__(None, None, None)
    assert folder.names() == []


def test_a_task_that_ends_leaves_the_lock_of_a_run_that_began_meanwhile(tmp_path, monkeypatch):
    # Between the task's last look at the lock and its end, another run deletes the file and makes a new one.
    folder = Folder(str(tmp_path / "data"))
    flock = schemas.writing.shard_writer.fcntl.flock

    def replace_lock(handle, operation):
        flock(handle, operation)
        (folder.local_path / ".lock").unlink()
        folder.write(".lock", b"theirs")

    with lock_folder(folder, shared=True):
        monkeypatch.setattr(schemas.writing.shard_writer.fcntl, "flock", replace_lock)
    assert folder.read(".lock") == b"theirs"


def test_a_task_waits_while_another_one_deletes_the_lock(tmp_path, monkeypatch):
    folder = Folder(str(tmp_path / "data"))
    first = lock_folder(folder, shared=True)
    first.__enter__()
    is_last = schemas.writing.shard_writer._is_last

    def wait(handle, path):
        assert is_last(handle, path)  # From here to its end the first task holds the lock alone.
        monkeypatch.setattr(schemas.writing.shard_writer.time, "sleep", lambda seconds: path.unlink())
        return True

    monkeypatch.setattr(schemas.writing.shard_writer, "_is_last", lambda handle, path: wait(handle, path) and enter())
    second = lock_folder(folder, shared=True)

    def enter() -> bool:
        second.__enter__()
        return False

    first.__exit__(None, None, None)
    with pytest.raises(DatasetError, match="is in use"), lock_folder(folder):
        pytest.fail("a run and a task hold one folder")
    monkeypatch.setattr(schemas.writing.shard_writer, "_is_last", is_last)
    second.__exit__(None, None, None)
    assert folder.names() == []


def test_a_folder_that_a_refused_run_deletes_is_made_again(tmp_path, monkeypatch):
    folder = Folder(str(tmp_path / "data"))
    opened = os.open
    calls = []

    def delete_folder(path, *arguments):
        if not calls:
            folder.local_path.rmdir()
        calls.append(path)
        return opened(path, *arguments)

    monkeypatch.setattr(schemas.writing.shard_writer.os, "open", delete_folder)
    with lock_folder(folder, shared=True):
        assert folder.names() == [".lock"]
    assert len(calls) == 2
