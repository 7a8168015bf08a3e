"""What a shard is, for everyone who asks; and how each kind of damage is found, with a manifest and without."""

import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from schemas.dataset import open_dataset
from schemas.errors import DatasetError
from schemas.writing.dataset_writer import commit, write_dataset
from schemas.writing.output import OutputDataset
from schemas.writing.output_state import OutputState
from schemas.writing.repair import repair
from schemas.writing.reuse_policy import ReusePolicy
from schemas.writing.validation import validate
from tests.builders import tree
from tests.schemas.conftest import flip

KINDS = [
    *("captions", "encoded", "vocabulary", "features", "features16", "regions", "embeddings", "word-vectors"),
    *("token-features", "token-features16"),
]


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def grow(path):
    path.write_bytes(path.read_bytes() + b"\n")


# --- one folder in each state, and everyone who looks at it ----------------------------------------------------------

SHARD = "part-00001-of-00003"
LISTINGS = ("a", "b", "c")
FAILURE = {"key": "lost", "uri": "lost.jpg", "stage": "decode", "reason": "empty", "message": "0 bytes"}


@dataclass(frozen=True)
class Case:
    """What is done to the second of three shards, and what then becomes of it.

    Attributes:
        status: what `state_of` says.
        change: makes it so.
        resume: ``kept``, ``written`` or ``refused`` by the same command.
        update: likewise, with an update.
        commit: ``listed``, ``refused``, or ``deleted`` and refused.
        repair: ``kept``, ``deleted``, ``left`` where it is no shard of ours, or ``-`` where there is nothing to do.
        verify: whether only a run that compares digests sees it.
        without_manifest: whether it is only so where no manifest tells.
    """

    status: str
    change: Callable[[Path, OutputDataset], object]
    resume: str
    update: str
    commit: str
    repair: str
    verify: bool = False
    without_manifest: bool = False


def other_dataset(path, output):
    folder = type(output.folder)(str(path.parent / "elsewhere"))
    elsewhere = replace(output, folder=folder, parameters={**output.parameters, "weights": "x"})
    write_dataset(elsewhere, lambda number, shard: shard.write(output.schema.empty_table()))
    shutil.copy(path.parent / "elsewhere" / f"{SHARD}.parquet", path / f"{SHARD}.parquet")


def record_of_another(path, output):
    shutil.copy(path / ".records/part-00000-of-00003.jsonl", path / f".records/{SHARD}.jsonl")


def failures(path: Path) -> Path:
    return path / f"_failures/{SHARD}.jsonl"


CASES = {
    "missing": Case("missing", lambda path, _: (path / f"{SHARD}.parquet").unlink(), "written", "written", "refused", "-"),
    "a link to nothing": Case(
        "missing",
        lambda path, _: ((path / f"{SHARD}.parquet").unlink(), (path / f"{SHARD}.parquet").symlink_to("nowhere")),
        *("written", "written", "refused", "deleted"),
    ),
    "claimed": Case(
        "claimed",
        lambda path, _: (path / f".records/{SHARD}.jsonl").unlink(),
        *("written", "written", "refused", "-"),
        without_manifest=True,
    ),
    "cut": Case("damaged", lambda path, _: cut(path / f"{SHARD}.parquet"), "written", "written", "deleted", "deleted"),
    "flipped": Case(
        "damaged",
        lambda path, _: flip(path / f"{SHARD}.parquet", 200),
        *("written", "written", "deleted", "deleted"),
        verify=True,
    ),
    "failures gone": Case("damaged", lambda path, _: failures(path).unlink(), "written", "written", "deleted", "deleted"),
    "failures flipped": Case(
        "damaged", lambda path, _: flip(failures(path)), "written", "written", "deleted", "deleted", verify=True
    ),
    "record of another": Case("damaged", record_of_another, "written", "written", "deleted", "deleted", without_manifest=True),
    "other": Case("other", other_dataset, "refused", "refused", "refused", "left"),
    "foreign": Case(
        "foreign",
        lambda path, _: pq.write_table(pa.table({"a": [1]}), path / f"{SHARD}.parquet"),
        *("refused", "refused", "refused", "left"),
    ),
    "stale": Case("stale", lambda path, _: None, "refused", "written", "listed", "kept"),
    "current": Case("current", lambda path, _: None, "kept", "kept", "listed", "kept"),
}


