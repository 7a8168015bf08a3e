import shutil
from pathlib import Path

import pytest

from schemas.errors import DatasetError
from schemas.writing.output_state import OutputState
from schemas.writing.repair import Repair, repair
from schemas.writing.reuse_policy import ReusePolicy
from tests.builders import tree
from tests.schemas.conftest import flip

SHARD = "part-{:05d}-of-00003"


@pytest.mark.parametrize("kind", ["captions", "vocabulary", "encoded", "features", "regions", "embeddings"])
def test_whole_dataset_is_left_alone(copy_toy, kind):
    toy = copy_toy(kind)
    before = tree(toy.path)
    assert repair(toy.path) == Repair()
    assert tree(toy.path) == before


def test_text_of_a_vocabulary_is_written_from_its_shard(copy_toy, toys):
    toy = copy_toy("vocabulary")
    assert repair(toy.path) == Repair()
    for break_it in (flip, Path.unlink):
        break_it(toy.path / "_vocabulary.txt")
        assert repair(toy.path) == Repair(mended=("_vocabulary.txt",))
        assert tree(toy.path) == tree(toys["vocabulary"].path)


def test_records_are_written_from_the_manifest(copy_toy, toys):
    toy = copy_toy("features")
    shutil.rmtree(toy.path / ".records")
    assert repair(toy.path) == Repair(mended=tuple(f".records/{SHARD.format(n)}.jsonl" for n in range(3)))
    flip(toy.path / ".records" / f"{SHARD.format(1)}.jsonl")
    assert repair(toy.path) == Repair(mended=(f".records/{SHARD.format(1)}.jsonl",))
    assert tree(toy.path) == tree(toys["features"].path)


def test_repair_uses_records_if_the_manifest_is_damaged(copy_toy, toys):
    toy = copy_toy("features")
    (toy.path / "_manifest.json").write_text("{")
    flip(toy.path / f"{SHARD.format(2)}.parquet")
    assert repair(toy.path).missing == (f"{SHARD.format(2)}.parquet", "_manifest.json")
    assert not (toy.path / "_manifest.json").exists()
    assert OutputState(toy.output, ReusePolicy(verify=True)).finished_shards() == {0, 1}
    toy.write_shard(2)
    toy.commit()
    assert tree(toy.path) == tree(toys["features"].path)


def test_temporary_files_are_deleted_and_those_of_other_tools_stay(copy_toy, toys):
    toy = copy_toy("captions")
    others = {"index.json": b"{}", "notes.tmp-7": b"mine", "sub/.DS_Store": b"\x00", "other.parquet": b"a problem of validate"}
    temporary = f".{SHARD.format(0)}.parquet.tmp-77"
    for name, data in {**others, temporary: b"half"}.items():
        toy.output.folder.put(name, data)
    assert repair(toy.path) == Repair(deleted=(temporary,), left_alone=("index.json", "notes.tmp-7", "sub/.DS_Store"))
    assert tree(toy.path) == {**tree(toys["captions"].path), **others}


def test_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(DatasetError, match="is not a dataset"):
        repair(tmp_path)
    with pytest.raises(DatasetError, match="is not a dataset"):
        repair(tmp_path / "nowhere")
    assert tree(tmp_path) == {"notes.txt": b"mine"}


@pytest.mark.parametrize("name", [".records", ".lock", ".publishing"])
def test_repair_writes_nothing_through_links(copy_toy, tmp_path, name):
    toy = copy_toy("features")
    decoy = tmp_path / "home"
    (decoy / "folder").mkdir(parents=True)
    (decoy / "folder" / f"{SHARD.format(1)}.jsonl").write_text("mine")
    (decoy / "file").write_text("mine")
    before = tree(decoy)
    shutil.rmtree(toy.path / ".records")
    (toy.path / name).symlink_to(decoy / ("folder" if name == ".records" else "file"))
    flip(toy.path / f"{SHARD.format(1)}.parquet")
    with pytest.raises(DatasetError, match=r"the path is a link that is not followed"):
        repair(toy.path)
    assert tree(decoy) == before
