import csv

import pytest

from pipelines.demo.run import write_scenes
from schemas.errors import UsageError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("scenes") / "new" / "demo"
    write_scenes(path, count=30)
    return path


def rows_of(folder):
    with (folder / "captions.tsv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t"))


def test_folder(folder):
    assert sorted(path.name for path in folder.iterdir()) == ["captions.tsv", "images"]
    image_ids = [f"scene-{number:05d}" for number in range(30)]
    assert sorted(path.name for path in (folder / "images").iterdir()) == [f"{image_id}.jpg" for image_id in image_ids]
    lines = (folder / "captions.tsv").read_bytes().decode("utf-8").split("\n")
    assert lines[0] == "image_id\tlanguage\tportion\tindex\tsplit\ttext"
    assert lines[-1] == ""
    assert lines[1:-1] == sorted(lines[1:-1])
    rows = rows_of(folder)
    assert len(rows) == 30 * 14
    splits = {row["image_id"]: row["split"] for row in rows}
    assert [list(splits.values()).count(split) for split in ("train", "val", "test")] == [24, 3, 3]


def test_two_runs_are_byte_equal_and_a_smaller_one_is_the_beginning(folder, tmp_path):
    write_scenes(tmp_path, count=8)
    write_scenes(tmp_path, count=8)
    images = {path.name: path.read_bytes() for path in (tmp_path / "images").iterdir()}
    assert images == {name: (folder / "images" / name).read_bytes() for name in images}
    assert len(images) == 8
    table = (folder / "captions.tsv").read_bytes()
    assert (tmp_path / "captions.tsv").read_bytes() == b"".join(table.splitlines(keepends=True)[: 1 + 8 * 14])


def test_seed_changes_the_folder(folder, tmp_path):
    write_scenes(tmp_path, count=1, seed=1)
    name = "images/scene-00000.jpg"
    assert (tmp_path / name).read_bytes() != (folder / name).read_bytes()
    assert rows_of(tmp_path) != [row for row in rows_of(folder) if row["image_id"] == "scene-00000"]


def test_folder_with_other_pictures_is_refused(tmp_path):
    write_scenes(tmp_path, count=3)
    before = (tmp_path / "captions.tsv").read_bytes()
    with pytest.raises(UsageError, match=r"found 'scene-00002.jpg'.*give an empty folder"):
        write_scenes(tmp_path, count=2)
    assert (tmp_path / "captions.tsv").read_bytes() == before


def test_broken_run_leaves_no_table(tmp_path, monkeypatch):
    write_scenes(tmp_path, count=2)

    def fail(scene):
        raise OSError("disk full")

    monkeypatch.setattr("pipelines.demo.run.draw", fail)
    with pytest.raises(OSError, match="disk full"):
        write_scenes(tmp_path, count=2)
    assert not (tmp_path / "captions.tsv").exists()