IN_FOLDERS = [
    pytest.param((name, committed), id=f"{name}, {'committed' if committed else 'killed'}")
    for name, case in CASES.items()
    for committed in ([False] if case.without_manifest else [True, False])
]


@pytest.fixture(params=IN_FOLDERS)
def given(request) -> tuple[Case, bool]:
    """A case, and whether there is a manifest."""
    return CASES[request.param[0]], request.param[1]


@pytest.fixture
def case(given) -> Case:
    return given[0]


@pytest.fixture
def folder(given, new_features) -> tuple[Path, OutputDataset]:
    """The dataset with its second shard as the case says, and what a run would write there now."""
    case, committed = given
    toy = new_features()
    output = replace(toy.output, listings=LISTINGS, states=LISTINGS)
    write_dataset(output, lambda number, shard: fill(toy, number, shard))
    shutil.copytree(toy.path, toy.path.parent / "whole")
    case.change(toy.path, output)
    if not committed:
        (toy.path / "_manifest.json").unlink()
    listings = ("a", "new", "c") if case.status == "stale" else LISTINGS
    return toy.path, replace(output, listings=listings)


def fill(toy, number, shard):
    shard.write(toy.table(toy.shard(number)))
    shard.add_failures([FAILURE] if number == 1 else [])
    shard.statistics, shard.state = {"listing": LISTINGS[number]}, LISTINGS[number]


def run(output: OutputDataset, policy: ReusePolicy, toy) -> str:
    made = []

    def write(number, shard):
        made.append(number)
        fill(toy, number, shard)

    with suppress(DatasetError):
        write_dataset(output, write, policy)
        assert set(made) <= {1}
        return "written" if made else "kept"
    with pytest.raises(DatasetError, match=r"[Nn]othing was written"):
        write_dataset(output, write, policy)
    return "refused"


def test_what_a_shard_is(case, folder):
    _, output = folder
    shard = OutputState(output, ReusePolicy(verify=case.verify)).shards()[1]
    assert shard.status == case.status
    assert shard.is_whole == (case.status in ("stale", "current"))
    assert bool(shard.problem or shard.failures_problem) >= (case.status in ("missing", "claimed", "damaged"))
    if case.verify:
        assert OutputState(output).shards()[1].status == "current"


@pytest.mark.parametrize("update", [False, True], ids=["resume", "update"])
def test_what_a_run_does_with_it(case, folder, new_features, update):
    path, output = folder
    before = tree(path)
    done = run(output, ReusePolicy(verify=case.verify, update=update), new_features())
    assert done == (case.resume if not update else case.update)
    if done == "refused":
        assert tree(path) == before
    elif case.status == "stale":
        assert validate(path) == []
    else:
        assert tree(path) == tree(path.parent / "whole")


def test_what_a_commit_does_with_it(case, folder):
    path, output = folder
    (path / "_manifest.json").unlink(missing_ok=True)
    was_there = (path / f"{SHARD}.parquet").exists()
    if case.commit == "listed":
        assert commit(output).rows == sum(shard.footer.rows for shard in OutputState(output).shards().values())
    else:
        says = {
            "damaged": "1 of 3 shards were damaged",
            "missing": "is missing after the run: ",
            "other": "is a file of another dataset after the run",
        }
        with pytest.raises(DatasetError, match=rf"{says.get(case.status, '')}.*run the same command again"):
            commit(output)
        assert not (path / "_manifest.json").exists()
    assert (path / f"{SHARD}.parquet").exists() == (was_there and case.commit != "deleted")


def test_what_a_repair_does_with_it(case, folder):
    path, _ = folder
    was_there = (path / f"{SHARD}.parquet").exists()
    is_committed = (path / "_manifest.json").exists()
    done = repair(path)
    if case.repair == "deleted":
        assert f"{SHARD}.parquet" in done.deleted
        assert f"{SHARD}.parquet" in done.missing
    else:
        assert f"{SHARD}.parquet" not in done.deleted
        assert (path / f"{SHARD}.parquet").exists() == was_there
        assert (f"{SHARD}.parquet" in done.left_alone) == (case.repair == "left")
    assert (path / "_manifest.json").exists() == (is_committed and case.repair in ("kept", "left"))


def test_what_validation_says_of_it(case, folder):
    path, _ = folder
    if (path / "_manifest.json").exists():
        problems = validate(path)
        assert bool(problems) == (case.status not in ("stale", "current"))
        assert all(SHARD in problem for problem in problems)
    else:
        with pytest.raises(DatasetError, match=r"is not a dataset: it holds no _manifest\.json"):
            validate(path)


