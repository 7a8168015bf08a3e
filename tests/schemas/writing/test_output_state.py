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
from schemas.footers import Footer, footer_metadata
from schemas.writing.dataset_writer import commit, write_dataset
from schemas.writing.output import OutputDataset
from schemas.writing.output_state import OutputState
from schemas.writing.repair import repair
from schemas.writing.reuse_policy import ReusePolicy
from schemas.writing.shard_writer import open_shard
from schemas.writing.validation import validate
from tests.builders import tree
from tests.schemas.conftest import flip, prepare


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
    """A change of the second of three shards, and its consequences.

    Attributes:
        resume: ``kept``, ``written`` or ``refused`` by the same command; update: with an update.
        commit: ``listed``, ``refused``, or ``deleted`` and refused.
        repair: ``kept``, ``deleted``, ``left`` (a shard of others), or ``-`` (nothing to do).
        verify: only a run that compares digests detects it.
        without_manifest: the status differs with a manifest.
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
    "failures cut": Case("damaged", lambda path, _: cut(failures(path)), "written", "written", "deleted", "deleted"),
    "failures grown": Case("damaged", lambda path, _: grow(failures(path)), "written", "written", "deleted", "deleted"),
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
def situation(request, new_features) -> tuple[Case, Path, OutputDataset]:
    case, committed = CASES[request.param[0]], request.param[1]
    toy = new_features()
    output = replace(toy.output, listings=LISTINGS, version_digests=LISTINGS)
    write_dataset(output, lambda number, shard: fill(toy, number, shard))
    shutil.copytree(toy.path, toy.path.parent / "whole")
    case.change(toy.path, output)
    if not committed:
        (toy.path / "_manifest.json").unlink()
    listings = ("a", "new", "c") if case.status == "stale" else LISTINGS
    return case, toy.path, replace(output, listings=listings)


def fill(toy, number, shard):
    shard.write(toy.table(toy.shard(number)))
    shard.add_failures([FAILURE] if number == 1 else [])
    shard.statistics, shard.version_digest = {"listing": LISTINGS[number]}, LISTINGS[number]


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


def test_shard_status(situation):
    case, _, output = situation
    shard = OutputState(output, ReusePolicy(verify=case.verify)).shards()[1]
    assert shard.status == case.status
    assert shard.is_intact == (case.status in ("stale", "current"))
    assert bool(shard.problem or shard.failures_problem) >= (case.status in ("missing", "claimed", "damaged"))
    if case.verify:
        assert OutputState(output).shards()[1].status == "current"


@pytest.mark.parametrize("update", [False, True], ids=["resume", "update"])
def test_run_by_shard_status(situation, new_features, update):
    case, path, output = situation
    before = tree(path)
    done = run(output, ReusePolicy(verify=case.verify, update=update), new_features())
    assert done == (case.resume if not update else case.update)
    if done == "refused":
        assert tree(path) == before
    elif case.status == "stale":
        assert validate(path) == []
    else:
        assert tree(path) == tree(path.parent / "whole")


def test_commit_by_shard_status(situation):
    case, path, output = situation
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


def test_repair_and_rerun_by_shard_status(situation, new_features):
    case, path, output = situation
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
    if case.repair == "deleted":
        assert run(output, ReusePolicy(verify=True), new_features()) == "written"
        assert tree(path) == tree(path.parent / "whole")


def test_validate_by_shard_status(situation):
    case, path, _ = situation
    if (path / "_manifest.json").exists():
        problems = validate(path)
        assert bool(problems) == (case.status not in ("stale", "current"))
        assert all(SHARD in problem for problem in problems)
    else:
        with pytest.raises(DatasetError, match=r"is not a dataset: it holds no _manifest\.json"):
            validate(path)


# --- what is beside the shards ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("committed", [True, False], ids=["committed", "killed"])
def test_stray_failures_are_deleted(copy_toy, committed):
    toy = copy_toy("features16")  # It has no failures.
    stray = toy.path / f"_failures/{SHARD}.jsonl"
    toy.output.folder.put(f"_failures/{SHARD}.jsonl", b"{}\n")  # Left over by an attempt: it goes, and the shard stays.
    if not committed:
        (toy.path / "_manifest.json").unlink()
    state = OutputState(toy.output)
    assert (state.finished_shards(), state.committed_manifest()) == ({0, 1, 2}, None)
    state.clear()
    assert not stray.exists()


def test_damaged_side_files_are_found(copy_toy):
    toy = copy_toy("vocabulary")
    flip(toy.path / "_vocabulary.txt")
    assert OutputState(toy.output).committed_manifest() is not None
    assert OutputState(toy.output, ReusePolicy(verify=True)).committed_manifest() is None
    for change in (cut, Path.unlink):
        change(toy.path / "_vocabulary.txt")
        assert OutputState(toy.output).committed_manifest() is None


def test_digests_of_the_manifest_outlive_it(copy_toy):
    # Records may be lost; before a run deletes the manifest it puts on record what only the manifest knows.
    toy = copy_toy("features")
    shutil.rmtree(toy.path / ".records")
    (toy.path / toy.output.name(2)).unlink()
    state = OutputState(toy.output)
    state.check_compatible()
    state.clear()
    assert not (toy.path / "_manifest.json").exists()
    flip(toy.path / toy.output.name(0), 200)
    assert OutputState(toy.output, ReusePolicy(verify=True)).finished_shards() == {1}
    toy.write_shard(2)
    toy.write_shard(0)
    commit(toy.output)
    assert validate(toy.path) == []


def test_damaged_record_is_rewritten_with_verify(copy_toy, toys):
    toy = copy_toy("features")
    flip(toy.path / ".records/part-00001-of-00003.jsonl")
    assert OutputState(toy.output).committed_manifest() is not None
    state = OutputState(toy.output, ReusePolicy(verify=True))
    assert state.committed_manifest() is None
    assert state.finished_shards() == {0, 1, 2}
    state.clear()
    toy.commit()
    assert OutputState(toy.output, ReusePolicy(verify=True)).committed_manifest() is not None
    assert tree(toy.path) == tree(toys["features"].path)


# --- what a run must not touch ---------------------------------------------------------------------------------------


def refuse(output, match, *, overwrite=False):
    before = tree(output.folder.local_path)
    with pytest.raises(DatasetError, match=match):
        prepare(output, overwrite=overwrite)
    assert tree(output.folder.local_path) == before


OTHERS = (
    *("index.json", "notes.txt", "thesis/chapter.tex", "_failures/notes", "_truecaser/readme", ".DS_Store"),
    *("_manifest.json.old", "notes.tmp-old/x", "data.tmp-7", "_SUCCESS"),
)
"""Files of other tools, and of people; litdata writes ``index.json``, macOS ``.DS_Store``, Spark ``_SUCCESS``."""


@pytest.mark.parametrize("state", ["missing", "without manifest", "overwrite"])
def test_files_of_other_tools_beside_a_dataset_are_left_alone(copy_toy, remarks, state):
    toy = copy_toy("features")
    for name in OTHERS:
        (toy.path / name).parent.mkdir(exist_ok=True)
        (toy.path / name).write_bytes(b"theirs")
    if state == "missing":
        (toy.path / f"{SHARD}.parquet").unlink()
    elif state == "without manifest":
        (toy.path / "_manifest.json").unlink()
    prepare(toy.output, overwrite=state == "overwrite")
    for number in set(range(3)) - OutputState(toy.output).finished_shards():
        toy.write_shard(number)
    manifest = toy.commit()
    assert {name: (toy.path / name).read_bytes() for name in OTHERS} == dict.fromkeys(OTHERS, b"theirs")
    assert remarks == [f"ignored in {str(toy.path)!r}: '.DS_Store' and 9 more, not part of the dataset"]
    assert validate(toy.path) == []
    assert open_dataset(toy.path).manifest == manifest


LIKE_SHARDS = (
    *("part-00000.parquet", "part-0-of-1.parquet", "part-00000-of-00003.parquet.bak"),
    *("deeper/part-00000-of-00003.parquet", "mine.parquet"),
)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    ("has_dataset", "name"),
    [
        *((True, name) for name in LIKE_SHARDS),
        *((False, name) for name in (*OTHERS, "part-00000-of-00001.parquet", "_failures/part-00000-of-00001.parquet")),
    ],
)
def test_foreign_files_are_refused(copy_toy, new_features, name, has_dataset, overwrite):
    toy = copy_toy("features") if has_dataset else new_features()
    (toy.path / name).parent.mkdir(parents=True, exist_ok=True)
    (toy.path / name).write_bytes(b"mine")
    if not has_dataset:  # Of other tools, whatever their name.
        pq.write_table(pa.table({"precious": [1, 2, 3]}), toy.path / name)
    refuse(toy.output, rf"holds files that do not belong to a dataset, e.g. '{name}'", overwrite=overwrite)


def with_footers_of_version(toy, version):
    for name in (toy.output.name(number) for number in range(toy.output.shards)):
        stored = pq.read_table(toy.path / name)
        with pq.ParquetWriter(toy.path / name, stored.schema.remove_metadata()) as writer:
            writer.write_table(stored)
            footer = footer_metadata(Footer(toy.kind, toy.output.fingerprint, toy.output.parameters, version=version))
            if version == 1:  # It had no digest: version 1 beside a digest is damage.
                del footer["imagepivot.sha256"]
            writer.add_key_value_metadata(footer)


def test_shard_of_a_newer_version_is_not_touched(copy_toy):
    toy = copy_toy("captions")
    (toy.path / "_manifest.json").unlink()
    with_footers_of_version(toy, 3)
    refuse(toy.output, r"captions' has format version 3, .* reads version 2: update imagepivot\. Nothing was written")


@pytest.mark.parametrize("name", ["manifest.json", "lost"])
def test_dataset_of_version_1_is_named_and_not_touched(copy_toy, name):
    toy = copy_toy("captions")
    shutil.rmtree(toy.path / ".records")
    (toy.path / "_manifest.json").rename(toy.path / "manifest.json")
    with_footers_of_version(toy, 1)
    if name == "lost":
        (toy.path / "manifest.json").unlink()
    advice = "has format version 1, .* reads version 2: write the dataset again, into another folder"
    for overwrite in (False, True):
        refuse(toy.output, rf"captions/part-00000-of-00003\.parquet {advice}", overwrite=overwrite)
    before = tree(toy.path)
    for read in (open_dataset, validate, repair):
        with pytest.raises(DatasetError, match=advice if name != "lost" or read is repair else "it holds no _manifest.json"):
            read(toy.path)
    assert {name: data for name, data in tree(toy.path).items() if name != ".lock"} == before


def test_content_of_sources_is_noted_in_the_records_alone(toys, new_features):
    captions, vocabulary = (open_dataset(toys[name].path) for name in ("captions", "vocabulary"))
    toy = new_features("noted")
    output = toy.output.made_from(captions, vocabulary)
    plain = replace(toy, output=replace(new_features("plain").output, inputs=output.inputs))
    plain.write()
    for number in range(3):
        with open_shard(output, number) as shard:
            toy.fill(number, shard)
    manifest = commit(output)
    assert OutputState(output).committed_manifest() == manifest
    both = [{name: data for name, data in tree(one.path).items() if ".records" not in name} for one in (plain, toy)]
    assert both[0] == both[1]
    content = toy.output.made_from(captions).version_digests
    other = replace(output, version_digests=content)
    assert OutputState(other).committed_manifest() is None
    OutputState(other, ReusePolicy(overwrite=True)).check_compatible()
    noted_nothing = replace(plain.output, version_digests=content)
    assert OutputState(noted_nothing).committed_manifest() == open_dataset(plain.path).manifest


FEATURE = {"name": "resnet50-pool", "shape": (2048,), "dtype": "float32", "source": "He et al. 2016"}


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        (
            {"parameters": {"feature": FEATURE, "weights": "sha256:22", "precision": "fp32"}},
            r"weights: stored nothing, now 'sha256:22'; precision: stored nothing, now 'fp32'\): nothing was written",
        ),
        ({"kind": "captions", "parameters": {"tokenizer": "moses"}}, r"kind 'features' instead of 'captions'\)"),
        ({"shards": 4}, "made from other inputs, or with another number of shards"),
        ({"inputs": ({"name": "images", "sha256": "0"},)}, "made from other inputs, or with another number of shards"),
        (  # The nested value, without the fingerprint, says enough.
            {"parameters": {"feature": {**FEATURE, "dtype": "float16"}, "extractor_fingerprint": "34"}},
            r"feature\.dtype: stored 'float32', now 'float16'\)",
        ),
    ],
)
def test_another_dataset_is_refused_with_its_difference(copy_toy, changes, difference):
    refuse(replace(copy_toy("features").output, **changes), rf"holds another dataset \({difference}")


def test_damaged_manifest_is_refused_and_can_be_replaced(copy_toy):
    toy = copy_toy("features")
    (toy.path / "_manifest.json").write_text("{", encoding="utf-8")
    assert OutputState(toy.output).committed_manifest() is None
    refuse(toy.output, r"_manifest\.json is not the manifest of a dataset .*: copy it again, or delete it .*give --overwrite")
    # The advice holds: without the manifest nothing is made again, and with --overwrite everything is.
    manifest = (toy.path / "_manifest.json").read_bytes()
    (toy.path / "_manifest.json").unlink()
    assert OutputState(toy.output).finished_shards() == {0, 1, 2}
    (toy.path / "_manifest.json").write_bytes(manifest)
    prepare(toy.output, overwrite=True)
    assert tree(toy.path) == {}