# --- each kind of damage, of each kind of dataset --------------------------------------------------------------------


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
    return frozenset(range(toy.output.shards)) - set(numbers)


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_dataset_is_finished(copy_run, kind):
    toy = copy_run(kind)
    for verify in (False, True):
        assert (
            OutputState(toy.output, ReusePolicy(verify=verify)).finished()
            == OutputState(toy.output, ReusePolicy(verify=verify)).whole()
            == all_but(toy)
        )


def file_of(toy, what) -> tuple[Path, int]:
    """A file of a dataset, and the number of its shard."""
    if what == "failures":
        number = toy.failure_shard(toy.failures[0])
        return toy.path / "_failures" / f"part-0000{number}-of-00003.jsonl", number
    number = min(what, toy.output.shards - 1)
    return toy.path / toy.output.name(number), number


FILES = [*((kind, number) for kind in KINDS for number in (0, 2)), ("captions", "failures"), ("features", "failures")]


@pytest.mark.parametrize(("kind", "what"), FILES)
def test_a_flipped_byte_is_found_by_its_digest(copy_run, kind, what):
    toy = copy_run(kind)
    path, number = file_of(toy, what)
    flip(path, 60)
    assert OutputState(toy.output).finished() == all_but(toy)
    assert OutputState(toy.output, ReusePolicy(verify=True)).finished() == all_but(toy, number)
    assert OutputState(toy.output, ReusePolicy(verify=True)).whole() == all_but(toy, number)


@pytest.mark.parametrize(("kind", "what"), [file for file in FILES if file[1] != 2])
@pytest.mark.parametrize("change", [cut, grow, lambda path: path.write_bytes(b""), lambda path: path.unlink()])
def test_another_size_is_found_at_once(copy_run, kind, what, change):
    toy = copy_run(kind)
    path, number = file_of(toy, what)
    change(path)
    for verify in (False, True):
        assert OutputState(toy.output, ReusePolicy(verify=verify)).finished() == all_but(toy, number)
        assert OutputState(toy.output, ReusePolicy(verify=verify)).committed_manifest() is None


@pytest.mark.parametrize("kind", ["captions", "features"])
def test_failures_that_a_shard_knows_nothing_of(copy_run, kind):
    toy = copy_run(kind)
    number = next(number for number in range(3) if number not in map(toy.failure_shard, toy.failures))
    (toy.path / "_failures" / f"part-0000{number}-of-00003.jsonl").write_bytes(b"{}\n")
    # Left over by an attempt: it goes, and the shard stays.
    state = OutputState(toy.output)
    assert (state.finished(), state.committed_manifest()) == (all_but(toy), None)
    state.clear()
    assert not (toy.path / "_failures" / f"part-0000{number}-of-00003.jsonl").exists()


def test_a_shard_whose_digest_is_nowhere_on_record_is_made_again(copy_toy):
    toy = copy_toy("features")
    (toy.path / ".records/part-00001-of-00003.jsonl").unlink()
    assert OutputState(toy.output, ReusePolicy(verify=True)).finished() == {0, 1, 2}, "the manifest has it"
    (toy.path / "_manifest.json").unlink()
    assert OutputState(toy.output).finished() == {0, 2}
    assert OutputState(toy.output, ReusePolicy(verify=True)).finished() == {0, 2}


def test_damaged_side_files_are_found(copy_toy):
    toy = copy_toy("vocabulary")
    flip(toy.path / "_vocabulary.txt")
    assert OutputState(toy.output).committed_manifest() is not None
    assert OutputState(toy.output, ReusePolicy(verify=True)).committed_manifest() is None
    for change in (cut, Path.unlink):
        change(toy.path / "_vocabulary.txt")
        assert OutputState(toy.output).committed_manifest() is None


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
    state.check_compatible()
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
    assert OutputState(toy.output).committed_manifest() is not None
    state = OutputState(toy.output, ReusePolicy(verify=True))
    assert state.committed_manifest() is None
    assert state.finished() == {0, 1, 2}
    state.clear()
    toy.commit()
    assert OutputState(toy.output, ReusePolicy(verify=True)).committed_manifest() is not None
    for name in toys[kind].output.folder.names():
        assert toy.output.folder.read(name) == toys[kind].output.folder.read(name), name
